"""``systolic quantize`` and :func:`systolic.quantize_model`: a model in fewer bits, and what that costs."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.chips import SLICES, Slice
from systolic.core.arguments import Alternative, OptionWords, Partner, argument, command_of
from systolic.core.errors import OptionError, SystolicError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.core.reporter import working
from systolic.core.shutdown import ends_cleanly
from systolic.job import MatrixFormat, WeightFormat

if TYPE_CHECKING:
    from systolic.quantizing.quantize import QuantizedModel

GROUPS = 32, 64, 128
"""Sizes that ``--group`` takes in 4 bits."""
BUDGET = 0.005
"""Loss that ``--auto`` allows by default."""

USAGE = """usage: systolic quantize MODEL --to FORMAT --out DIR [options]

MODEL is the directory of a run, a Bundle, a Hugging Face folder or a GGUF file. The result is a Bundle with its
matrices in fewer bits, and the measured loss. Activations stay in the compute dtype; with --activations products are
int8. Norms, biases, routers and first convolutions are not quantized. The matrices of a language model's vocabulary
have at least 8 bits."""


def _named(name: WeightFormat | str) -> MatrixFormat:
    """The format of a kind or its name, with the usual group."""
    kind = argument("--to", name, WeightFormat)
    return MatrixFormat(format=kind, group=kind.group)


@command_of
def quantize_model(  # noqa: PLR0913  the options of systolic quantize
    path: Path | str,
    out: Path | str,
    *,
    to: Annotated[
        MatrixFormat | WeightFormat | str,
        OptionWords(WeightFormat),
        Alternative(WeightFormat, _named),
        Alternative(str, _named),
    ],
    keep: Annotated[Sequence[str], OptionWords(tuple[str, ...])] = (),
    group: Annotated[int | None, NOT_NEGATIVE] = None,
    data: Path | str | None = None,
    batches: Annotated[int, NOT_NEGATIVE] = 0,
    metrics: Annotated[
        Sequence[str], OptionWords(tuple[str, ...], repeated=True, name="metric")
    ] = (),
    answers: Annotated[int, COUNT] = 100,
    answer_tokens: Annotated[int, COUNT] = 256,
    activations: bool = False,
    calibrate: Path | str | None = None,
    auto: bool = False,
    budget: Annotated[str | float | None, OptionWords(str | None)] = None,
    on: Annotated[
        str | Slice | Sequence[str | Slice] | None, SLICES, OptionWords(str | None)
    ] = None,
    quick: Annotated[bool, Partner("on")] = False,
    repeats: Annotated[int, NOT_NEGATIVE, OptionWords(int, default=5)] = 0,
    trust: bool = False,
) -> "QuantizedModel":
    """Writes a model as a Bundle with its matrices in fewer bits, and measures the loss.

    Args:
        path: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file.
        out: The new Bundle's folder.
        to: int8 and fp8 (e4m3) have a scale for each output channel; int4 and nf4 one for each group of inputs. w8a8 is int8 with --activations.
        keep: Matrices that stay in their dtype: paths, parts of paths such as down, or patterns such as 'blocks/mlp/*'.
        group: Inputs that share a scale with int4 and nf4: 32, 64 (default) or 128. int8 and fp8 take only 0, a channel.
        data: Data to measure quality on in place of the run's own, as for systolic eval --path.
        batches: Use only the first N batches; 0 uses all.
        metrics: Metric of conversations in --data: exact, json, or a function of (answer, reference) as FILE.py:FUNCTION.
        answers: Number of conversations to answer for the metrics, before and after.
        answer_tokens: Limit of new tokens of an answer.
        activations: With --to int8: activations in int8 too, with scales by --calibrate, or by a run's own training data.
        calibrate: Data to fit codes of 4 bits and scales of activations to; it must differ from the data of quality.
        auto: Measure the loss of each matrix; the worst go to int8 or stay in their dtype until the budget is met.
        budget: Largest loss with --auto: relative for perplexity, points for accuracy, such as 0.5%, the default (in Python 0.005).
        on: Slices for forecasts before and after, such as v5e-8,v6e-1: of a server for language models, of the eval step for others.
        quick: Stop the forecasts at the compiler's schedule, after seconds.
        repeats: Timed calls on this machine before and after; 0, the default in Python, times none.
        trust: Execute the run's recipe even if it is another user's; its digest is remembered for later commands.

    Returns:
        The Bundle, compared with the model. If Ctrl-C or an error ends the timing, the Bundle is still written, and
        ``stopped_by`` says why.

    Raises:
        OptionError: options contradict each other, nothing of the model can be quantized, a pattern matches nothing, there is no data for a budget, or calibration has no effect or is the data that quality is measured on.
        NotFoundError, DataError: there is no such model or data, it can't be read, or weights are NaN or infinite.
        RunError: the disk is full, or a run can't be written as a Bundle; nothing is left at ``out``.
        TakenError: ``out`` exists.
    """
    assert isinstance(to, MatrixFormat)
    chosen, share = _format(to, group, activations=activations), _share(budget, auto=auto)
    from systolic.comparing.speeds import SpeedOptions, speeds_beside
    from systolic.inference.evaluation import AnswerOptions
    from systolic.quantizing.quantize import Evaluated, quantize

    path, out = Path(path), Path(out)
    scored = AnswerOptions(metrics=tuple(metrics), conversations=answers, tokens=answer_tokens)
    speed = SpeedOptions(on=_names(on), quick=quick, repeats=repeats)
    measured_on = Evaluated(
        data=None if data is None else Path(data),
        batches=batches,
        answers=scored,
        calibration=None if calibrate is None else Path(calibrate),
    )
    begun = time.perf_counter()
    with ends_cleanly(), working(f"quantize {path.name}") as progress:
        quantized = quantize(
            path, out, to=chosen, keep=keep, on=measured_on, budget=share, trust=trust
        )
        try:
            speeds, timed = speeds_beside(
                (path, quantized.path), speed, trust=trust, say=progress.stage
            )
        except (KeyboardInterrupt, SystolicError) as error:  # the Bundle is written
            quantized = replace(quantized, stopped_by=error)
        else:
            quantized = replace(quantized, speeds=speeds, timed=timed)
    return replace(quantized, seconds=time.perf_counter() - begun)


def _names(on: str | Slice | Sequence[str | Slice] | None) -> str | None:
    """Names of slices, with commas between them."""
    if on is None or isinstance(on, str):
        return on
    each = [on] if isinstance(on, Slice) else on
    return ",".join(place.name if isinstance(place, Slice) else place for place in each)


def _format(to: MatrixFormat, group: int | None, *, activations: bool) -> MatrixFormat:
    """The format with activations in int8 and with the group, where these are asked for.

    Raises:
        OptionError: activations have no such format, or the format no such group.
    """
    kind = to.format
    if activations and kind is not WeightFormat.w8a8:
        if kind is not WeightFormat.int8:
            raise OptionError(
                f"--activations has no {kind.value}: activations are rounded to int8, beside weights in int8; give --to int8"
            )
        kind = WeightFormat.w8a8
    if group is None:
        return to if kind is to.format else MatrixFormat(format=kind, group=kind.group)
    if kind.bits == 4 and group not in GROUPS:
        raise OptionError(
            f"--group is {group}, and {kind.value} has a scale for each group of inputs; give 32, 64 or 128"
        )
    if kind.bits == 8 and group:
        raise OptionError(
            f"--group is {group}, and {kind.value} has one scale for each output channel; leave --group out"
        )
    return MatrixFormat(format=kind, group=group)


def _share(budget: str | float | None, *, auto: bool) -> float | None:
    """The share that may be lost; ``None`` without ``--auto``.

    Raises:
        OptionError: it is no share, or given without ``--auto``.
    """
    if budget is None:
        return BUDGET if auto else None
    if not auto:
        raise OptionError("--budget has an effect with --auto only; add it, or leave --budget out")
    share = math.nan
    if not isinstance(budget, str):
        share = budget
    elif (text := budget.strip()).endswith("%"):
        try:
            share = float(text.removesuffix("%")) / 100
        except ValueError:
            share = math.nan
    if not 0 <= share < 1:
        raise OptionError(f"--budget is {budget!r}; it takes a share such as 0.5%")
    return share
