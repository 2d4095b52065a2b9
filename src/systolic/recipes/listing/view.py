"""Output of ``systolic recipes``."""

import json as jsonlib
from typing import TYPE_CHECKING

from systolic.core.ranges import dashed
from systolic.report.output import or_json

if TYPE_CHECKING:
    from systolic.recipes.listing.command import RecipeDescription, RecipeList

WIDTH = 100


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
