"""``systolic recipes``: the recipes and published models, or a recipe with the job that its options make, and how they are printed."""

import inspect
import json as jsonlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from systolic import recipes
from systolic.core.arguments import Wording, command_of
from systolic.core.ranges import dashed
from systolic.core.reporter import reporter
from systolic.job import Job
from systolic.models.families import PublishedModel, published
from systolic.recipes import Recipe
from systolic.recipes.jobs import JobSource, arguments_of, source_of
from systolic.report.output import or_json

if TYPE_CHECKING:
    pass

WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class RecipeList:
    """The recipes that come with Systolic, and the models that ``lm`` knows."""

    recipes: tuple[Recipe, ...]
    models: tuple[PublishedModel, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "recipes": [{"name": r.target, "summary": r.summary} for r in self.recipes],
            "models": [
                {"name": m.name, "hub": m.hub, "parameters": m.parameters} for m in self.models
            ],
        }


@dataclass(frozen=True, kw_only=True)
class RecipeDescription:
    """A recipe with its options."""

    recipe: Recipe
    options: Mapping[str, Any]
    """Arguments that differ from the recipe's defaults, or all."""
    job: Job | None
    """The job that they make; None while a required option is missing."""

    @property
    def required(self) -> list[str]:
        """Parameters without a default."""
        return required(self.recipe)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.recipe.target,
            "summary": self.recipe.summary,
            "required": self.required,
            "options": recipes.plain({**_defaults(self.recipe), **self.options}),
            "job": None if self.job is None else self.job.to_json(),
        }


@command_of
def list_recipes() -> RecipeList:
    """The recipes that come with Systolic.

    systolic recipes NAME shows one recipe's options and the job that they make; options may follow
    the name, and NAME may be a file of yours: path/to/file.py:function.
    """
    return RecipeList(
        recipes=tuple(recipes.find(name) for name in recipes.shipped()),
        models=tuple(published().values()),
    )


@command_of
def describe_recipe(
    job: Annotated[Job | JobSource | str, Wording("a Job or the name of a recipe or a model")],
    **options: Any,
) -> RecipeDescription:
    """Describes a recipe, with the job that its options make.

    Args:
        job: A recipe or a model by its name or file, or a Job.
        options: Options of the recipe that ``job`` names.

    Raises:
        NotFoundError: there is no such recipe.
        OptionError: an option is unknown, of another type, out of its range or without effect; or one of several that
            are required is missing.
    """
    if not isinstance(job, str):
        source = source_of(job, options)
        return RecipeDescription(recipe=source.recipe, options=source.options, job=source.job)
    recipe = recipes.find(job)
    if not options:
        if required(recipe):
            return RecipeDescription(recipe=recipe, options={}, job=None)
        for line in recipes.notes(job, trains=False):
            reporter().warn(line)
    arguments = arguments_of(recipe, options)
    job = recipe(arguments)
    job.check_effects()
    return RecipeDescription(recipe=recipe, options=arguments, job=job)


def required(recipe: Recipe) -> list[str]:
    """Parameters without a default."""
    parameters = inspect.signature(recipe.function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty]


def _defaults(recipe: Recipe) -> dict[str, Any]:
    """Parameter to default of the parameters that have one."""
    parameters = inspect.signature(recipe.function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@or_json
def show_list(listed: "RecipeList") -> None:
    """Prints recipes and published models."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for recipe in listed.recipes:
        table.add_row(recipe.target, recipe.summary)
    console = Console(width=WIDTH, highlight=False)
    console.print(table)
    sizes = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for model in listed.models:
        sizes.add_row(f"[bold]{model.name}[/]", model.hub, f"{model.parameters:,} parameters")
    console.print("\nPublished models, each lm with its sizes:", style="dim")
    console.print(sizes)
    console.print(
        "systolic recipes NAME shows one with its options; systolic train NAME trains it.",
        style="dim",
    )


@or_json
def show_recipe(described: "RecipeDescription") -> None:
    """Prints the job of a recipe, below the recipe's options."""
    if described.job is None:
        names = ", ".join(f"--{dashed(name)}" for name in described.required)
        print(f"The job depends on {names}: add it to see the resolved job.")
    else:
        print("The resolved job:")
        print(jsonlib.dumps(described.job.to_json(), indent=2, ensure_ascii=False))
