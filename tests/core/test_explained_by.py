"""Functions that share parameters: one of them explains each, and the others take its sentence, type, range and default."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from systolic.core.arguments import explained_by
from systolic.forecasting.command import (
    forecast,
    forecast_command,
    forecast_dump,
    forecast_server,
)
from systolic.forecasting.display import view as forecast_view
from systolic.planning.command import plan, plan_program
from systolic.planning.display import view as plan_view
from systolic.training.command import rehearse, replay, resume, train
from systolic.training.display import view as train_view


def brew(leaves: str, *args: int, minutes: int = 3, **more: int) -> None:
    """Brews.

    Args:
        leaves: Kind of tea,
            by its name.
        args: Cups.
        minutes: How long.
        more: Further cups.
    """


def test_sentences_stand_in_the_order_of_the_signature() -> None:
    @explained_by(brew)
    def strong(minutes: int = 3, *, milk: bool = False, leaves: str, **more: int) -> None:
        """Brews strong tea.

        Args:
            milk: With milk.
            more: None.

        Raises:
            ValueError: no water.
        """

    assert inspect.getdoc(strong) == (
        "Brews strong tea.\n\nArgs:\n    minutes: How long.\n    milk: With milk.\n    leaves: Kind of tea,\n"
        "        by its name.\n    more: None.\n\nRaises:\n    ValueError: no water."
    )


def test_a_docstring_without_arguments_gets_them() -> None:
    @explained_by(brew)
    def short(leaves: str) -> None:
        """Brews a cup."""

    @explained_by(brew)
    def refused(minutes: int) -> None:
        """Brews.

        Raises:
            ValueError: no water.
        """

    assert inspect.getdoc(short) == (
        "Brews a cup.\n\nArgs:\n    leaves: Kind of tea,\n        by its name."
    )
    assert inspect.getdoc(refused) == (
        "Brews.\n\nArgs:\n    minutes: How long.\n\nRaises:\n    ValueError: no water."
    )


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (resume, train),
        (rehearse, train),
        (replay, resume),
        (forecast_dump, forecast),
        (forecast_command, forecast),
        (forecast_server, forecast),
        (forecast_view.show_step, forecast_view.show),
        (forecast_view.show_server, forecast_view.show),
        (plan_program, plan),
        (plan_view.show_serving, plan_view.show),
        (train_view.show_rehearsal, train_view.show),
    ],
)
def test_a_shared_sentence_is_of_the_same_option(
    function: Callable[..., Any], other: Callable[..., Any]
) -> None:
    # The first parameter is what each is about, a run, a plan, not an option.
    mine, theirs = (dict([*inspect.signature(f).parameters.items()][1:]) for f in (function, other))
    lines = [
        {line for line in (inspect.getdoc(f) or "").splitlines() if line.startswith("    ")}
        for f in (function, other)
    ]
    shared = [line.strip().partition(":")[0] for line in lines[0] & lines[1]]
    shared = [name for name in shared if name in mine and name != "options"]
    assert shared
    for name in shared:
        assert mine[name].annotation == theirs[name].annotation, name
        assert mine[name].default == theirs[name].default, name
