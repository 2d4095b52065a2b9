"""``systolic quantize RUN|BUNDLE|DIR --to int8|int4|fp8|nf4|w8a8 --out DIR``: a model in fewer bits, and what that costs."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from systolic.cli.parse import parse
from systolic.core.errors import OptionError, SystolicError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.core.shutdown import ends_cleanly
from systolic.core.units import duration
from systolic.job import MatrixFormat, WeightFormat
from systolic.report.output import print_json, warn
from systolic.report.progress import ProgressLine

GROUPS = 32, 64, 128
"""Of ``--group`` in 4 bits."""
BUDGET = 0.005
"""Of ``--auto`` where no other is given."""


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Writes a model as a Bundle with its matrices in fewer bits, and measures what that costs.

    Activations stay in the compute dtype, or with --activations products are of int8. Norms, biases, routers and first convolutions stay as they are; the matrices
    of a language model's vocabulary have 8 bits at least.

    Args:
        run: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file.
        to: int8 and fp8 (e4m3) have a scale for each output channel; int4 and nf4 one for each group of inputs. w8a8 is int8 with --activations.
        out: The new Bundle's folder.
        keep: Matrices that stay in their dtype: paths, parts of paths such as down, or patterns such as 'blocks/mlp/*'.
        group: Of int4 and nf4, inputs that share a scale: 32, 64 (by default) or 128; int8 and fp8 take 0 alone, all of a channel.
        data: Other data than the run's own to measure quality on, as systolic eval --path takes it.
        batches: Only the first so many batches; 0 is all.
        metric: Of conversations in --data: exact, json, or a function of (answer, reference) as FILE.py:FUNCTION; may be given several times.
        answers: Conversations that are answered for the metrics, before and after; the first so many.
        answer_tokens: Most new tokens of such an answer.
        activations: With --to int8: activations in int8 too, with scales by --calibrate, or by a run's own training data.
        calibrate: Other data than that of quality: codes of 4 bits, and scales of activations, are fitted to the inputs that it gives each matrix.
        auto: Measure what each matrix costs alone; the worst go to int8 or stay in their dtype until the budget is met.
        budget: Largest loss with --auto: of perplexity relative, of accuracy in points; 0.5% by default.
        on: Slices for forecasts before and after, such as v5e-8,v6e-1: of a server for language models, of the eval step for others.
        quick: Stop the forecasts at the compiler's schedule, after seconds.
        repeats: Timed calls here before and after; 0 times none.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional]
    to: WeightFormat
    out: Path
    keep: tuple[str, ...] = ()
    group: Annotated[int | None, NOT_NEGATIVE] = None
    data: Path | None = None
    batches: Annotated[int, NOT_NEGATIVE] = 0
    metric: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    answers: Annotated[int, COUNT] = 100
    answer_tokens: Annotated[int, COUNT] = 256
    activations: bool = False
    calibrate: Path | None = None
    auto: bool = False
    budget: str | None = None
    on: str | None = None
    quick: bool = False
    repeats: Annotated[int, NOT_NEGATIVE] = 5
    trust: bool = False
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(QuantizeOptions, args, "systolic quantize")
    kind = _kind(options)
    how = _format(kind, options.group)
    budget = _budget(options)
    from systolic.comparing.speeds import SpeedOptions, speeds_beside
    from systolic.inference.scoring import AnswerOptions
    from systolic.session.quantizing import Evaluated, quantize_model
    from systolic.session.quantizing_text import fallen, lines, title

    answers = AnswerOptions(
        metrics=options.metric, conversations=options.answers, tokens=options.answer_tokens
    )
    speed = SpeedOptions(on=options.on, quick=options.quick, repeats=options.repeats)

    begun = time.perf_counter()
    cut: BaseException | None = None
    with ends_cleanly(), ProgressLine(sys.stderr, f"quantize {options.run.name}") as progress:
        made = quantize_model(
            options.run,
            options.out,
            to=how,
            keep=options.keep,
            on=Evaluated(
                data=options.data,
                batches=options.batches,
                answers=answers,
                calibration=options.calibrate,
            ),
            budget=budget,
            trust=options.trust,
            say=progress.say,
        )
        try:
            speeds, timed = speeds_beside(
                (options.run, made.path), speed, trust=options.trust, say=progress.say
            )
        except (KeyboardInterrupt, SystolicError) as error:  # the Bundle is written
            speeds, timed, cut = [], {}, error
    seconds = time.perf_counter() - begun
    if made.fell:
        warn(fallen(made))
    if options.json:
        each = [one.to_json() for one in speeds]
        print_json({**made.to_json(), "seconds": seconds, "speeds": each, "timed": timed})
    else:
        print(f"{made.path}: {title(made)}, in {duration(seconds)}")
        print("\n".join(lines(made, speeds, timed)))
    if cut is not None:
        sys.stdout.flush()
        raise _told(cut)
    return 0


def _told(cut: BaseException) -> BaseException:
    """What cut the timing short, with words about what is there."""
    if type(cut) is KeyboardInterrupt:
        return KeyboardInterrupt(
            "interrupted while timing; all files are written, and systolic compare times both models"
        )
    return cut


def _kind(options: QuantizeOptions) -> WeightFormat:
    """The format of ``--to`` and ``--activations``.

    Raises:
        OptionError: activations have no such format.
    """
    if not options.activations or options.to is WeightFormat.w8a8:
        return options.to
    if options.to is not WeightFormat.int8:
        raise OptionError(
            f"--activations has no {options.to.value}: activations are rounded to int8, beside weights in int8; give --to int8"
        )
    return WeightFormat.w8a8


def _format(kind: WeightFormat, group: int | None) -> MatrixFormat:
    """The format with the group of ``--group``.

    Raises:
        OptionError: the format has no such group.
    """
    if group is None:
        return MatrixFormat(format=kind, group=kind.group)
    if kind.bits == 4 and group not in GROUPS:
        raise OptionError(
            f"--group is {group}, and {kind.value} has a scale for each group of inputs; give 32, 64 or 128"
        )
    if kind.bits == 8 and group:
        raise OptionError(
            f"--group is {group}, and {kind.value} has one scale for each output channel; leave --group out"
        )
    return MatrixFormat(format=kind, group=group)


def _budget(options: QuantizeOptions) -> float | None:
    """The share that may be lost; ``None`` without ``--auto``.

    Raises:
        OptionError: it is no share, or given without ``--auto``.
    """
    if options.budget is None:
        return BUDGET if options.auto else None
    if not options.auto:
        raise OptionError("--budget has an effect with --auto only; add it, or leave --budget out")
    text = options.budget.strip()
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else math.nan
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise OptionError(f"--budget is {options.budget!r}; it takes a share such as 0.5%")
    return share
