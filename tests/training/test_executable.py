"""From a saved train step to a run that did not compile it, on the CPU."""

import os
import re
from pathlib import Path

import pytest

from systolic import recipes
from systolic.chips import slice
from systolic.cli.main import main
from systolic.compiling import Compiled, Compiler, JobProgram, compile, executable
from tests.training.sessions import events, losses

pytestmark = pytest.mark.own_programs

RECIPE = f"{Path(__file__).with_name('tiny.py')}:job"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The step for eight virtual devices, or however many this process has."""
    import jax

    root, count = tmp_path_factory.mktemp("saved"), len(jax.devices())
    on = slice("cpu" if count == 1 else f"{count}xcpu")
    job = recipes.find(RECIPE)({})
    made = compile(JobProgram(job=job), on, Compiler(root=root, save=True))
    assert isinstance(made, Compiled)
    executable.save(made, root / "tiny.step")
    return root / "tiny.step"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The saved step was compiled without the flags that this process has read.
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def train(saved: Path, run: Path, *more: str) -> int:
    return main(["train", RECIPE, "--executable", str(saved), "--run", str(run), *more])


@pytest.mark.slow
def test_a_run_takes_the_saved_step(saved: Path, tmp_path: Path) -> None:
    assert train(saved, tmp_path / "run") == 0
    assert main(["train", RECIPE, "--run", str(tmp_path / "compiled")]) == 0
    assert events(tmp_path / "run", "load") == ["train step"]
    assert events(tmp_path / "run", "compile") == ["initial weights", "eval step"]
    assert events(tmp_path / "compiled", "compile") == [
        "initial weights",
        "train step",
        "eval step",
    ]
    loaded, compiled = losses(tmp_path / "run"), losses(tmp_path / "compiled")
    assert len(loaded) == len(compiled) == 16
    for step, values in compiled.items():
        assert loaded[step] == pytest.approx(values, rel=1e-4)
    # It resumes from a checkpoint as well.
    words = ["--resume", str(tmp_path / "run"), "--executable", str(saved)]
    assert main(["train", *words]) == 0


def test_what_does_not_match_stops_before_a_run_is_made(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert train(saved, run, "--batch", "24") == 1
    error = capsys.readouterr().err
    assert "tiny.step is another program: its batch_size is 16, here it is 24; give" in error
    assert error.count("\n") == 1
    assert train(saved, run, "--steps", "20") == 1
    assert "is another program: its lowered digest is" in capsys.readouterr().err
    given = os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", f"{given} --xla_cpu_enable_fast_math=true")
    assert train(saved, run) == 1
    # Flags that a jaxlib needs are on both sides.
    assert re.search(
        "its set of compiler flags is (none|--xla_cpu_experimental_.*), here it is --xla_cpu_enable",
        capsys.readouterr().err,
    )
    assert train(tmp_path / "no", run) == 2
    assert "no is not a file; systolic forecast RECIPE --on SLICE --save" in capsys.readouterr().err
    assert not run.exists()


def test_a_rehearsal_has_no_use_for_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", RECIPE, "--rehearse", "v5e-4", "--executable", str(saved)]
    assert main(words) == 2
    assert "leave one of them out" in capsys.readouterr().err
