"""60 layouts of a 1B decoder on v5e-16 with the compiler's and the simulation's answers.

Written by benchmarks/plan/exhaustive.py; the job is that of :mod:`tests.planning.fabricated`. They hold the residual
stream whole; ``residual.json`` has 12 of them with the tensor axis splitting it.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from systolic.chips import slice
from systolic.job import Layout, Precision, Remat, Residual
from systolic.planning.candidate import Candidate
from systolic.planning.space import NAMED

ON = slice("v5e-16")
_FOLDER = Path(__file__).parent.parent / "recorded" / "plan"


@cache
def rows() -> dict[str, dict[str, Any]]:
    """By the candidate's text."""
    return _read("layouts.json")


@cache
def split_rows() -> dict[str, dict[str, Any]]:
    """The same of layouts that split the residual stream."""
    return _read("residual.json")


def _read(name: str) -> dict[str, dict[str, Any]]:
    read = json.loads((_FOLDER / name).read_text())["rows"]
    return {candidate(row).text: row for row in read}


def candidate(row: dict[str, Any]) -> Candidate:
    """What a row is of."""
    settings = row["settings"]
    remat = Remat(settings.get("layout.remat", "none"))
    axes = ("data", "fsdp", "tensor", "context", "expert", "pipeline", "accumulate")
    layout = Layout(
        **{name: settings[f"layout.{name}"] for name in axes},
        remat=remat,
        residual=Residual(settings.get("layout.residual", "whole")),
        remat_names=NAMED[0] if remat is Remat.save_names else Layout().remat_names,
    )
    return Candidate(on=ON, layout=layout, batch=256, precision=Precision.bf16)
