"""The target of a verb: a recipe with its options, or a run."""

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from systolic.cli.parse import (
    asks_help,
    is_unknown,
    known,
    option_names,
    print_help,
    refuse_unknown,
    stray,
)
from systolic.core.errors import OptionError
from systolic.core.ranges import dashed

if TYPE_CHECKING:
    from systolic.job import Job
    from systolic.recipes import Recipe
    from systolic.recipes.jobs.source import JobSource
    from systolic.runs.plan_choice import Chosen

Options = TypeVar("Options")
"""A verb's own options, a dataclass."""
PlanOptions = TypeVar("PlanOptions", bound="UnderPlan")


@dataclass(frozen=True, kw_only=True)
class Request(Generic[Options]):
    """A recipe with its arguments, and the verb's own options."""

    recipe: "Recipe"
    options: Mapping[str, Any]
    """Options of the recipe, by parameter."""
    verb: Options
    typed: Sequence[str] = ()
    """Options of the recipe as they were typed."""
    chosen: "Chosen | None" = None
    """The plan's settings of the job."""

    @property
    def job(self) -> "Job":
        """The job these options make, with the plan's settings."""
        from systolic.recipes.jobs.plan import under_plan

        return under_plan(self.recipe(self.options), self.chosen)

    @property
    def source(self) -> "JobSource":
        """The recipe with these options; no path depends on the working directory."""
        from systolic.runs import paths

        return replace(self.as_typed, options=paths.absolute(dict(self.options)))

    @property
    def as_typed(self) -> "JobSource":
        """The recipe with these options, and paths as they were typed."""
        from systolic.recipes.jobs.source import JobSource

        return JobSource(
            recipe=self.recipe,
            options=self.options,
            given=self.names,
            relative=self.options,
            chosen=self.chosen,
        )

    @property
    def names(self) -> frozenset[str]:
        """Options of the recipe that were typed, without the dashes before them: ``steps``, ``layout.fsdp``."""
        words = (word[2:].partition("=")[0] for word in self.typed if word.startswith("--"))
        return frozenset(map(dashed, words))

    def gives(self, option: str) -> bool:
        """Whether an option of the recipe was typed: ``steps``, ``layout.fsdp``."""
        return dashed(option) in self.names


def first(args: Sequence[str], verb: str, what: str) -> tuple[str, list[str]]:
    """The target and the rest of the arguments.

    Raises:
        OptionError: there is no target.
    """
    if not args or args[0].startswith("-"):
        raise OptionError(f"systolic {verb} needs {what}; systolic {verb} --help shows how")
    return args[0], list(args[1:])


def request(
    target: str, args: Sequence[str], verb: str, options: Callable[..., Options]
) -> Request[Options]:
    """Reads a recipe's options and the verb's from one command line.

    Args:
        target: A recipe's name or file.
        args: What follows it.
        verb: For messages.
        options: The class of the verb's own options.

    Raises:
        NotFoundError: there is no such recipe.
        OptionError: an option is missing, unknown, out of its range or without effect.
    """
    recipe_request = request_for(target, args, verb, options, {})
    recipe_request.job.check_effects()
    return recipe_request


Saved = Mapping[str, Any] | Callable[["Recipe", Any], Mapping[str, Any]]
"""Arguments of a recipe, or what finds them from the recipe and the verb's own options."""


def request_for(
    recipe: "Recipe | str",
    args: Sequence[str],
    verb: str,
    options: Callable[..., Options],
    saved: Saved,
    *,
    target: str = "",
    others: Collection[str] = (),
) -> Request[Options]:
    """Reads the verb's own options, then the recipe's from what is left; one that is not given has its ``saved`` value.

    Args:
        recipe: The recipe, its name or file.
        args: What follows it.
        verb: For messages.
        options: The class of the verb's own options.
        saved: Values of the recipe's options that are not given.
        target: What was typed after the verb, in messages; by default the recipe.
        others: Options of the verb's other forms, which a misspelt one may mean.

    Raises: as :func:`request`.
    """
    from systolic import recipes

    prog = f"systolic {verb} {target or (recipe if isinstance(recipe, str) else recipe.target)}"
    wants_help = asks_help(args)
    # Before the recipe is imported, which takes longer than to refuse a line.
    words = [] if wants_help else _with_first(recipe, renamed(args))
    verb_values, rest = ({}, []) if wants_help else known(options, words, prog)
    imported = recipes.find(recipe) if isinstance(recipe, str) else recipe
    taken = inspect.signature(options).parameters
    clash = set(taken) & set(inspect.signature(imported.function).parameters)
    if clash:
        raise OptionError(
            f"{imported.target} has an option {clash.pop()} that systolic {verb} needs for itself; rename it in the recipe"
        )
    if isinstance(recipe, str) and not wants_help:
        for line in recipes.notes(recipe, trains=verb == "train"):
            print(f"systolic: {line}", file=sys.stderr)
    if wants_help:
        print_help(_both(imported, options), prog)
    own = options(**verb_values)
    defaults = saved if isinstance(saved, Mapping) else saved(imported, own)
    function = _with_defaults(imported, defaults)
    names = option_names(function) | option_names(options) | set(others)
    takes = "a run made from a Job takes steps and layout only" if imported.of_job else ""
    if imported.file is None:
        # A shipped recipe's types name all of its options: no need to parse what is misspelt.
        refuse_unknown([word for word in rest if is_unknown(word, names)], names, prog, takes)
    refuse_unknown(stray(rest, words), names, prog)
    values, unknown = known(function, rest, prog)
    refuse_unknown(unknown, names, prog, takes)
    return Request(recipe=imported, options=values, verb=own, typed=tuple(rest))


FIRST = {"sft": "--from", "image": "--path"}
"""Shipped recipes that take a first word without its option: the model, the pictures."""


def _with_first(recipe: "Recipe | str", words: list[str]) -> list[str]:
    """Words of a command line with the option of a first word that has none: ``sft llama-3.1-8b --on v5e-8``."""
    option = FIRST.get(recipe) if isinstance(recipe, str) else None
    if option is None or not words or words[0].startswith("-") or option in words:
        return words
    return [option, *words]


class UnderPlan(Protocol):
    """A verb's options that may name a plan."""

    @property
    def plan(self) -> Path | None:
        """The plan's file."""

    @property
    def candidate(self) -> int:
        """Rank of the plan's candidate."""


def planned_request(
    target: str,
    args: Sequence[str],
    verb: str,
    options: Callable[..., PlanOptions],
    warn: Callable[[str], None],
    others: Collection[str] = (),
) -> Request[PlanOptions]:
    """A recipe's options and the verb's; under a plan, the options that were planned where they are not given.

    Raises: as :func:`request`, and what :func:`systolic.runs.plan_choice.read` and
        :func:`systolic.recipes.jobs.plan.kept_choice` raise of the plan.
    """
    from systolic.recipes.jobs.plan import kept_choice, planned_options
    from systolic.runs.plan_choice import read

    chosen: Chosen | None = None
    planned: Mapping[str, Any] = {}

    def saved(recipe: "Recipe", own: PlanOptions | None) -> Mapping[str, Any]:
        nonlocal chosen, planned
        if own is not None and own.plan is not None:
            chosen = read(own.plan, own.candidate)
            planned = planned_options(recipe, chosen)
        return planned

    recipe_request = request_for(target, args, verb, options, saved, others=others)
    if chosen is None:
        recipe_request.job.check_effects()
        return recipe_request
    before, now = recipe_request.recipe(planned), recipe_request.job
    kept = kept_choice(chosen, before, now, steps_given=recipe_request.gives("steps"), warn=warn)
    return replace(recipe_request, chosen=kept)


def renamed(args: Sequence[str], *, typed: bool = True) -> list[str]:
    """``args`` with today's names for options of the last version, each reported on stderr where the user ``typed`` them."""
    from systolic.job.layout import RENAMED

    options = {f"--layout.{dashed(old)}": f"--layout.{dashed(new)}" for old, new in RENAMED.items()}
    words = []
    for word in args:
        name, equals, value = word.partition("=")
        now = options.get(dashed(name))
        if now is not None and typed:
            print(f"systolic: {dashed(name)} is now called {now}; use that name", file=sys.stderr)
        words.append(word if now is None else f"{now}{equals}{value}")
    return words


def _with_defaults(recipe: "Recipe", saved: Mapping[str, Any]) -> Callable[..., None]:
    """A function with a recipe's parameters, of which those in ``saved`` have its values as defaults."""
    return _function(
        [
            p.replace(default=saved[name]) if name in saved else p
            for name, p in inspect.signature(recipe.function, eval_str=True).parameters.items()
        ],
        inspect.getdoc(recipe.function) or "",
    )


def _both(recipe: "Recipe", options: Callable[..., Any]) -> Callable[..., None]:
    """A function with a recipe's parameters and a verb's, for their help."""
    signatures = [
        inspect.signature(function, eval_str=True) for function in (recipe.function, options)
    ]
    parameters = [p for signature in signatures for p in signature.parameters.values()]
    return _function(parameters, _documented(recipe.function, options))


def _function(parameters: Sequence[inspect.Parameter], doc: str) -> Callable[..., None]:
    def function() -> None:
        pass

    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    function.__signature__ = inspect.Signature(keywords)  # ty: ignore[missing-attribute]
    function.__annotations__ = {p.name: p.annotation for p in keywords}
    function.__doc__ = doc
    return function


def _documented(recipe: Callable[..., Any], options: Callable[..., Any]) -> str:
    """One docstring with the Args sections of both."""
    text = inspect.getdoc(recipe) or ""
    own = (inspect.getdoc(options) or "").partition("Args:\n")[2]
    if "Args:\n" in text:
        head, _, tail = text.partition("Args:\n")
        return f"{head}Args:\n{own.rstrip()}\n{tail}"
    return f"{text}\n\nArgs:\n{own}"
