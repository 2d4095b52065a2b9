"""Loops and calls as libtpu printed them, recorded; see README.md."""

import json
import lzma
from functools import cache
from pathlib import Path

from systolic.hlo import Module, parse

HERE = Path(__file__).parent
FILE = HERE / "modules.json.xz"


@cache
def texts() -> dict[str, str]:
    """Name of a program to its scheduled module."""
    return json.loads(lzma.decompress(FILE.read_bytes()))


@cache
def module(name: str) -> Module:
    return parse(texts()[name])
