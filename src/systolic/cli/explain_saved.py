"""``systolic explain FORECAST.json``: a saved forecast, or the best of a plan, explained, or told apart from another."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from systolic import recipes
from systolic.aot import Compiled, Compiler, JobProgram
from systolic.aot import compile as compile_program
from systolic.artifact import trust
from systolic.artifact.chosen import is_plan, load
from systolic.chips import slice
from systolic.chips.flags import NONE, resolved, spoken
from systolic.cli.explain_job import explain_recipe, options
from systolic.cli.output import print_json
from systolic.cli.target import request
from systolic.core.errors import DataError, NotFoundError, OptionError, RunError
from systolic.core.files import read_given
from systolic.core.units import duration
from systolic.explaining.cause import Cause
from systolic.forecasting import Forecast
from systolic.session.command_line import without, words

ALIKE = 0.002
"""Share of the step below which two figures are the same."""


def saved_forecast(path: Path) -> tuple[str, list[str]] | None:
    """The recipe and the arguments of a forecast's ``--json`` or a plan; None when the file is something else.

    Raises:
        RunError: it does not say what it was made of.
        OptionError: it is no JSON.
        DataError: it is damaged, or nothing in the plan fits.
        NotFoundError: its slice is unknown.
    """
    if path.suffix != ".json" or not path.is_file():
        return None
    record = read_given(path, "write it again")
    if is_plan(record):
        return _planned(path)
    if not isinstance(record, dict) or not {"step_seconds", "slice"} <= set(record):
        return None
    if "arguments" not in record:
        raise _unnamed(path)
    try:
        saved = msgspec.convert(record, _Saved)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} is a damaged forecast ({error}); write it again") from error
    given = words(saved.arguments, {}, ("flags",))
    return saved.target, [*given, *_flags(saved.compiler.flags, saved.slice)]


class _Made(msgspec.Struct):
    flags: list[str] = []


class _Saved(msgspec.Struct):
    """A forecast's JSON, as far as it says what it was made of."""

    target: str
    arguments: list[str]
    slice: str
    compiler: _Made = msgspec.field(default_factory=_Made)


def _planned(path: Path) -> tuple[str, list[str]]:
    saved = load(path)
    if saved.arguments is None:
        raise _unnamed(path)
    best = saved.candidates[0]
    given = words(saved.arguments, best.settings, ("flags",))
    return saved.recipe, [*given, "--on", best.slice, *_flags(best.flags, best.slice)]


def _flags(flags: Sequence[str], on: str) -> list[str]:
    """The option that stands for exactly these flags."""
    text = spoken(flags, slice(on).chip)
    return [f"--flags={text}"] if text else []


def _unnamed(path: Path) -> RunError:
    return RunError(
        f"{path} does not say which options it was made with; make it again with this version, or explain the recipe: systolic explain RECIPE --on v5e-16"
    )


def explain_saved(target: str, args: Sequence[str]) -> int:
    """A forecast's JSON: its recipe and options explained, or what makes it differ ``--against`` another."""
    found = saved_forecast(Path(target))
    assert found is not None
    recipe, saved = found
    require_own(recipe, target)
    other, rest = _against(args)
    if other is None:
        return explain_recipe(recipe, _on_top(saved, rest))
    if not other.is_file():
        raise NotFoundError(f"{other} is no file; write one with systolic forecast … --json")
    second = saved_forecast(other)
    if second is None:
        raise OptionError(f"{other} is not a forecast; write one with systolic forecast … --json")
    require_own(second[0], str(other))
    return compare((target, *found), (str(other), *second), "--json" in rest)


def _on_top(saved: Sequence[str], given: Sequence[str]) -> list[str]:
    """What was saved and what is given: flags add up, unless ``none`` is among the given ones."""
    mine = flags_in(given)
    if mine is None:
        return [*saved, *given]
    if NONE not in mine.split():
        mine = f"{flags_in(saved) or ''} {mine}".strip()
    return [*without(saved, {"flags"}), *without(given, {"flags"}), f"--flags={mine}"]


def flags_in(args: Sequence[str]) -> str | None:
    """The value of ``--flags``; None where it is not given."""
    found = None
    for index, word in enumerate(args):
        if word == "--flags":
            found = " ".join(args[index + 1 : index + 2])
        if word.startswith("--flags="):
            found = word.partition("=")[2]
    return found


def require_own(recipe: str, named_by: str) -> None:
    """Returns where the recipe that a JSON file names may be executed: it is shipped, or a file of the user's own.

    Raises:
        RunError: the file, or its folder, belongs to another user or can be written by anyone.
    """
    file = Path(recipes.split(recipe)[0])
    if recipe in recipes.shipped() or not file.is_file():
        return
    reason = trust.foreign([file, file.absolute().parent])
    if reason:
        raise RunError(
            f"{reason}, and {named_by} names {file} as its recipe; read it, then give it yourself: systolic explain {recipe} --on v5e-16"
        )


def _against(args: Sequence[str]) -> tuple[Path | None, list[str]]:
    rest = list(args)
    for index, word in enumerate(rest):
        if word.startswith("--against="):
            return Path(word.partition("=")[2]), rest[:index] + rest[index + 1 :]
        if word == "--against":
            if index + 1 == len(rest):
                raise OptionError("--against needs another forecast's JSON file")
            return Path(rest[index + 1]), rest[:index] + rest[index + 2 :]
    return None, rest


Named = tuple[str, str, list[str]]
"""A file, its recipe and its arguments."""


def compare(one: Named, two: Named, as_json: bool) -> int:
    """What makes the first slower or faster than the second, cause by cause."""
    first, second = _causes(*one[1:]), _causes(*two[1:])
    seconds = [
        {c.name: c for c in causes if c.seconds is not None} for _, causes in (first, second)
    ]
    names = dict.fromkeys([*seconds[0], *seconds[1]])
    rows = []
    for name in names:
        a, b = (of[name].seconds if name in of else 0.0 for of in seconds)
        cause = seconds[0].get(name) or seconds[1][name]
        rows.append((name, cause.title, a or 0.0, b or 0.0))
    rows.sort(key=lambda row: -abs(row[2] - row[3]))
    mine, other = (made.step_seconds for made, _ in (first, second))
    if as_json:
        differences = [
            {"name": name, "title": title, "seconds": a, "against_seconds": b}
            for name, title, a, b in rows
        ]
        print_json(
            {
                "target": one[0],
                "against": two[0],
                "kind": "forecast",
                "step_seconds": mine,
                "against_step_seconds": other,
                "causes": differences,
            }
        )
        return 0
    if mine is None or other is None:
        for (path, *_), (made, _) in ((one, first), (two, second)):
            print(f"{path}: {'fits' if made.fits else 'does not fit'} on {made.on.name}")
        return 1
    if abs(mine / other - 1) < ALIKE:
        print(f"{one[0]} and {two[0]} take the same time: {duration(mine)} a step")
    else:
        word = "slower" if mine > other else "faster"
        print(
            f"{one[0]} is {max(mine, other) / min(mine, other):.2f} times {word}: {duration(mine)} a step, {two[0]} {duration(other)}"
        )
    rows = [row for row in rows if abs(row[2] - row[3]) > ALIKE * max(mine, other)]
    if not rows:
        print("and no cause takes more in one of them")
        return 0
    print(f"\n{'':>10}  {'first':>8}  {'second':>8}  cause (they may overlap)")
    for _, title, a, b in rows:
        sign = "+" if a >= b else "-"
        print(f"{sign + duration(abs(a - b)):>10}  {duration(a):>8}  {duration(b):>8}  {title}")
    return 0


def _causes(target: str, args: Sequence[str]) -> tuple[Forecast, list[Cause]]:
    from systolic.explaining.causes import causes_of_forecast
    from systolic.forecasting.run import of_outcome
    from systolic.hlo import parse

    asked = request(target, args, "explain", options)
    on = slice(asked.verb["on"])
    compiler = Compiler(flags=resolved(asked.verb["flags"], on.chip)).quick()
    outcome = compile_program(JobProgram(job=asked.job, verb=asked.verb["step"]), on, compiler)
    made = of_outcome(outcome, asked.job.name, on, 0.0)
    if not isinstance(outcome, Compiled):
        return made, []
    return made, causes_of_forecast(made, parse(outcome.hlo), asked.job.model)
