"""Counters in a train state, and several programs of a step, as frameworks' own trainers have them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from systolic.capture import capture
from systolic.chips import slice
from systolic.core.errors import RunError

pytestmark = pytest.mark.usefixtures("forked_programs")

PROGRAMS = Path(__file__).parent / "programs"
HOOK = Path(__file__).parents[2] / "src/systolic/capture/hook"


def test_a_step_in_the_train_state_is_counted(tmp_path: Path, capfd) -> None:
    folder = tmp_path / "answer"
    folder.mkdir()
    program = shutil.copy(PROGRAMS / "counting.py", tmp_path / "counting.py")
    captured = capture([sys.executable, str(program)], slice("v5e-8"), folder, quick=True)
    said = capfd.readouterr().err
    steps = re.findall(r"^step (\d+) of (\d+), twice (\d+), text (\d+)$", said, re.MULTILINE)
    assert steps == [(str(n), str(n), str(2 * n), str(n)) for n in range(1, 31)]
    assert "ended at 30" in said
    # With a counter that is always 0 the histogram of each hundredth step would be called after every one.
    assert [one.name for one in captured.programs] == ["train_step"]
    assert {one.name for one in captured.answer.others} == {"initialize"}


COMPILING = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from systolic_capture import compiling
compiling.start()
gate = threading.Event()
first = compiling.background(lambda: gate.wait(20))
compiling.background(gate.set)
print(first.wait(10) and gate.is_set())
"""


def test_a_program_does_not_wait_for_what_is_left_of_the_one_before() -> None:
    """With ``--quick`` the first program's compile goes on, for minutes where it is large, once its schedule is there."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILING, str(HOOK)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True", done.stderr


def test_what_a_program_initialized_before_it_failed_is_no_step(tmp_path: Path) -> None:
    folder = tmp_path / "answer"
    folder.mkdir()
    program = shutil.copy(PROGRAMS / "failing_late.py", tmp_path / "failing_late.py")
    with pytest.raises(RunError, match="failed before its step was known: KeyError: 'no tokeni"):
        capture([sys.executable, str(program)], slice("v5e-8"), folder, quick=True)


def test_the_variable_of_the_platform_names_no_cpu(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "answer"
    folder.mkdir()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    program = shutil.copy(PROGRAMS / "asking.py", tmp_path / "asking.py")
    captured = capture([sys.executable, str(program)], slice("v5e-8"), folder, quick=True)
    assert [one.name for one in captured.programs] == ["step"]
