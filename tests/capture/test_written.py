"""FLOPs that a captured program executes, against those that its results need as they are written."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replaced

from systolic.capture import capture
from systolic.chips import slice
from systolic.forecasting.captured import forecast_parts, parts_of

pytestmark = pytest.mark.usefixtures("forked_programs")

PROGRAM = Path(__file__).parent / "programs" / "blocks.py"
NEEDED = 2 * 2 * 8192 * 8192 * 1024
"""Of the scores and of the product with the values."""
UNNEEDED = 2 * 2 * 8192 * 1024 * 1024


def test_a_program_that_executes_less_than_is_written_says_so(tmp_path: Path) -> None:
    on, folder = slice("v5e-1"), tmp_path / "answer"
    folder.mkdir()
    command = [sys.executable, str(shutil.copy(PROGRAM, tmp_path / PROGRAM.name))]
    captured = capture(command, on, folder, quick=True)
    (program,) = captured.programs
    assert program.flops == NEEDED + UNNEEDED
    assert program.needed_flops == NEEDED
    parts = parts_of(captured, on)
    made = forecast_parts(captured, parts, on)
    assert not made.incomplete
    assert made.hardware_flops == NEEDED
    assert not [text for text in made.cautions if "its results need" in text]
    # The same program, if it were to need twice as much.
    wanting = replace(parts[0], program=replaced(program, needed_flops=2.0 * NEEDED))
    (caution,) = [
        text for text in forecast_parts(captured, [wanting], on).cautions if "need" in text
    ]
    assert "executes 275 GFLOP in matmuls, and its results need 550 GFLOP" in caution
    assert "lower bound" in caution
