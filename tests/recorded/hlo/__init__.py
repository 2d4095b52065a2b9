"""What libtpu printed, recorded; see README.md."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from systolic.hlo import Module, parse

HERE = Path(__file__).parent
NAMES = ("lm-v5e-4", "moe-2xv6e-4")


@cache
def text(name: str) -> str:
    return gzip.decompress((HERE / f"{name}.hlo.gz").read_bytes()).decode()


@cache
def module(name: str) -> Module:
    return parse(text(name))


@cache
def report(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"{name}.json").read_text())
