"""``systolic plan serve MODEL --on SLICES``: slices, layouts and replicas that serve a demand at the least cost."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from systolic.cli.output import print_json
from systolic.cli.parse import Required, print_verb_help
from systolic.cli.target import first, request
from systolic.core.files import check_writable, write_json
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE
from systolic.job import ServedCache, ServedWeights
from systolic.planning.objective import PriceTerm

SERVE = "serve"
FORMS = """usage: systolic plan serve MODEL --on SLICES --requests-per-second N [options]

MODEL is a published model that systolic recipes lists (llama-3.1-8b), a config.json, a Hugging Face folder or a
Bundle; weights are not needed. For each slice: engines and how the devices of each are split, the requests that an
engine takes within --ttft and --tpot, replicas, dollars an hour and per million tokens, headroom. Layouts are ranked
by the floors of their steps, and compiled best first until no floor is below the cheapest. Compiles are kept.
SLICES is a list: v6e-8,v5e-8; v6e stands for the slices of that chip that are one machine, as systolic serve needs
them, or for larger ones where no machine holds the model; any for those of all TPUs.

Exits with 1 when nothing takes the demand."""


@dataclass(frozen=True, kw_only=True)
class ServingPlanOptions:
    """Options of the plan of a server.

    Args:
        on: Slices, chips (their slices of one machine) or any, with commas: v6e-8,v5e.
        requests_per_second: Requests that come, by chance.
        prompt_tokens: Tokens of each prompt.
        output_tokens: New tokens of each request.
        ttft: Time to the first token that 99 % of the requests keep, the wait for other prompts included: 500ms, 1s.
        tpot: Mean time of each further token: 50ms.
        price: Which price of the catalogue: on-demand, spot or committed.
        weights: Format of a decoder's matrices: plain, or quantized as systolic quantize does; a quantized Bundle has its own.
        kv_dtype: Format of keys and values: plain, int8 with a scale for each position and head, or fp8 (e4m3) without scales.
        chunk: Prompt tokens that a step reads.
        host_ms: Milliseconds of the host's work for each step, an assumption.
        max_chips: Chips at most of a slice that any or the name of a chip stands for.
        candidates: Layouts that are compiled up to the schedule, those of the least floors.
        finalists: How many of the best get a full compile.
        flags: Compiler flags on top of the set that all jobs on a chip share; none leaves that set out.
        out: Write the plan to this file.
        json: Print the plan as one JSON object on stdout.
    """

    on: Annotated[str, Required("slices; add --on v6e-8,v5e-8, --on v6e, or --on any")]
    requests_per_second: Annotated[
        float, POSITIVE, Required("the demand; add --requests-per-second 100")
    ]
    prompt_tokens: Annotated[int, COUNT] = 1024
    output_tokens: Annotated[int, COUNT] = 256
    ttft: str | None = None
    tpot: str | None = None
    price: PriceTerm = PriceTerm.on_demand
    weights: ServedWeights = ServedWeights.plain
    kv_dtype: ServedCache = ServedCache.plain
    chunk: Annotated[int, COUNT] = 256
    host_ms: Annotated[float, NOT_NEGATIVE] = 0.0
    max_chips: Annotated[int, COUNT] = 256
    candidates: Annotated[int, COUNT] = 6
    finalists: Annotated[int, NOT_NEGATIVE] = 1
    flags: str = ""
    out: Path | None = None
    json: bool = False


def plan_server(args: Sequence[str]) -> int:
    """Plans a server; ``args`` are the words after ``plan serve``. Returns the exit code."""
    if not args or args[0] in ("-h", "--help"):
        return print_verb_help(FORMS, ServingPlanOptions)
    from systolic.report.plan.serving import print_serving_plan
    from systolic.report.progress import ProgressLine
    from systolic.session.serving_plan import plan_serving

    target, rest = first(args, f"plan {SERVE}", "a model")
    asked = request(target, rest, f"plan {SERVE}", ServingPlanOptions)
    options = asked.verb
    if options.out is not None:
        check_writable(options.out)
    with ProgressLine(sys.stderr, asked.job.name) as progress:
        plan = plan_serving(
            asked.job,
            on=options.on,
            requests_per_second=options.requests_per_second,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            ttft=options.ttft,
            tpot=options.tpot,
            price=options.price,
            weights=options.weights,
            kv_dtype=options.kv_dtype,
            chunk=options.chunk,
            host_ms=options.host_ms,
            max_chips=options.max_chips,
            candidates=options.candidates,
            finalists=options.finalists,
            flags=options.flags,
            target=target,
            watch=progress.say,
        )
    made = {**plan.to_json(), "target": target}
    if options.out is not None:
        write_json(options.out, made)
    if options.json:
        print_json(made)
    else:
        print_serving_plan(plan)
    return 0 if plan.best is not None else 1
