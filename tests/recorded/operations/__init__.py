"""Measured operations and the schedules that libtpu made of them, recorded; see README.md."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from systolic.hlo import Module, parse

HERE = Path(__file__).parent
ROWS: dict[str, dict[str, Any]] = json.loads((HERE / "rows.json").read_text())
"""By name: the slice compiled for, places of its devices, and the seconds that a chip took."""


def text(name: str, mode: str) -> str:
    """The schedule's text: ``full`` with the compiler's cycles, ``quick`` as it is before code generation."""
    return gzip.decompress((HERE / f"{name}.{mode}.hlo.gz").read_bytes()).decode()


@cache
def module(name: str, mode: str) -> Module:
    """The schedule, parsed."""
    return parse(text(name, mode))
