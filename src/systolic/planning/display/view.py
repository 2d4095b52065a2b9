"""Output of ``systolic plan``."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.core.arguments import WRITTEN, explained_by
from systolic.core.files import write_atomically, write_json
from systolic.report.output import print_json

if TYPE_CHECKING:
    from systolic.forecasting.ranking import Ranking
    from systolic.planning.plan import Plan
    from systolic.planning.serving import ServingPlan


def show(
    plan: "Plan",
    *,
    out: Path | None = None,
    html: Annotated[Path | None, WRITTEN] = None,
    json: bool = False,
) -> int:
    """Prints a plan; returns the exit code.

    Args:
        plan: The plan.
        html: Write a page to this file: time against cost, the ranking, memory, the mesh on the torus.
        json: Print the plan as one JSON object on stdout.
    """
    from systolic.planning.display.readings import command
    from systolic.planning.display.text import notes, print_plan
    from systolic.planning.plan import SearchStop

    interrupted = plan.stopped is SearchStop.interrupted
    early = interrupted and not plan.tried
    if html is not None and not early:
        from systolic.planning.display.page import write_page

        write_page(plan, html, out)
    if json:
        run_it = command(plan, out) if plan.best is not None else None
        saved = None if plan.saved is None else str(plan.saved)
        print_json({**plan.to_json(), "notes": notes(plan), "out": saved, "command": run_it})
    elif not early:
        print_plan(plan, out)
        for name, where in (("plan", plan.saved), ("report", html)):
            if where is not None:
                print(f"{name:<10}{where}")
    if interrupted:
        kept = "before the first compile ended" if early else "finished compiles are kept"
        print(f"systolic: interrupted, {kept}; rerun to continue", file=sys.stderr)
        return 130
    return 0 if plan.best is not None else 1


def show_ranking(
    ranking: "Ranking", *, csv: Annotated[Path | None, WRITTEN] = None, json: bool = False
) -> int:
    """Prints the slices of a program; returns the exit code, 1 where none fits.

    Args:
        ranking: The slices.
        csv: Write the table to this file as CSV.
        json: Print one JSON object on stdout.
    """
    if csv is not None:
        write_atomically(csv, ranking.table.to_csv())
    if json:
        print_json(ranking.to_json())
    else:
        from systolic.forecasting.display.table import print_table

        print_table(ranking.table, notes=ranking.notes)
        if csv is not None:
            print(f"csv      {csv}")
    return 0 if any(row.fits for row in ranking.table) else 1


@explained_by(show)
def show_serving(
    plan: "ServingPlan", *, out: Annotated[Path | None, WRITTEN] = None, json: bool = False
) -> int:
    """Prints the plan of a server; returns the exit code, 1 where nothing takes the demand.

    Args:
        plan: The plan.
        out: Write the plan to this file.
    """
    written = plan.to_json()
    if out is not None:
        write_json(out, written)
    if json:
        print_json(written)
    else:
        from systolic.planning.display.serving import print_serving_plan

        print_serving_plan(plan)
    return 0 if plan.best is not None else 1
