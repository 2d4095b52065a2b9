"""``systolic compare A B``: two models side by side."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from systolic.cli.parse import parse
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.report.output import print_json, warn
from systolic.report.progress import ProgressLine


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Prints two models side by side: size, quality, answers to the same inputs, latency here, forecast on a slice.

    Args:
        a: A run, a Bundle, a Hugging Face folder or a GGUF file.
        b: Another one for the same task; its outputs are compared with those of the first.
        data: Data to measure both on, such as new.jsonl, as systolic eval --path reads it, conversations by each model's chat template; without, only evaluations on record are shown.
        batches: Only the first so many batches of it; 0 is all.
        metric: Of conversations: exact (answers that are the reference), json (answers that are JSON), or a function of (answer, reference) as FILE.py:FUNCTION; may be given several times.
        answers: Conversations that both models answer for the metrics, the first so many.
        answer_tokens: Most new tokens of such an answer.
        rows: Texts, pictures or recordings of a timed call, and requests of the forecast.
        prompt_tokens: Tokens of each timed prompt.
        output_tokens: New tokens of each timed prompt.
        repeats: Timed calls of each model, in turn; 0 times none.
        on: Slices for forecasts of both, such as v5e-8,v6e-1: of a server for language models, of the eval step for others.
        quick: Stop the forecasts at the compiler's schedule, after seconds.
        trust: Execute the runs' recipes although they are not yours, now and later: their digests are remembered.
        json: Print one JSON object.
    """

    a: Annotated[Path, tyro.conf.Positional]
    b: Annotated[Path, tyro.conf.Positional]
    data: Path | None = None
    batches: Annotated[int, NOT_NEGATIVE] = 0
    metric: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    answers: Annotated[int, COUNT] = 100
    answer_tokens: Annotated[int, COUNT] = 256
    rows: Annotated[int, COUNT] = 1
    prompt_tokens: Annotated[int, COUNT] = 128
    output_tokens: Annotated[int, COUNT] = 16
    repeats: Annotated[int, NOT_NEGATIVE] = 5
    on: str | None = None
    quick: bool = False
    trust: bool = False
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(CompareOptions, args, "systolic compare")
    from systolic.comparing.comparison import ComparisonOptions, compare_models
    from systolic.inference.scoring import AnswerOptions

    asked = ComparisonOptions(
        data=options.data,
        batches=options.batches,
        answers=AnswerOptions(
            metrics=options.metric, conversations=options.answers, tokens=options.answer_tokens
        ),
        rows=options.rows,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        repeats=options.repeats,
        on=options.on,
        quick=options.quick,
    )
    with ProgressLine(sys.stderr, f"compare {options.a.name} {options.b.name}") as progress:
        made = compare_models(
            options.a, options.b, asked, trust=options.trust, warn=warn, say=progress.say
        )
    if options.json:
        print_json(made.to_json())
        return 0
    from systolic.comparing.display.text import lines

    print("\n".join(lines(made)))
    return 0
