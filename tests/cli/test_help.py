"""Each verb's help lists every one of its options, and an option's earlier name is accepted for a version."""

import contextlib
import dataclasses
from importlib import import_module

import pytest

from systolic.cli.forecast import ForecastOptions
from systolic.cli.main import VERBS, main
from systolic.cli.parse import option_names
from systolic.cli.target import request


def options_of(verb: str) -> list[type]:
    """The classes of options that a verb's module defines."""
    module = import_module(f"systolic.cli.{VERBS[verb].module}")
    return [
        value
        for name, value in vars(module).items()
        if name.endswith("Options") and dataclasses.is_dataclass(value)
    ]


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
        asked = request("lm", [*words, "--on", "v5e-4"], "forecast", ForecastOptions)
        assert asked.options["layout"].loss_chunks == 4
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            line
            == "systolic: --layout.loss-tiles is now called --layout.loss-chunks; use that name"
        )


def test_a_verbs_options_are_found_wherever_they_stand() -> None:
    words = ["--step=eval", "--steps", "7", "--quick", "--layout.remat-names", "query", "key"]
    words += ["--layout.remat=save-names"]
    asked = request(
        "lm", [*words, "--on", "v5e-4", "--flags=--xla_a=1"], "forecast", ForecastOptions
    )
    assert (asked.verb.on, asked.verb.step.value, asked.verb.quick) == ("v5e-4", "eval", True)
    assert asked.verb.flags == "--xla_a=1"
    layout = ["--layout.remat-names", "query", "key", "--layout.remat=save-names"]
    assert list(asked.typed) == ["--steps", "7", *layout]
