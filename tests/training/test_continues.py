"""What a run is refused to go on with: known from its own files, so before jax is imported."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from systolic.cli.main import main
from tests.training.children import environment
from tests.training.test_kept import SIZES

TINY = f"{Path(__file__).with_name('tiny.py')}:job"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and the text that it was trained on."""
    home = tmp_path_factory.mktemp("continues")
    (home / "text").mkdir()
    for number in range(30):
        (home / "text" / f"{number}.txt").write_text(f"the array {number} flows\n" * 9)
    (home / "held.txt").write_text("while pulses beat\n" * 50)
    data = ["--path", str(home / "text"), "--validation", str(home / "held.txt")]
    assert main(["train", "lm", *data, *SIZES, "--run", str(home / "run"), "--json"]) == 0
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path) -> Path:
    """A copy to change, whose run names the text beside it."""
    home = Path(shutil.copytree(trained, tmp_path / "home"))
    record = home / "run" / "job.json"
    record.write_text(record.read_text().replace(str(trained), str(home)))
    return home


def files(run: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != ".lock"}


def refused(home: Path, capsys: pytest.CaptureFixture[str], *changes: str) -> tuple[int, str]:
    """The exit code and the one line; the run is as it was."""
    run = home / "run"
    before = files(run)
    capsys.readouterr()
    code = main(["train", "--resume", str(run), *(changes or ("--steps", "5"))])
    assert files(run) == before
    (line,) = capsys.readouterr().err.splitlines()
    return code, re.sub(r"^systolic: | \[\S+\]$", "", line)


@pytest.mark.parametrize(("file", "split"), [("text/7.txt", "train"), ("held.txt", "validation")])
def test_other_contents_of_the_same_size(
    home: Path, capsys: pytest.CaptureFixture[str], file: str, split: str
):
    text, run, where = (home / file).read_bytes(), home / "run", home / file.split("/")[0]
    (home / file).write_bytes(text.replace(b"a", b"e"))
    size = sum(f.stat().st_size for f in ([where] if where.is_file() else where.iterdir()))
    assert refused(home, capsys) == (
        1,
        f"the {split} data of {run} has changed since it was trained: {where} has as many bytes ({size}) with other contents, compared whole; restore it, or train a new run with --init-from {run}",
    )


def test_moved_data_is_the_same(home: Path, capsys: pytest.CaptureFixture[str]):
    moved = home / "elsewhere"
    (home / "text").rename(moved)
    # Text for validation that is asked for is taken.
    (home / "new.txt").write_text("other text\n" * 40)
    data = ["--path", str(moved), "--validation", str(home / "new.txt"), "--steps", "4"]
    assert main(["train", "--resume", str(home / "run"), *data, "--json"]) == 0
    record = json.loads((home / "run" / "job.json").read_text())["data"]
    assert record["train"]["where"] == str(moved)
    assert record["validation"]["where"] == str(home / "new.txt")


def test_more_steps_do_not_warm_up_again(home: Path):
    """A recipe fits its warm-up to a tenth of the steps: 1 of 3, and of 60 it would be 6, with 4/6 of the peak at step 4."""
    run = home / "run"
    assert main(["train", "--resume", str(run), "--steps", "60", "--json", "--quiet"]) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = {r["step"]: r["learning_rate"] for r in records if r["kind"] == "train"}
    # Cosine from 1 to 0.1 over the 59 steps after the warm-up: 2 of them are before step 4.
    cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * 2 / 59)) / 2
    assert rates[4] / rates[1] == pytest.approx(cosine, rel=2e-3)
    job = json.loads((run / "job.json").read_text())["job"]
    assert job["schedule"]["warmup"] == 1
    again = ["--steps", "62", "--schedule.warmup", "5", "--json", "--quiet"]
    assert main(["train", "--resume", str(run), *again]) == 0
    job = json.loads((run / "job.json").read_text())["job"]
    assert job["schedule"]["warmup"] == 5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("--seed", "7"), "--seed 7 (was 0) can't change in RUN; leave that option out"),
        (("--model.layers", "2"), "--model.layers 2 (was 1) can't change in RUN"),
        (("--sequence", "64"), "--sequence 64 (was 32) can't change in RUN"),
        (("--model.qk-norm",), "--model.qk-norm (was no) can't change in RUN"),
        (("--optimizer.kind", "lion"), "--optimizer.kind lion (was adamw) can't change in RUN"),
        (("--dtypes.moments", "bf16"), "--dtypes.moments bf16 (was f32) can't change in RUN"),
        (
            ("--model.latent.kv-lora-rank", "8", "--model.latent.v-head-dim", "16"),
            "--model.latent.kv-lora-rank 8 (was 0), --model.latent.v-head-dim 16 (was 128) can't change in RUN; leave these options out, or train a new run",
        ),
        (
            ("--steps", "2"),
            "--steps is 2, but RUN has a checkpoint of step 3; give --steps 3 or more",
        ),
    ],
)
def test_options_that_a_run_keeps(
    home: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, ...], line: str
):
    (home / "run" / "summary.json").unlink()
    code, told = refused(home, capsys, *change)
    assert code == 2
    assert told.startswith(line.replace("RUN", str(home / "run")))


def test_it_is_refused_before_jax_is_imported(home: Path):
    (home / "run" / "summary.json").unlink()
    script = f"""import sys
from systolic.cli.main import main
code = main(["train", "--resume", {str(home / "run")!r}, "--seed", "7"])
print(code, "jax" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(home / "cache"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "2 False\n"


@pytest.mark.parametrize("source", ["run", "run/checkpoints/3"])
def test_weights_of_an_earlier_version_begin_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], source: str
):
    record = json.loads((home / "run" / "job.json").read_text())
    del record["revision"]  # earlier versions did not write it
    (home / "run" / "job.json").write_text(json.dumps(record))
    begin = ["--init-from", str(home / source), "--run", str(home / "new")]
    assert main(["train", "lm", "--path", str(home / "held.txt"), *SIZES, *begin]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"systolic: {home / source} was trained by an earlier version, in which")
    assert not (home / "new").exists()


def test_weights_of_another_kind_of_model_begin_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    begin = ["--init-from", str(home / "run"), "--run", str(home / "new")]
    assert main(["train", "digits", "--steps", "1", *begin]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"systolic: --init-from {home / 'run'} holds the weights of a Decoder, and digits trains a CNN; give a run of the same kind of model [run]"
    )
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\2\0\0\0\0\0\0\0{}")
    assert main(["train", "digits", "--steps", "1", "--init-from", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "is a file; it takes a run (a directory that systolic train made) or one of its checkpoints, RUN/checkpoints/STEP, and no other format such as safetensors [not-found]"
    )


def records(run: Path) -> list[int]:
    """Steps of the training records."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [one["step"] for one in found if one.get("kind") == "train"]


@pytest.mark.slow
def test_how_often_a_run_is_recorded_is_kept(tmp_path: Path):
    run = tmp_path / "sparse"
    words = ["--run", str(run), "--log-every", "2", "--diagnose", "0", "--json"]
    assert main(["train", TINY, "--steps", "4", *words]) == 0
    assert records(run) == [2, 4]
    assert main(["train", "--resume", str(run), "--steps", "8", "--json"]) == 0
    assert records(run) == [2, 4, 6, 8]
    assert main(["train", "--resume", str(run), "--steps", "10", "--log-every", "1", "--json"]) == 0
    assert records(run) == [2, 4, 6, 8, 9, 10]
    assert json.loads((run / "job.json").read_text())["log_every"] == 1
    assert not (run / "diagnoses.jsonl").exists()
