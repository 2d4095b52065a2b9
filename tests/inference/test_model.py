"""A trained run opened from Python answers as the commands do, and prints nothing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import systolic
from systolic.cli.main import main
from systolic.core.errors import NotFoundError, OptionError
from systolic.core.reporter import Reporter, reporting
from systolic.formats.outline import contents_of, weight_bytes
from systolic.inference.results import check_files

SIZES = "--model.layers 1 --model.d-model 16 --model.d-ff 16 --model.heads 2 --model.kv-heads 2"
JOB = f"{SIZES} --model.head-dim 8 --sequence 32 --batch 4 --steps 3 --checkpoints.every 2"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text in ``text`` and a byte model of it in ``run``."""
    home = tmp_path_factory.mktemp("opened")
    (home / "text").mkdir()
    for number in range(30):
        (home / "text" / f"{number}.txt").write_text(f"def f{number}(): return {number}\n" * 5)
    args = ["train", "lm", "--path", str(home / "text"), *JOB.split(), "--json"]
    assert main([*args, "--run", str(home / "run")]) == 0
    return home


SCRIPT = """
import contextlib, io, json, sys
import systolic
from systolic.cli.main import main

run, text = sys.argv[1:]
model = systolic.open(run)
made = {
    "step": model.step,
    "metrics": model.evaluate(),
    "train": model.evaluate("train", batches=2),
    "other": model.evaluate(path=text),
    "baselines": model.baselines,
    "texts": model.generate(["def", "return"], tokens=8, seed=3),
    "pieces": list(model.stream("def", tokens=8, seed=3)),
    "long": model.generate("x" * 40, tokens=2),
    "answers": model.predict([text, "nowhere.txt"]),
    "warnings": model.warnings,
}

def command(*args, code=0):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        assert main([*args, "--json"]) == code
    return json.loads(out.getvalue())


told = {
    "eval": command("eval", run),
    "train": command("eval", run, "--split", "train", "--batches", "2"),
    "other": command("eval", run, "--path", text),
    "generate": command("generate", run, "def", "return", "--tokens", "8", "--seed", "3"),
    "predict": command("predict", run, text, "nowhere.txt", code=1),
}
with open("made.json", "w") as file:
    json.dump([made, told], file)
"""


@pytest.mark.slow
def test_python_answers_as_the_commands_do(home: Path, tmp_path: Path) -> None:
    """In one process of their own: what earlier tests set in JAX changes the last bits."""
    run, text = str(home / "run"), str(home / "text" / "7.txt")
    command = [sys.executable, "-c", SCRIPT, run, text]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    made, told = json.loads((tmp_path / "made.json").read_text())

    assert made["step"] == told["eval"]["step"] == 3
    assert made["metrics"] == told["eval"]["metrics"]
    assert made["baselines"] == told["eval"]["baselines"]
    assert made["train"] == told["train"]["metrics"]
    assert made["other"] == told["other"]["metrics"]
    assert made["texts"] == [answer["text"] for answer in told["generate"]["answers"]]
    assert "".join(made["pieces"]) == made["texts"][0]
    for answer in told["predict"]["predictions"]:
        del answer["file"]
    assert made["answers"] == told["predict"]["predictions"]
    (warning,) = made["warnings"]
    assert warning.startswith("41 tokens of prompt and up to 2 new ones exceed the 32")


BYTES = """
from pathlib import Path
from systolic.data.text.documents import StandardLibrary
from systolic.job import Batch, Job
from systolic.models.decoder.config import Decoder
from systolic.steps.tasks import LanguageModel, Unit

def job(root: Path) -> Job:
    model = Decoder(layers=1, d_model=16, d_ff=16, heads=2, kv_heads=2, head_dim=8, vocab=264)
    data = StandardLibrary(sequence=32, root=root)
    task = LanguageModel(unit=Unit.byte)
    return Job(name="tiny", model=model, task=task, data=data, steps=1, batch=Batch(total=4))
"""


@pytest.mark.slow
def test_baselines_are_those_of_the_data_that_was_evaluated(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run on Python files has those of gzip, other text has none."""
    run, text = str(tmp_path / "run"), str(home / "text" / "7.txt")
    (tmp_path / "tiny.py").write_text(BYTES)
    (tmp_path / "code").mkdir()
    for number in range(30):
        (tmp_path / "code" / f"{number}.py").write_text(f"def f{number}(): return {number}\n" * 5)
    words = [f"{tmp_path}/tiny.py:job", "--root", str(tmp_path / "code"), "--run", run, "--json"]
    assert main(["train", *words]) == 0
    capsys.readouterr()
    found = {}
    for name, more in {"own": [], "other": ["--path", text]}.items():
        assert main(["eval", run, "--batches", "1", "--json", *more]) == 0
        found[name] = json.loads(capsys.readouterr().out)["baselines"]
    assert 0 < found["own"]["gzip_joined_bits_per_byte"] < found["own"]["gzip_bits_per_byte"] < 8
    assert found["other"] == {}


def test_a_damaged_checkpoint_is_a_warning(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(home / "run", run)
    files = [path for path in (run / "checkpoints" / "3" / "params").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    told: list[str] = []
    model = systolic.open(run, warn=told.append)
    (line,) = told
    assert line.startswith("checkpoint 3 is damaged")
    assert line.endswith("using step 2")
    assert model.warnings == []
    assert systolic.open(run, 2).step == 2


def test_contents_are_those_of_the_checkpoint_that_is_read(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(home / "run", run)
    last = run / "checkpoints" / "3"
    last.rename(tmp_path / "3")
    before = contents_of(run, "best"), contents_of(run, "2")
    assert before[0] == contents_of(run, "last")
    (tmp_path / "3").rename(last)
    assert contents_of(run, "last") not in before
    assert contents_of(run, "2") == before[1]
    # Of the weights alone, whose optimizer has twice as much beside them.
    elements = sum(p.size for p in systolic.open(run).weights.params.values())
    assert weight_bytes(run) == 4 * elements
    (last / "manifest.json").write_text("{")
    assert weight_bytes(run, "3") == 0
    assert weight_bytes(tmp_path / "nothing") == 0


def test_mistakes_are_errors_of_one_line(home: Path) -> None:
    with pytest.raises(NotFoundError):
        systolic.open(home / "nowhere")
    model = systolic.open(home / "run")
    with pytest.raises(OptionError, match="give one of them"):
        model.evaluate("train", path=home / "text")
    with pytest.raises(OptionError, match="lm has no test data"):
        model.evaluate("test")
    with pytest.raises(OptionError, match="tokens is 0"):
        model.generate("a", tokens=0)
    with pytest.raises(OptionError, match="'tset' is no split; did you mean test"):
        model.evaluate("tset")
    with pytest.raises(OptionError, match="batches is -1; it must be at least 0"):
        model.evaluate(batches=-1)
    with pytest.raises(OptionError, match="3 is no split; give train or validation or test"):
        model.evaluate(3)  # ty: ignore[invalid-argument-type]
    with pytest.raises(OptionError, match=r"tokens is 1\.5; it takes a whole number"):
        model.generate("a", tokens=1.5)  # ty: ignore[invalid-argument-type]
    with pytest.raises(OptionError, match="prompts is 5; give a text"):
        model.generate(5)  # ty: ignore[invalid-argument-type]
    with pytest.raises(OptionError, match="the prompt is 5; give a text"):
        model.generate([5])  # ty: ignore[invalid-argument-type]
    with pytest.raises(OptionError, match="files has the type int; give a path"):
        model.predict(5)  # ty: ignore[invalid-argument-type]


class Noted(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.lines: list[str] = []

    def update(self, state: Any) -> None:
        self.states.append(state)

    def warn(self, text: str) -> None:
        self.lines.append(text)


def test_functions_answer_as_the_opened_model_and_report_as_they_go(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = systolic.open(home / "run"), home / "text" / "7.txt"
    with reporting(Noted()) as noted:
        texts = systolic.generate(model, ["def", "return"], tokens=4, seed=3)
    assert [text.text for text in texts.texts] == model.generate(
        ["def", "return"], tokens=4, seed=3
    )
    assert texts.step == 3
    begun = [state.number for state in noted.states if state.begins]
    assert begun == [state.number for state in noted.states if state.ends] == [0, 1]
    for number, text in enumerate(texts.texts):
        pieces = [state.text for state in noted.states if state.number == number]
        assert "".join(pieces) == text.text
        assert text.finish is not None

    with reporting(Noted()) as noted:
        answers = systolic.predict(home / "run", [file, "nowhere.txt"])
    assert answers.failed == len(noted.lines) == len(noted.states) == 1
    assert "nowhere.txt" in noted.lines[0]
    assert answers.to_json()["predictions"][0] == {"file": str(file), **model.predict(file)[0]}

    measured = systolic.evaluate(model, split="train", batches=1)  # ty: ignore[invalid-argument-type]
    assert measured.metrics == model.evaluate("train", batches=1)
    assert measured.path == home / "run"
    assert capsys.readouterr() == ("", "")
    with pytest.raises(OptionError, match="open already, at its checkpoint; leave out"):
        systolic.generate(model, "def", checkpoint="2")
    with pytest.raises(OptionError, match=r"^split is 'tset'; did you mean test\?; it takes"):
        systolic.evaluate(model, split="tset")  # ty: ignore[invalid-argument-type]


def test_texts_are_printed_as_they_come(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = systolic.open(home / "run")
    first, second = model.generate(["def", "a"], tokens=3, seed=3)
    words = ["generate", str(home / "run"), "def", "a", "--tokens", "3", "--seed=3"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"def{first}\n\na{second}\n"


def test_one_stop_string_and_one_file_need_no_list(home: Path) -> None:
    model, file = systolic.open(home / "run"), home / "text" / "7.txt"
    whole = model.generate("def", tokens=8)[0]
    assert model.generate("def", tokens=8, stop=whole[1:3]) == [whole[: whole.index(whole[1:3])]]
    with pytest.raises(OptionError, match="a stop string is empty"):
        model.generate("def", tokens=8, stop="")
    (answer,) = model.predict([file])
    assert answer["tokens"] > 0
    assert model.predict(file) == model.predict(str(file)) == [answer]


def test_a_folder_in_place_of_a_file_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(
        NotFoundError, match=r"is not a file; it is a folder, give its files \(\S+/\*\)"
    ):
        check_files([tmp_path])
