"""Wrong command lines over all options of all verbs: one line each, and none is accepted."""

import json
import shutil
from pathlib import Path

import pytest

from systolic.cli.main import main
from tests.cli.wrong import Wrong, wrong_lines

NUMBER = 120


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained language model, beside the text that it was trained on."""
    folder = tmp_path_factory.mktemp("wrong")
    text = folder / "text file.txt"
    text.write_text("a file with a space in its name\n" * 100)
    small = ["--model.layers", "1", "--model.d-model", "32", "--model.d-ff", "32", "--model.ngrams"]
    size = [*small, "0", "--steps", "1", "--sequence", "32", "--evaluation.batches", "1"]
    run = folder / "a run"
    assert main(["train", "lm", "--path", str(text), *size, "--run", str(run), "--json"]) == 0
    return run


@pytest.fixture(scope="module")
def lines(run: Path) -> list[Wrong]:
    return wrong_lines(run, run.parent / "text file.txt", NUMBER, seed=0)


def test_weights_of_a_version_that_read_them_otherwise_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old"
    shutil.copytree(run, old)
    job = json.loads((old / "job.json").read_text())
    assert job["job"]["model"]["tie_embeddings"]
    assert main(["eval", str(old), "--split", "train"]) == 0
    del job["revision"]  # earlier versions did not write it
    (old / "job.json").write_text(json.dumps(job))
    capsys.readouterr()
    for verb in (("eval", "--split", "train"), ("generate", "--tokens", "2")):
        assert main([verb[0], str(old), *verb[1:]]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "was trained by an earlier version, in which tied embeddings had a scale" in line


def test_wrong_command_lines_are_each_refused_in_one_line(
    lines: list[Wrong],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(lines) == NUMBER
    for args, why in lines:
        capfd.readouterr()
        line = f"systolic {' '.join(args)} ({why})"
        code = main(list(args))
        told = [one for one in capfd.readouterr().err.splitlines() if one.startswith("systolic:")]
        # 2 for the line itself, 1 for what a file of it holds or a place to write to.
        assert code in (1, 2), f"{code}: {line}"
        assert len(told) == 1, f"{line}: {told}"
        assert not list(tmp_path.iterdir()), f"left something: {line}"


MISUSED = [
    (("train", "lm", "--path", "TEXT", "--run", "RUN"), "RUN already holds a run; continue it"),
    (("train", "lm", "--path", "TEXT", "--run", "TEXT"), "TEXT is not empty and not a run; choose"),
    (("eval", "RUN", "--split", "test"), "lm has no test data; choose --split train"),
    (("predict", "RUN", "nowhere.txt"), "nowhere.txt"),
    (("train", "--resume", "RUN", "--executable", "nowhere"), "nowhere does not exist"),
    (
        ("train", "--resume", "RUN", "--plan", "x.json"),
        "systolic train --resume 'RUN' has no option --plan; see systolic train --resume 'RUN' --help",
    ),
    (
        ("explain", "RUN", "--on", "v5e-4"),
        "systolic explain 'RUN' has no option --on; see systolic explain 'RUN' --help",
    ),
    (
        ("train", "--resume", "RUN", "--rehearse", "v5e-4"),
        "systolic train --resume 'RUN' has no option --rehearse; see",
    ),
    (
        ("forecast", "lm", "--on", "v5e-1", "--layout.microbatches", "4"),
        "--layout.microbatches has no effect here; leave it out",
    ),
    (
        ("forecast", "lm", "--on", "v5e-1", "--model.window", "64", "--model.global-every", "99"),
        "--model.global-every is 99 and --model.layers 12, so that it has no effect",
    ),
    (
        ("train", "bytes", "--model.rounding.largest", "224"),
        "--model.rounding is set but precision is auto, so that it has no effect; leave it out, or",
    ),
    (
        ("forecast", "image", "--path", "TEXT", "--on", "v5e-1", "--classes", "9", "--patch", "8"),
        "--patch is for vision transformers only, and the model is resnet50",
    ),
]
"""Lines that a person wrote, each wrong whatever the files hold; RUN and TEXT stand for those of the fixture."""


@pytest.mark.parametrize(("args", "said"), MISUSED, ids=[" ".join(args) for args, _ in MISUSED])
def test_a_misused_line_is_refused_with_2(
    run: Path, args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RUN": str(run), "TEXT": str(run.parent / "text file.txt")}

    def placed(text: str) -> str:
        for name, path in places.items():
            text = text.replace(name, path)
        return text

    capsys.readouterr()
    code = main([placed(word) for word in args])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"systolic: {placed(said)}")
    assert code == 2
