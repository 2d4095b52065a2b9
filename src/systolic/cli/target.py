"""What a verb works on: a recipe with its options, or a run."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.artifact.chosen import Chosen
from systolic.cli.parse import arguments
from systolic.core.errors import NotFoundError, OptionError
from systolic.job import Job, Layout
from systolic.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Request:
    """A recipe with its arguments, and the verb's own options."""

    recipe: Recipe
    options: Mapping[str, Any]
    verb: Mapping[str, Any]
    chosen: Chosen | None = None
    """What a plan decided of the job."""

    @property
    def job(self) -> Job:
        """The job these options make, with the plan's settings."""
        return under_plan(self.recipe(self.options), self.chosen)


def under_plan(job: Job, chosen: Chosen | None) -> Job:
    """A job with the layout, batch, precision and steps of a plan, where there is one."""
    if chosen is None:
        return job
    job = chosen.applied(job)
    if not chosen.steps:
        return job
    schedule = job.schedule
    if schedule.warmup >= chosen.steps:
        # The recipe fitted it to its own steps.
        schedule = schedule.shortened(schedule, chosen.steps)
    return replace(job, steps=chosen.steps, schedule=schedule)


def first(args: Sequence[str], verb: str, what: str) -> tuple[str, list[str]]:
    """The target and the rest of the arguments.

    Raises:
        OptionError: there is no target.
    """
    if not args or args[0].startswith("-"):
        raise OptionError(f"systolic {verb} needs {what}; systolic {verb} --help shows how")
    return args[0], list(args[1:])


def require_slice(verb: str, target: str, args: Sequence[str], what: str) -> None:
    """Whether ``--on`` was given, or help is asked for.

    Raises:
        OptionError: it was not; ``what`` says what to add.
    """
    given = any(word == "--on" or word.startswith("--on=") for word in args)
    if not given and not {"-h", "--help"} & set(args):
        raise OptionError(f"systolic {verb} {target} needs {what}")


def request(target: str, args: Sequence[str], verb: str, options: Callable[..., Any]) -> Request:
    """Reads a recipe's options and the verb's from one command line.

    Args:
        target: A recipe's name or file.
        args: What follows it.
        verb: For messages.
        options: A function whose parameters are the verb's own options.
    """
    asked = request_for(recipes.find(target), args, verb, options, {})
    for value in asked.options.values():
        if isinstance(value, Layout):
            value.check_effects()
    return asked


def request_for(
    recipe: Recipe,
    args: Sequence[str],
    verb: str,
    options: Callable[..., Any],
    saved: Mapping[str, Any],
) -> Request:
    """As :func:`request` for a recipe at hand; an option that is not given has its ``saved`` value."""
    target = recipe.target
    own = inspect.signature(options).parameters
    theirs = {
        name: p.replace(default=saved[name]) if name in saved else p
        for name, p in inspect.signature(recipe.function, eval_str=True).parameters.items()
    }
    clash = set(own) & set(theirs)
    if clash:
        raise OptionError(
            f"{target} has an option {clash.pop()} that systolic {verb} needs for itself; rename it in the recipe"
        )

    def both() -> None:
        pass

    merged = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*theirs.values(), *own.values())
    ]
    both.__signature__ = inspect.Signature(merged)  # ty: ignore[missing-attribute]
    both.__annotations__ = {p.name: p.annotation for p in merged}
    both.__doc__ = _documented(recipe.function, options)
    values = arguments(both, args, f"systolic {verb} {target}")
    return Request(
        recipe=recipe,
        options={name: value for name, value in values.items() if name in theirs},
        verb={name: value for name, value in values.items() if name in own},
    )


def _documented(recipe: Callable[..., Any], options: Callable[..., Any]) -> str:
    """One docstring with the Args sections of both."""
    text = inspect.getdoc(recipe) or ""
    own = (inspect.getdoc(options) or "").partition("Args:\n")[2]
    if "Args:\n" in text:
        head, _, tail = text.partition("Args:\n")
        return f"{head}Args:\n{own.rstrip()}\n{tail}"
    return f"{text}\n\nArgs:\n{own}"


def plan_of(record: Mapping[str, Any]) -> Chosen | None:
    """What a run's job.json says of its plan."""
    return Chosen.from_json(record["plan"]) if record.get("plan") else None


def existing(path: str) -> Path:
    """A path that must be there.

    Raises:
        NotFoundError: it is not.
    """
    found = Path(path)
    if not found.exists():
        raise NotFoundError(f"{path} does not exist; check the path")
    return found
