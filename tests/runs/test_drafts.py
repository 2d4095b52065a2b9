"""Drafts of folders and files: gone when their process is asked to end, and removed later when it was killed."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from systolic.cli.main import main
from systolic.core.errors import OptionError, RunError, SystolicError
from systolic.runs.bundle.folder import check_free, draft, write_file
from systolic.runs.bundle.tensors import TensorSpec

ROOT = Path(__file__).parents[2]


def ended_by(number: signal.Signals, out: Path) -> tuple[int, str]:
    """Exit code and last words of a process that writes a draft when the signal comes."""
    command = [sys.executable, "-m", "tests.runs.draft_child", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "writing\n"
        one.send_signal(number)
        _, said = one.communicate(timeout=60)
    return one.returncode, said


def test_a_process_that_is_asked_to_end_leaves_no_draft(tmp_path: Path) -> None:
    assert ended_by(signal.SIGTERM, tmp_path / "out") == (143, "systolic: ended by SIGTERM\n")
    assert not list(tmp_path.iterdir())


def test_the_draft_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    assert ended_by(signal.SIGKILL, tmp_path / "out")[0] == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "weights").read_bytes() == b"half"
    write_file(tmp_path / "out", b"whole")
    assert [one.name for one in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"whole"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quantizing.quantize.quantize", "quantize . --to int8 --out out"),
        ("formats.exporting.export_model", "export . --out out"),
        ("formats.importing.import_source", "import . --out out"),
    ],
)
def test_verbs_that_write_models_clean_up_when_they_are_asked_to_end(
    name: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def writes(*_: object, **__: object) -> None:
        with draft(tmp_path / "out"):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"systolic.{name}", writes)
    before = signal.getsignal(signal.SIGTERM)
    assert main(words.split()) == 143
    assert capsys.readouterr().err == "systolic: ended by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) == before
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_too_small_is_known_before_anything_is_written(tmp_path: Path) -> None:
    spec = TensorSpec(name="table", shape=(1 << 60,), dtype=np.dtype("float32"))
    with (
        pytest.raises(
            RunError, match=r"out takes 4\.61e\+03 PB, and the disk of .* [kMGTP]B free; free"
        ),
        draft(tmp_path / "out") as made,
    ):
        made.weights([spec], lambda name: pytest.fail(name), lambda count: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["hf", "bundle", "gguf", "docker", "stablehlo", "litert", "onnx"])
def test_where_nothing_can_be_written_is_said_before_the_model_is_looked_for(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix = {"gguf": ".gguf", "litert": ".tflite", "onnx": ".onnx"}.get(to, "")
    given = ["export", str(tmp_path / "nowhere"), "--to", to]
    assert main([*given, "--out", f"/proc/out{suffix}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "/proc is not writable" in line


def test_a_place_below_a_file_and_too_long_a_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, said in (
        (tmp_path / "file" / "out", "is a file"),
        (tmp_path / ("a" * 300), "File name too long"),
    ):
        with pytest.raises(SystolicError, match=said):
            check_free(out)
    with pytest.raises(OptionError):
        check_free(tmp_path / ("a" * 300))
