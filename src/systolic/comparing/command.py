"""``systolic compare`` and :func:`systolic.compare_models`: two models side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.chips import Slice
from systolic.core.arguments import OptionWords, Partner, command_of
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.core.reporter import working

if TYPE_CHECKING:
    from systolic.comparing.comparison import Comparison


@command_of
def compare_models(  # noqa: PLR0913  the options of systolic compare
    a: Path | str,
    b: Path | str,
    *,
    data: Path | None = None,
    batches: Annotated[int, NOT_NEGATIVE] = 0,
    metric: Annotated[str | Sequence[str], OptionWords(tuple[str, ...], repeated=True)] = (),
    answers: Annotated[int, COUNT] = 100,
    answer_tokens: Annotated[int, COUNT] = 256,
    rows: Annotated[int, COUNT] = 1,
    prompt_tokens: Annotated[int, COUNT] = 128,
    output_tokens: Annotated[int, COUNT] = 16,
    repeats: Annotated[int, NOT_NEGATIVE] = 5,
    on: str | Slice | Sequence[str | Slice] | None = None,
    quick: Annotated[bool, Partner("on")] = False,
    trust: bool = False,
) -> "Comparison":
    """Compares two models: size, quality, outputs on the same inputs, latency on this machine, forecast on a slice.

    Args:
        a: A run, a Bundle, a Hugging Face folder or a GGUF file.
        b: Another model for the same task; its outputs are compared with those of the first.
        data: Data to measure both on, such as new.jsonl, as for systolic eval --path; conversations use each model's chat template. Without it only evaluations on record are shown.
        batches: Use only the first N batches of the data; 0 uses all.
        metric: Metric of conversations: exact (answers that equal the reference), json (answers that are JSON), or a function of (answer, reference) as FILE.py:FUNCTION.
        answers: Number of conversations that both models answer for the metrics.
        answer_tokens: Limit of new tokens of an answer.
        rows: Texts, pictures or recordings of a timed call, and requests of the forecast.
        prompt_tokens: Tokens of each timed prompt.
        output_tokens: New tokens of each timed prompt.
        repeats: Timed calls of each model, alternating; 0 times none.
        on: Slices for forecasts of both, such as v5e-8,v6e-1: of a server for language models, of the eval step for others.
        quick: Stop the forecasts at the compiler's schedule, after seconds.
        trust: Execute the runs' recipes even if they are another user's; their digests are remembered for later commands.

    Raises:
        OptionError: the models have different tasks, or the data is not of their kind.
        NotFoundError: a model, the data or a slice does not exist.
        SystolicError: a model can't be opened; as :func:`systolic.open`.
    """
    from systolic.comparing.comparison import compared
    from systolic.comparing.speeds import SpeedOptions
    from systolic.inference.evaluation import AnswerOptions

    metrics = (metric,) if isinstance(metric, str) else tuple(metric)
    scored = AnswerOptions(metrics=metrics, conversations=answers, tokens=answer_tokens)
    speeds = SpeedOptions(
        rows=rows,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
        on=_names(on),
        quick=quick,
    )
    first, second = Path(a), Path(b)
    with working(f"compare {first.name} {second.name}"):
        return compared((first, second), speeds, scored, data=data, batches=batches, trust=trust)


def _names(on: str | Slice | Sequence[str | Slice] | None) -> str | None:
    """Names of slices, with commas."""
    if on is None or isinstance(on, str):
        return on
    return ",".join(
        each.name if isinstance(each, Slice) else each
        for each in ([on] if isinstance(on, Slice) else on)
    )
