"""Texts that are derived from the code and committed: what a person or a tool reads.

``python -m tests.golden`` rewrites them; the diff is then reviewed like code.
"""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

from systolic import recipes
from systolic.cli.main import VERBS, main
from systolic.recipes.listing import required
from tests.forecasting.display import texts as forecast
from tests.training.display import texts as report

FOLDER = Path(__file__).parent
REPORTS = {**report.TEXTS, **forecast.TEXTS}


def commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """File name and arguments of each command whose output is kept."""
    yield "help.txt", ("--help",)
    for verb in sorted(VERBS):
        yield f"help/{verb}.txt", (verb, "--help")
    for part in ("pack", "inspect", "tokenizer"):
        yield f"help/data-{part}.txt", ("data", part, "--help")
    yield "help/launch-serve.txt", ("launch", "serve", "--help")
    yield "help/plan-serve.txt", ("plan", "serve", "--help")
    for name in recipes.shipped():
        yield f"train/{name}.txt", ("train", name, "--help")


@cache
def names() -> tuple[str, ...]:
    """File names, relative to this folder."""
    jobs = tuple(f"job/{name}.json" for name in recipes.shipped())
    reports = tuple(f"report/{name}.txt" for name in REPORTS)
    return (*(name for name, _ in commands()), *jobs, *reports)


def text(name: str) -> str:
    """What the code says now."""
    if name.startswith("job/"):
        return job(Path(name).stem)
    if name.startswith("report/"):
        return REPORTS[Path(name).stem]()
    return output(*dict(commands())[name])


def output(*arguments: str) -> str:
    """stdout of ``systolic ARGUMENTS``, 100 columns wide and without colour."""
    out = io.StringIO()
    variables = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    with (
        patch.dict(os.environ, variables),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        main(arguments)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def job(name: str) -> str:
    """The resolved default job of a recipe; what it misses where it has no default."""
    recipe = recipes.find(name)
    missing = required(recipe)
    value = {"required": missing} if missing else recipe({}).to_json()
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def kept() -> list[str]:
    """File names in this folder, stale ones too."""
    found = [*FOLDER.rglob("*.txt"), *FOLDER.rglob("*.json")]
    return sorted(path.relative_to(FOLDER).as_posix() for path in found)
