"""``systolic forecast --serve MODEL --on SLICE``: capacity, latency and cost of a server."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from systolic.cli.target import first, request
from systolic.core.arguments import Required
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.job import ExpertAxis, Served, ServedCache, ServedWeights
from systolic.report.output import print_json

SERVE = "--serve"


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options of the forecast of a server (--serve).

    Args:
        on: The slice: v5e-8, v6e-8, tpu7x-8, cpu.
        prompt_tokens: Tokens of each prompt.
        output_tokens: New tokens of each request.
        concurrency: Numbers of requests under way, one line each; by default 1, 4, 16 and so on, as many as fit.
        ttft: Time to the first token that the best load keeps on average: 500ms, 2s.
        tpot: Time of each further token that the best load keeps on average: 30ms.
        page_size: Positions of a page of the cache.
        chunk: Prompt tokens that a step reads.
        host_ms: Milliseconds of the host's work for each step, an assumption: shown behind the step and after it.
        weights: Format of a decoder's matrices: plain, or quantized as systolic quantize does; a quantized Bundle has its own.
        kv_dtype: Format of keys and values: plain, int8 with a scale for each position and head, or fp8 (e4m3) without scales.
        expert_axis: What the expert axis splits beside experts: rows (texts), or heads (as the tensor axis does); by default neither, as systolic serve has it.
        flags: Compiler flags on top of the set that all jobs on the chip share; none leaves that set out.
        quick: Stop at the compiler's schedule, after seconds: memory is exact, the time of ops estimated.
        calibration: Corrects the simulator by profiles of this chip: a name that systolic calibrations lists, or a calibration's file.
        json: Print one JSON object on stdout.
    """

    on: Annotated[str, Required("a slice; add --on v6e-8, systolic chips lists them")]
    prompt_tokens: Annotated[int, COUNT] = 1024
    output_tokens: Annotated[int, COUNT] = 256
    concurrency: Annotated[tuple[int, ...], COUNT] = ()
    ttft: str | None = None
    tpot: str | None = None
    page_size: Annotated[int, COUNT] = 64
    chunk: Annotated[int, COUNT] = 256
    host_ms: Annotated[float, NOT_NEGATIVE] = 0.0
    weights: ServedWeights = ServedWeights.plain
    kv_dtype: ServedCache = ServedCache.plain
    expert_axis: ExpertAxis | None = None
    flags: str = ""
    quick: bool = False
    calibration: str = ""
    json: bool = False


def forecast_server(args: Sequence[str]) -> int:
    """Forecasts a server; ``args`` are the words of the line without ``--serve``. Returns the exit code."""
    from systolic.chips import slice
    from systolic.chips.flags import resolved
    from systolic.compiling import Compiler
    from systolic.forecasting.calibrations import calibration_for
    from systolic.forecasting.serving.capacity import Load, check_context, forecast_serving
    from systolic.forecasting.serving.forecast import LatencyLimits, latency
    from systolic.forecasting.serving.layout import ROWS, given_layout, layout_of_requests
    from systolic.forecasting.serving.steps import with_formats
    from systolic.report.progress import ProgressLine

    target, rest = first(args, f"forecast {SERVE}", "a model or a recipe")
    asked = request(target, rest, "forecast", ServingOptions)
    options, job = asked.verb, asked.job
    on = slice(options.on)
    load = Load(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        chunk=options.chunk,
        host_seconds=options.host_ms / 1e3,
    )
    check_context(job, load, target)
    calibration_for(options.calibration, [on])  # refused before anything is read or compiled
    job = with_formats(job, target, options.weights)
    if any(word.startswith("--layout.") for word in asked.typed):
        chosen = given_layout(job, on)
    else:
        most = max(options.concurrency, default=ROWS)
        chosen = layout_of_requests(job, on, load, most, options.kv_dtype)
    job = replace(job, layout=chosen.layout)
    compiler = Compiler(flags=resolved(options.flags, on.chip))
    with ProgressLine(sys.stderr, f"{job.name} for {on.name}") as progress:
        made = forecast_serving(
            job,
            on,
            load,
            concurrency=options.concurrency,
            page_size=options.page_size,
            served=_served(options),
            limits=LatencyLimits(
                first_token_seconds=latency(options.ttft, "--ttft"),
                token_seconds=latency(options.tpot, "--tpot"),
            ),
            compiler=compiler.quick() if options.quick else compiler,
            calibration=options.calibration,
            watch=progress.say,
        )
    if chosen.idle:
        made = replace(made, notes=[chosen.idle, *made.notes])
    if options.json:
        print_json({**made.to_json(), "target": target, "quick": options.quick})
    else:
        from systolic.forecasting.display.serving import print_serving

        print_serving(made)
    return 0 if made.fits else 1


def _served(options: ServingOptions) -> Served | None:
    """Format of the cache and split that were asked for; None where they are those of ``systolic serve``."""
    axis = options.expert_axis
    if options.kv_dtype is ServedCache.plain and axis is None:
        return None
    return Served(cache=options.kv_dtype, expert_axis=axis or ExpertAxis.rows)
