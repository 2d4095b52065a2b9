"""``systolic train RECIPE --plan plan.json``: the candidate of a plan as a request to train."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.artifact.chosen import Chosen, read
from systolic.cli.target import Request, request_for
from systolic.core.errors import OptionError
from systolic.session.planned import is_of, same_step

OPTION = "--plan"


def is_planned(args: Sequence[str]) -> bool:
    """Whether the words after a recipe name a plan; asking for help needs none."""
    named = any(word == OPTION or word.startswith(f"{OPTION}=") for word in args)
    return named and not {"-h", "--help"} & set(args)


def planned(target: str, args: Sequence[str], options: Any) -> Request:
    """The request of a recipe under a plan: its options where they are not given anew, its settings always.

    Raises:
        NotFoundError: there is no such plan.
        DataError: it is no plan, or nothing in it fits.
        OptionError: it is of another recipe, or an option contradicts what it decides.
    """
    recipe = recipes.find(target)
    chosen = _chosen(args)
    if not is_of(recipe, chosen.recipe):
        raise OptionError(
            f"{chosen.path} is a plan for {chosen.recipe}, not for {target}; train that one or plan again"
        )
    saved = recipes.typed(recipe, chosen.options)
    asked = request_for(recipe, args, "train", options, saved)
    before, now = recipe(saved), asked.job
    for part in ("layout", "batch", "precision"):
        if getattr(before, part) != getattr(now, part):
            raise OptionError(
                f"the {part} is what {chosen.path} decides; leave its option out, or plan again with it"
            )
    steps = now.steps if _given(args, "--steps") or now.steps != before.steps else chosen.steps
    if not same_step(before, now):
        print(
            f"systolic: the job is not the one that {chosen.path} forecast, so there is no forecast beside it",
            file=sys.stderr,
        )
        chosen = replace(chosen, forecast={})
    return replace(asked, chosen=replace(chosen, steps=steps))


def _chosen(args: Sequence[str]) -> Chosen:
    """The candidate that the words name; read before the options, because it holds their defaults."""
    number = _value(args, "--candidate")
    if number is not None and not number.isdigit():
        raise OptionError(f"candidate is {number!r}; give its rank in the plan, 1 is the best")
    path = _value(args, OPTION)
    if path is None:
        raise OptionError("--plan needs a file; systolic plan RECIPE --on SLICES writes plan.json")
    return read(Path(path), int(number or 1))


def _value(args: Sequence[str], option: str) -> str | None:
    for word, following in zip(args, [*args[1:], None], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def _given(args: Sequence[str], option: str) -> bool:
    return _value([*args, ""], option) is not None
