"""``systolic batch RUN|BUNDLE|DIR in.jsonl out.jsonl``: the requests of a file, answered without a server."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from systolic.cli.parse import parse
from systolic.core.errors import MissingExtraError
from systolic.core.ranges import CONTEXT, COUNT, NOT_NEGATIVE
from systolic.job import ServedCache
from systolic.report.output import print_json, warn


@dataclass(frozen=True, kw_only=True)
class BatchVerbOptions:
    """Answers the requests of a file in OpenAI's batch format, each line exactly once: run again, it continues.

    A line is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body": {...}}, or a body alone. Results are
    appended as they are known, in any order. A line that can't be answered has a result with its error, and the exit code is 1.

    Args:
        model: A run, a Bundle, a Hugging Face folder or a GGUF file, as DIR or NAME=DIR.
        source: The requests (.jsonl).
        out: The results (.jsonl); the lines that it has are not asked again.
        in_flight: Lines that are asked at once; 0 takes twice --rows, and 128 for models that write no text.
        rows: Texts that are continued at once.
        context: Tokens of a text, prompt and answer together, at least 2; 0 takes the model's own, at most 4,096.
        chunk: Most tokens of a prompt that a step reads.
        page_size: Positions of a page of the cache.
        pages: Pages of the cache; 0 holds all texts at their longest.
        kv_dtype: Format of keys and values: plain is the compute dtype; int8 has a scale for each position and head; fp8 (e4m3) has none.
        precision: Of the computation; auto takes a run's own, and for models in files bf16 on TPUs and GPUs and f32 on CPUs.
        checkpoint: Of a run: best, last or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """

    model: Annotated[str, tyro.conf.Positional]
    source: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    in_flight: Annotated[int, NOT_NEGATIVE] = 0
    rows: Annotated[int, COUNT] = 16
    context: Annotated[int, CONTEXT] = 0
    chunk: Annotated[int, COUNT] = 256
    page_size: Annotated[int, COUNT] = 64
    pages: Annotated[int, NOT_NEGATIVE] = 0
    kv_dtype: ServedCache = ServedCache.plain
    precision: Literal["auto", "bf16", "f32"] = "auto"
    checkpoint: str = "best"
    trust: bool = False
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(BatchVerbOptions, args, "systolic batch")
    from systolic.serving.display.batch import BatchDisplay, summary
    from systolic.serving.offline.batch import BatchOrder, run_batch

    try:
        from systolic.cli.serve import ServeOptions, settings

        same = (
            "rows",
            "context",
            "chunk",
            "page_size",
            "pages",
            "kv_dtype",
            "precision",
            "checkpoint",
            "trust",
        )
        given = {name: value for name, value in asdict(options).items() if name in same}
        order = BatchOrder(
            model=options.model,
            source=options.source,
            out=options.out,
            settings=settings(ServeOptions(**given)),
            in_flight=options.in_flight,
        )
    except ImportError as error:
        raise MissingExtraError("systolic batch", "serve") from error
    with BatchDisplay(sys.stderr) as display:
        done = run_batch(order, display.see, warn)
    if options.json:
        print_json({"input": str(options.source), "output": str(options.out), **asdict(done)})
    else:
        print(summary(done, str(options.out)))
    if done.answered < done.lines:
        left = done.lines - done.answered
        warn(f"interrupted with {left:,} lines left; run the same command again to continue")
        return 130
    if done.failed:
        warn(f"{done.failed:,} of {done.lines:,} lines have no answer; their results say why")
    return 1 if done.failed else 0
