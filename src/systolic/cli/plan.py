"""``systolic plan RECIPE --on SLICES``: the slice and the layout that reach a goal best."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.cli.output import bounded_workers, print_json
from systolic.cli.parse import Required, print_verb_help
from systolic.cli.plan_program import END, PlanProgramOptions, plan_program
from systolic.cli.plan_serving import SERVE, plan_server
from systolic.cli.target import Request, first, request
from systolic.core.files import check_writable, write_json
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE
from systolic.planning.objective import Objective, PriceTerm

if TYPE_CHECKING:
    from systolic.planning.plan import Plan
    from systolic.planning.search import Limits, SearchProgress

FORMS = """usage: systolic plan RECIPE --on SLICES [options]
       systolic plan serve MODEL --on SLICES --requests-per-second N [options]
       systolic plan --on SLICES [options] -- python train.py [its options]

RECIPE is a name that systolic recipes lists, path/to/file.py:function, or a model: llama-3.1-70b, a config.json,
a Hugging Face folder or a Bundle; weights are not needed. Every layout of every slice is
analysed; the most promising are compiled by the real compiler, best first, until one is settled. Compiles
are kept: rerun to continue where Ctrl-C or --time-limit ended the search.
SLICES is a list: v5e-16,v5p-8; v5e stands for all slices of that chip, any for all of TPUs that have a
price. 8xh100 stands beside them by a roofline, which knows the GPU's rates and not its compiler.
What follows -- is a JAX program of your own: it is started once for each slice, unchanged, until its step is known, and
the slices are ranked as they are; its mesh and batch are its own affair. One where it fails is listed with the reason.
It plans train steps; systolic forecast and systolic explain have --step for others. plan serve plans a server of a
model for a demand: systolic plan serve --help shows its options.

Exits with 1 when nothing fits and keeps the goal. systolic train RECIPE --plan plan.json runs it.
systolic plan RECIPE --help shows the recipe's options."""

SLICES = Required("slices; add --on v5e-16,v5p-8, --on v5e, or --on any")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan.

    Args:
        on: Slices, chips (all slices of them) or any, with commas: v5e-16,v5p.
        tokens: Tokens to train on; by default the job's own steps times its batch.
        examples: Examples to train on, instead of tokens.
        goal: What is made small: time, cost, energy, pareto for time and cost, or fit for the fewest chips that it fits on, with passes and rematerialisation free. By default cost under a deadline, time under a budget or on one slice, else pareto.
        deadline: For all the training: 90m, 36h, 3d or 1w.
        budget: Dollars for all the training.
        price: Which price of the catalogue: on-demand, spot or committed; or dollars of a chip and hour, 0 for chips that cost nothing.
        start_up: Start of the job with its compile: 5m. By default the compile on this machine and 2 minutes, an assumption.
        storage_rate: GB/s that a host reads from and writes to storage, for checkpoints and data; by default 1, an assumption.
        preemptions_per_day: Preemptions of the slice; by default 0, and with spot prices 1, an assumption.
        grid_intensity: Grams of CO2 per kWh where the slice runs; the plan then tells kilograms.
        free: What may change beside the layout: batch, precision or batch,precision.
        flags: Compiler flags on top of the set that all jobs on a chip share (systolic chips v5e lists it); none leaves that set out.
        max_chips: Chips at most of a slice that any or the name of a chip stands for.
        programs: Compiles up to the compiler's schedule, those kept from before among them.
        finalists: How many of the best get a full compile.
        workers: Compiles at once; 0 takes as many as cores and memory allow.
        time_limit: When to answer with the best until then: 20m, 2h.
        calibration: Corrects the simulator by profiles of the slices' chip: a name that systolic calibrations lists, or a calibration's file.
        out: Where the plan is written, from the first answer on.
        html: Write a page to this file: time against cost, the ranking, memory, the mesh on the torus.
        json: Print the plan as one JSON object on stdout.
    """

    on: Annotated[str, SLICES]
    tokens: Annotated[float | None, POSITIVE] = None
    examples: Annotated[float | None, POSITIVE] = None
    goal: Objective | None = None
    deadline: str | None = None
    budget: Annotated[float | None, POSITIVE] = None
    price: str = PriceTerm.on_demand.value
    start_up: str | None = None
    storage_rate: Annotated[float | None, POSITIVE] = None
    preemptions_per_day: Annotated[float | None, NOT_NEGATIVE] = None
    grid_intensity: Annotated[float | None, NOT_NEGATIVE] = None
    free: str = ""
    flags: str = ""
    max_chips: Annotated[int, COUNT] = 256
    programs: Annotated[int, COUNT] = 24
    finalists: Annotated[int, NOT_NEGATIVE] = 2
    workers: Annotated[int, NOT_NEGATIVE] = 0
    time_limit: str | None = None
    calibration: str = ""
    out: Path = Path("plan.json")
    html: Path | None = None
    json: bool = False

    @property
    def limits(self) -> "Limits":
        """When the search ends.

        Raises:
            OptionError: ``time_limit`` is not a time.
        """
        from systolic.planning.goal import span
        from systolic.planning.search import Limits

        return Limits(
            programs=self.programs,
            finalists=self.finalists,
            workers=bounded_workers(self.workers),
            seconds=None if self.time_limit is None else span(self.time_limit),
        )


Watch = Callable[["SearchProgress"], None]
Planner = Callable[[Request[PlanOptions], Watch], "Plan"]


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        return print_verb_help(FORMS, PlanOptions, PlanProgramOptions)
    if END in args:
        return plan_program(args)
    if args[0] == SERVE:
        return plan_server(args[1:])
    target, rest = first(args, "plan", "a recipe or a model")
    return answer(request(target, rest, "plan", PlanOptions))


def search(asked: Request[PlanOptions], watch: Watch) -> "Plan":
    """Makes the plan that was asked for; raises as :func:`systolic.session.planning.plan`."""
    from systolic.session.planning import plan

    options = asked.verb
    return plan(
        asked.job,
        on=options.on,
        tokens=options.tokens,
        examples=options.examples,
        goal=options.goal,
        deadline=options.deadline,
        budget=options.budget,
        price=options.price,
        start_up=options.start_up,
        storage_rate=options.storage_rate,
        preemptions_per_day=options.preemptions_per_day,
        grid_intensity=options.grid_intensity,
        free=options.free,
        flags=options.flags,
        max_chips=options.max_chips,
        limits=options.limits,
        calibration=options.calibration,
        watch=watch,
    )


def answer(asked: Request[PlanOptions], planner: Planner = search) -> int:
    """Plans with progress on stderr, prints and writes what was asked for; returns the exit code.

    The plan is in its file from the first answer on; without an answer, an earlier plan's file stays.
    """
    from systolic import recipes
    from systolic.report.plan.progress import SearchDisplay

    options, best = asked.verb, []
    for path in (options.out, options.html):
        if path is not None:
            check_writable(path)

    def named(plan: "Plan") -> "Plan":
        plain = recipes.plain(asked.options)
        return replace(
            plan, target=asked.recipe.target, options=plain, arguments=tuple(asked.typed)
        )

    with SearchDisplay(sys.stderr) as view:

        def watch(progress: "SearchProgress") -> None:
            view.see(progress)
            # A kill leaves the best so far.
            if progress.best is not None and progress.best not in best[-1:]:
                best.append(progress.best)
                write_json(options.out, named(progress.answer()).to_json())

        plan = named(planner(asked, watch))
    written = plan.best is not None or (bool(plan.tried) and not options.out.exists())
    if written:
        write_json(options.out, plan.to_json())
    return show(plan, options, written)


def show(plan: "Plan", options: PlanOptions, written: bool) -> int:
    """Prints and writes a plan; returns the exit code."""
    from systolic.planning.plan import SearchStop
    from systolic.report.plan.notes import notes
    from systolic.report.plan.readings import command

    path, interrupted = options.out, plan.stopped is SearchStop.interrupted
    early = interrupted and not plan.tried
    if options.html is not None and not early:
        from systolic.report.plan.page import write_page

        write_page(plan, options.html, path)
    if options.json:
        run_it = command(plan, path) if plan.best is not None else None
        out = str(path) if written else None
        print_json({**plan.to_json(), "notes": notes(plan), "out": out, "command": run_it})
    elif not early:
        from systolic.report.plan.text import print_plan

        print_plan(plan, path)
        for name, where in (("plan", path if written else None), ("report", options.html)):
            if where is not None:
                print(f"{name:<10}{where}")
    if interrupted:
        kept = "before the first compile ended" if early else "finished compiles are kept"
        print(f"systolic: interrupted, {kept}; rerun to continue", file=sys.stderr)
        return 130
    return 0 if plan.best is not None else 1
