"""``systolic recipes [NAME]``: lists recipes, or one recipe's options with the resolved job."""

import contextlib
import inspect
import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from systolic import recipes
from systolic.cli.parse import known, parse
from systolic.cli.target import request
from systolic.core.ranges import dashed
from systolic.models.published import published
from systolic.recipes import Recipe
from systolic.report.output import print_json

WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class RecipesOptions:
    """The recipes that come with Systolic.

    systolic recipes NAME shows one recipe's options and the job that they make; options may follow
    the name, and NAME may be a file of yours: path/to/file.py:function.

    Args:
        json: Print one JSON object.
    """

    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    if args and not args[0].startswith("-"):
        return show(args[0], args[1:])
    return listing(parse(RecipesOptions, args, "systolic recipes"))


def listing(options: RecipesOptions) -> int:
    """All shipped recipes; returns the exit code."""
    found = [recipes.find(name) for name in recipes.shipped()]
    models = list(published().values())
    if options.json:
        print_json(
            {
                "recipes": [{"name": r.target, "summary": r.summary} for r in found],
                "models": [
                    {"name": m.name, "hub": m.hub, "parameters": m.parameters} for m in models
                ],
            }
        )
        return 0
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for recipe in found:
        table.add_row(recipe.target, recipe.summary)
    console = Console(width=WIDTH, highlight=False)
    console.print(table)
    sizes = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for model in models:
        sizes.add_row(f"[bold]{model.name}[/]", model.hub, f"{model.parameters:,} parameters")
    console.print("\nPublished models, each lm with its sizes:", style="dim")
    console.print(sizes)
    console.print(
        "systolic recipes NAME shows one with its options; systolic train NAME trains it.",
        style="dim",
    )
    return 0


def show(target: str, args: Sequence[str]) -> int:
    """One recipe: its options as ``systolic train`` takes them, and the resolved job."""
    own, rest = known(RecipesOptions, args, f"systolic recipes {target}")
    options = RecipesOptions(**own)
    recipe = recipes.find(target)
    missing = required(recipe)
    values: Mapping[str, Any] = {}
    job = None
    if rest or not missing:
        asked = request(target, args, "recipes", RecipesOptions)
        values, job = asked.options, asked.job.to_json()
    if options.json:
        print_json(record(recipe, values, job))
        return 0
    from systolic.cli.main import VERBS

    with contextlib.suppress(SystemExit):
        request(target, ["--help"], "train", VERBS["train"].forms[0].options.read)
    if job is None:
        names = ", ".join(f"--{dashed(name)}" for name in missing)
        print(f"The job depends on {names}: add it to see the resolved job.")
    else:
        print("The resolved job:")
        print(jsonlib.dumps(job, indent=2, ensure_ascii=False))
    return 0


def record(recipe: Recipe, values: Mapping[str, Any], job: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON object of one recipe; ``job`` is null while a required option is missing."""
    return {
        "name": recipe.target,
        "summary": recipe.summary,
        "required": required(recipe),
        "options": recipes.plain({**defaults(recipe), **values}),
        "job": job,
    }


def defaults(recipe: Recipe) -> dict[str, Any]:
    """Parameter to default of the parameters that have one."""
    parameters = inspect.signature(recipe.function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def required(recipe: Recipe) -> list[str]:
    """Parameters without a default."""
    parameters = inspect.signature(recipe.function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty]
