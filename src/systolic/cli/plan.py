"""``systolic plan RECIPE --on SLICES``: the slice and the layout that reach a goal best."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from systolic import recipes
from systolic.chips import ChipKind, Slice, chips, named_slices, slice
from systolic.chips.flags import described, resolved
from systolic.cli.output import bounded_workers, print_json
from systolic.cli.target import Request, first, request, require_slice
from systolic.core.errors import OptionError, nearest
from systolic.core.files import check_writable, write_json
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE
from systolic.core.units import si
from systolic.planning import (
    Facts,
    Freedom,
    Goal,
    Limits,
    Objective,
    Plan,
    PriceTerm,
    Search,
    facts_of,
)
from systolic.planning.goal import hourly, span
from systolic.planning.plan import CompileDepth, SearchStop, default_objective, full_over_schedule
from systolic.planning.space import global_batch
from systolic.session.command_line import without

USAGE = """usage: systolic plan RECIPE --on SLICES [options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function. Every layout of every slice
is looked at on paper; the most promising are compiled by the real compiler, best first, until one is
settled. Compiles are kept, so the same command goes on where Ctrl-C or --time-limit ended it.
SLICES is a list: v5e-16,v5p-8; v5e stands for all slices of that chip, any for all of TPUs that have a
price. 8xh100 stands beside them by a roofline, which knows the GPU's rates and not its compiler.

  --on SLICES        where it may run
  --tokens N         train on so many tokens (20e9); by default the job's own steps and batch
  --examples N       or on so many examples
  --goal GOAL        time, cost, energy or pareto (time and cost)
  --deadline 3d      done within 90m, 36h, 3d or 1w
  --budget 1000      for so many dollars at most
  --price PRICE      on-demand (default), spot or committed
  --free WHAT        what may change beside the layout: batch, precision or batch,precision
  --flags="…"        of the compiler for every program, beside those that all jobs on a chip share; none
                     leaves these out
  --max-chips 256    of a slice that any or a chip's name stands for
  --programs 24      compiles, up to the compiler's schedule
  --finalists 2      whole compiles of the best
  --workers N        compiles at once; by default as many as cores and memory allow
  --time-limit 20m   the best until then
  --out PATH         where the plan goes, plan.json by default, from the first answer on
  --html PATH        write a page: time against cost, the ranking, memory, the mesh on the torus
  --json             print the plan as one JSON object

Exits with 1 when nothing fits and keeps the goal. systolic train RECIPE --plan plan.json runs it.
systolic plan RECIPE --help shows the recipe's options."""

ANY = "any"
OFF = 0.03
"""Difference between whole compiles and their schedules that is worth a line."""
FREE = ("batch", "precision")


def options(
    on: str,
    tokens: Annotated[float | None, POSITIVE] = None,
    examples: Annotated[float | None, POSITIVE] = None,
    goal: Objective | None = None,
    deadline: str | None = None,
    budget: Annotated[float | None, POSITIVE] = None,
    price: PriceTerm = PriceTerm.on_demand,
    free: str = "",
    flags: str = "",
    max_chips: Annotated[int, COUNT] = 256,
    programs: Annotated[int, COUNT] = 24,
    finalists: Annotated[int, NOT_NEGATIVE] = 2,
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    time_limit: str | None = None,
    out: Path = Path("plan.json"),
    html: Path | None = None,
    json: bool = False,
) -> None:
    """The verb's own options.

    Args:
        on: Slices, chips (all slices of them) or any, with commas: v5e-16,v5p.
        tokens: To train on; by default the job's own steps times its batch.
        examples: To train on, instead of tokens.
        goal: What is made small: time, cost, energy, or pareto for time and cost. By default cost under a deadline, time under a budget or on one slice, else pareto.
        deadline: For the whole job: 90m, 36h, 3d or 1w.
        budget: Dollars for the whole job.
        price: Which price of the catalogue: on-demand, spot or committed.
        free: What may change beside the layout: batch, precision or batch,precision.
        flags: Of the compiler, on top of the set that all jobs on a chip share (systolic chips v5e lists it); none leaves that set out.
        max_chips: Of a slice that any or the name of a chip stands for.
        programs: Compiles up to the compiler's schedule, those kept from before among them.
        finalists: The best that are compiled to the end.
        workers: Compiles at once; 0 takes as many as cores and memory allow.
        time_limit: The best until then: 20m, 2h.
        out: Where the plan is written, from the first answer on.
        html: Write a page to this file.
        json: Print one JSON object on stdout.
    """


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    target, rest = first(args, "plan", "a recipe")
    require_slice("plan", target, rest, "slices; add --on v5e-16,v5p-8, --on v5e, or --on any")
    asked = request(target, rest, "plan", options)
    verb = asked.verb
    check(verb)
    for path in (verb["out"], verb["html"]):
        if path is not None:
            check_writable(path)
    freedom = freed(verb["free"])
    slices = slices_of(verb["on"], verb["max_chips"], verb["price"])
    job = asked.job
    facts = facts_of(job)
    goal, notes = goal_of(facts, slices, verb)
    search = Search(
        facts=facts,
        slices=slices,
        goal=goal,
        freedom=freedom,
        flags=lambda on: resolved(verb["flags"], on.chip),
        limits=Limits(
            programs=verb["programs"],
            finalists=verb["finalists"],
            workers=bounded_workers(verb["workers"]),
            seconds=None if verb["time_limit"] is None else span(verb["time_limit"]),
        ),
    )
    own = {name.replace("_", "-") for name in verb}
    plan, written = searched(search, asked, without(rest, own))
    return show(plan, verb, [*notes, *after(plan, slices, freedom, verb["finalists"])], written)


def searched(search: Search, asked: Request, given: Sequence[str]) -> tuple[Plan, bool]:
    """Runs the search with progress on stderr; the plan is in its file from the first answer on.

    ``given`` are the recipe's options as they were typed.
    Returns the plan and whether the file has it: without an answer, what an earlier plan left stays.
    """
    from systolic.report.plan.progress import SearchDisplay

    path = asked.verb["out"]
    written: list[object] = []

    def named(plan: Plan) -> Plan:
        options = recipes.plain(asked.options)
        return replace(plan, target=asked.recipe.target, options=options, arguments=given)

    with SearchDisplay(sys.stderr) as view:

        def watch(progress: Any) -> None:
            view.see(progress)
            # A kill leaves the best so far.
            if progress.best is not None and progress.best not in written[-1:]:
                written.append(progress.best)
                write_json(path, named(search.answer()).to_json())

        search.watch = watch
        plan = named(search.run())
    worth = plan.best is not None or (bool(plan.tried) and not path.exists())
    if worth:
        write_json(path, plan.to_json())
    return plan, worth


def show(plan: Plan, verb: Mapping[str, Any], notes: Sequence[str], written: bool) -> int:
    """Prints and writes what was asked for; returns the exit code."""
    from systolic.report.plan.readings import command

    path = verb["out"]
    early = plan.stopped is SearchStop.interrupted and not plan.tried
    if verb["html"] is not None and not early:
        from systolic.report.plan.page import write_page

        write_page(plan, verb["html"], path, notes)
    if verb["json"]:
        run_it = command(plan, path) if plan.best is not None else None
        out = str(path) if written else None
        print_json({**plan.to_json(), "notes": list(notes), "out": out, "command": run_it})
    elif not early:
        from systolic.report.plan.text import print_plan

        print_plan(plan, path, notes)
        for name, where in (("plan", path if written else None), ("report", verb["html"])):
            if where is not None:
                print(f"{name:<10}{where}")
    if plan.best is None and plan.stopped is SearchStop.interrupted and not plan.tried:
        print(
            "systolic: interrupted before the first compile ended; the same command starts again",
            file=sys.stderr,
        )
        return 130
    if plan.stopped is SearchStop.interrupted:
        print(
            "systolic: interrupted; the same command goes on from here, what was compiled is kept",
            file=sys.stderr,
        )
        return 130
    return 0 if plan.best is not None else 1


def check(verb: Mapping[str, Any]) -> None:
    """Whether the verb's options go together.

    Raises:
        OptionError: two contradict each other.
    """
    resolved(verb["flags"], None)  # its words, before anything takes time
    if verb["tokens"] is not None and verb["examples"] is not None:
        raise OptionError("--tokens and --examples say the same in two ways; give one of them")


def freed(text: str) -> Freedom:
    """``batch,precision`` as what the search may change.

    Raises:
        OptionError: another word.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in FREE:
            raise OptionError(
                f"--free is {word!r}{nearest(word, FREE)}; it takes batch, precision or batch,precision"
            )
    return Freedom(batch="batch" in words, precision="precision" in words)


def slices_of(text: str, max_chips: int, price: PriceTerm) -> list[Slice]:
    """The slices of a list of names, of chips and of ``any``; each once, as given.

    Raises:
        NotFoundError: a name that is neither a slice nor a chip.
        OptionError: nothing is left below ``max_chips``.
    """
    found: dict[str, Slice] = {}
    for word in (part.strip() for part in text.split(",")):
        if word:
            found |= {one.name: one for one in _meant(word, max_chips, price)}
    if not found:
        raise OptionError("--on names no slice; give v5e-16,v5p-8, a chip such as v5e, or any")
    return list(found.values())


def _meant(word: str, max_chips: int, price: PriceTerm) -> list[Slice]:
    """What one word of the list stands for."""
    tpus = [one for one in chips() if one.kind is ChipKind.tpu and one.slice_rule is not None]
    if word.lower() == ANY:
        found = [on for one in tpus for on in named_slices(one) if hourly(on, price) is not None]
        what = f"with a price {price.value}"
    else:
        meant = [one for one in tpus if word.lower() in (one.name, *one.aliases)]
        if not meant:
            one = slice(word)
            if one.platform == "cpu":
                raise OptionError(
                    f"{one.name} is this machine: plan is for TPU and GPU slices; systolic forecast --on {one.name} shows one layout"
                )
            return [one]
        found, what = named_slices(meant[0]), f"of {meant[0].name}"
    small = [on for on in found if on.num_chips <= max_chips]
    if not small:
        raise OptionError(
            f"no slice {what} has {max_chips} chips or fewer; raise --max-chips or name a slice"
        )
    return small


def goal_of(
    facts: Facts, slices: Sequence[Slice], verb: Mapping[str, Any]
) -> tuple[Goal, list[str]]:
    """The goal, and what is to be said about it.

    Raises:
        OptionError: tokens of a job that has none, or a time that does not parse.
    """
    job, notes = facts.job, []
    batches = {on.name: global_batch(job, on) for on in slices}
    if verb["tokens"] is not None and facts.unit != "tokens":
        raise OptionError(f"{job.name} has no tokens; give --examples")
    if verb["tokens"] is not None:
        units = verb["tokens"]
    elif verb["examples"] is not None:
        units = verb["examples"] * facts.units_per_example
    else:
        # A batch per device makes more work on a larger slice: the smallest counts, whatever the order of --on.
        batch = min(batches.values())
        units = float(job.steps * batch * facts.units_per_example)
        own = (
            f"{si(units)} {facts.unit} are the job's own {job.steps:,} steps of {batch:,} examples"
        )
        notes.append(f"{own}; --{facts.unit} sets another number")
    if len(set(batches.values())) > 1 and not verb["free"]:
        low, high = min(batches.values()), max(batches.values())
        notes.append(
            f"the job's batch is per device, so the global batch differs by slice ({low:,} to {high:,} examples a step): slices don't train the same; --batch fixes it"
        )
    objective = verb["goal"] or default_objective(
        len(slices), verb["deadline"] is not None, verb["budget"] is not None
    )
    goal = Goal(
        objective=objective,
        units=units,
        unit=facts.unit,
        deadline_seconds=None if verb["deadline"] is None else span(verb["deadline"]),
        budget_usd=verb["budget"],
        price=verb["price"],
    )
    return goal, notes


def after(plan: Plan, slices: Sequence[Slice], freedom: Freedom, finalists: int) -> list[str]:
    """What is to be said about an answer, or to be done where there is none."""
    if plan.best is not None:
        found = []
        if plan.best.depth is CompileDepth.schedule:
            whole = sum(one.full for one in plan.tried)
            more = f"--finalists {whole + 2} compiles more of the best to the end"
            if finalists > whole:
                more = "its whole compile did not end in the time there was, --time-limit 2h gives it longer"
            found.append(
                f"the best was compiled up to the schedule: memory is exact, the time of ops estimated; {more}"
            )
        for name, ratio in full_over_schedule(plan.tried).items():
            if abs(ratio - 1) > OFF:
                found.append(
                    f"compiled whole, steps on {name} take {ratio:.0%} of what their schedules said; the others are ranked as if theirs did too"
                )
        if plan.best.candidate.base:
            found.append(
                f"every program on {plan.best.candidate.on.chip.name} is compiled with {described(plan.best.candidate.base)}; systolic chips NAME says why, --flags changes it"
            )
        compiled = {one.candidate.on.chip.name for one in plan.tried}
        left = sorted({on.chip.name for on in slices} - compiled)
        if left:
            found.append(f"no slice of {', '.join(left)} was compiled; see rejected")
        if any(on.platform == "gpu" for on in slices):
            found.append(
                "GPUs are compared by a roofline of the program that XLA partitions for them: time to about 35 %, memory estimated"
            )
        unpriced = sorted({on.name for on in slices if hourly(on, plan.goal.price) is None})
        if unpriced:
            found.append(
                f"no {plan.goal.price.value} price is known of {', '.join(unpriced[:4])}{' …' if len(unpriced) > 4 else ''}; a file of yours can give one, see systolic chips --help"
            )
        return found
    ways = ["other slices (--on any, --max-chips)"]
    if not freedom.batch:
        ways.append("another batch (--free batch)")
    if plan.goal.deadline_seconds is not None:
        ways.append("a later deadline")
    if plan.goal.budget_usd is not None:
        ways.append("a larger budget")
    return [f"what may help: {', '.join(ways)}"]
