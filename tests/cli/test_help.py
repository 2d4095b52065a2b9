"""Each verb's help lists every one of its options, and an option's earlier name is accepted for a version."""

import contextlib
import dataclasses
import re
import subprocess
import sys
import typing
from importlib import import_module
from typing import Any

import pytest

from systolic import recipes
from systolic.cli.forms import request
from systolic.cli.main import VERBS, main
from systolic.cli.parse import option_names
from systolic.core.ranges import ranges_of

FORECAST = VERBS["forecast"].forms[0].options.read


def options_of(verb: str) -> list[Any]:
    """Functions with the options of a verb's forms, or the classes of options that its module defines."""
    if VERBS[verb].forms:
        return [form.options.read for form in VERBS[verb].forms if not form.usage]
    module = import_module(f"systolic.cli.{VERBS[verb].module}")
    return [
        value
        for name, value in vars(module).items()
        if name.endswith("Options") and dataclasses.is_dataclass(value)
    ]


def kinds(hint: Any) -> set[Any]:
    """The plain types inside a hint."""
    parts = typing.get_args(hint) if typing.get_origin(hint) is not None else ()
    return {kind for part in parts for kind in kinds(part)} if parts else {hint}


@pytest.mark.parametrize("verb", VERBS)
def test_every_number_of_a_verb_has_a_range(verb: str) -> None:
    for kind in options_of(verb):
        hints = typing.get_type_hints(kind, include_extras=True)
        bare = [
            name
            for name, hint in hints.items()
            if kinds(hint) & {int, float} and name not in ranges_of(kind)
        ]
        assert not bare, f"{kind.__name__} checks no range of {', '.join(bare)}"


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_verb_is_in_its_help(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.suppress(SystemExit):
        main([verb, "--help"])
    words = capsys.readouterr().out.replace(",", " ").split()
    for kind in options_of(verb):
        missing = {name for name in option_names(kind) if name not in words}
        assert not missing, (
            f"systolic {verb} --help leaves out {sorted(missing)} of {kind.__name__}"
        )


def test_the_earlier_name_of_an_option_is_accepted_and_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--layout.loss-tiles", "4"], ["--layout.loss_tiles=4"]):
        asked = request("lm", [*words, "--on", "v5e-4"], "forecast", FORECAST)
        assert asked.options["layout"].loss_chunks == 4
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            line
            == "systolic: --layout.loss-tiles is now called --layout.loss-chunks; use that name"
        )


def test_a_verbs_options_are_found_wherever_they_stand() -> None:
    words = ["--step=eval", "--steps", "7", "--quick", "--layout.remat-names", "query", "key"]
    words += ["--layout.remat=save-names"]
    asked = request("lm", [*words, "--on", "v5e-4", "--flags=--xla_a=1"], "forecast", FORECAST)
    assert (asked.verb.on, asked.verb.step.value, asked.verb.quick) == ("v5e-4", "eval", True)
    assert asked.verb.flags == "--xla_a=1"
    layout = ["--layout.remat-names", "query", "key", "--layout.remat=save-names"]
    assert list(asked.typed) == ["--steps", "7", *layout]


@pytest.mark.parametrize("name", recipes.shipped())
def test_the_types_of_a_recipe_name_the_options_that_its_help_lists(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt option is refused by these names, before the line is parsed."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")
    with contextlib.suppress(SystemExit):
        main(["forecast", name, "--help"])
    rows = re.findall(r"^(?:│ |  )(--[a-z].*?)(?:  | │|$)", capsys.readouterr().out, re.MULTILINE)
    listed = set(re.findall(r"--[a-z][\w.-]*\w", " ".join(rows)))
    known = option_names(recipes.find(name).function) | option_names(FORECAST)
    assert listed == known - {"--help"}


MISTAKES = """
import sys
from systolic.cli.main import main

codes = [main(line.split()) for line in sys.argv[1:]]
heavy = {"jax", "flax", "orbax", "grain", "numpy", "pandas", "pyarrow"} & set(sys.modules)
print(codes, sorted(heavy))
"""
LINES = [
    "--help",
    "chips v5",
    "eval nowhere",
    "generate nowhere",
    "predict nowhere none.txt",
    "forecast lm",
    "forecast lm --on v5e-4 --modle 3",
    "forecast lm --on v5e-4 --steps many",
    "plan lm",
    "launch digits --on v5e-17 --via gke",
    "launch serve",
    "status nope",
    "train lm --modle 3",
    "train lm --workers many",
    "recipes lmm",
    "data inspect nowhere",
    "explain nowhere",
    "explain lm",
]


def test_mistakes_are_refused_before_anything_heavy_is_imported() -> None:
    """What keeps them below 0.3 seconds."""
    command = [sys.executable, "-c", MISTAKES, *LINES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{[0] + [2] * (len(LINES) - 1)} []"
