"""Output of ``systolic quantize``: a quantized model beside the one that it was made from, as lines: sizes, quality, speeds, and its matrices."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from systolic.comparing.view import speed_rows, timed_lines
from systolic.core.reporter import reporter
from systolic.core.units import duration, si
from systolic.job import WeightFormat
from systolic.report.output import print_json

if TYPE_CHECKING:
    from systolic.quantizing.quantize import QuantizedModel

SHOWN = 4
"""Paths that a line names."""


def show(quantized: "QuantizedModel", *, json: bool = False) -> int:
    """Prints a quantized model beside the one that it was made from; returns the exit code.

    Args:
        quantized: The model.
        json: Print one JSON object.

    Raises:
        SystolicError, KeyboardInterrupt: what ended the timing, once all else is printed.
    """
    if quantized.fell:
        reporter().warn(fallen(quantized))
    if json:
        print_json(quantized.to_json())
    else:
        print(f"{quantized.path}: {title(quantized)}, in {duration(quantized.seconds)}")
        print("\n".join(lines(quantized)))
    if quantized.stopped_by is not None:
        sys.stdout.flush()
        raise _with_reason(quantized.stopped_by)
    return 0


def _with_reason(stopped_by: BaseException) -> BaseException:
    """The exception that ended the timing; an interrupt says what is written."""
    if type(stopped_by) is KeyboardInterrupt:
        return KeyboardInterrupt(
            "interrupted while timing; all files are written, and systolic compare times both models"
        )
    return stopped_by


def title(model: "QuantizedModel") -> str:
    """The format that was asked for, unless no matrix has it: then those that they have."""
    names = dict.fromkeys(matrix.format.partition(" ")[0] for matrix in model.matrices)
    if model.asked.format.value in names:
        return str(model.asked)
    formats = [form.value for form in WeightFormat if form.value in names]
    return (
        f"{' and '.join(formats)}{', ' if formats else ''}no matrix in {model.asked.format.value}"
    )


def lines(model: "QuantizedModel") -> list[str]:
    """The table: sizes, quality, speeds, outputs, the matrices, and what is not as it was asked for."""
    return [*_lines(model), *_exceptions(model), *_over(model)]


def _lines(model: "QuantizedModel") -> list[str]:
    ratio = model.bytes_after / model.bytes_before
    sizes = si(model.bytes_before, "B"), si(model.bytes_after, "B")
    rows: list[tuple[str, ...]] = [
        ("", "before", "after", ""),
        ("weights", *sizes, f"x {ratio:.3f}"),
    ]
    if model.before is not None and model.after is not None:
        values = f"{model.before.value:.4f}", f"{model.after.value:.4f}"
        rows.append((model.before.name, *values, _share(model)))
    for name, value in model.answers_before.items():
        rows.append((name, f"{value:.4g}", f"{model.answers_after[name]:.4g}", ""))
    rows += [(*row, "") for row in speed_rows(model.speeds)]
    lines = _aligned(rows)
    if model.timed:
        lines += [f"  {line}" for line in timed_lines(model.speeds, model.timed)]
    if (outputs := model.outputs) is not None:
        lines.append(
            f"  outputs of a probe over {outputs.tokens} {outputs.unit}: largest difference {outputs.max_abs:.3g} ({outputs.max_relative:.2%} of the largest output), mean {outputs.mean_abs:.3g}, {outputs.agreement}"
        )
    if model.before is None:
        lines.append(f"  quality was not measured{_unmeasured(model)}")
    lines += [f"  {note}" for note in model.notes]
    alone = {}
    if model.choice is not None:
        alone = {
            sensitivity.path: f"{sensitivity.lost:+.3%}"
            for sensitivity in model.choice.sensitivities
        }
    table = [("matrix", "format", "bytes", "alone" if alone else "")]
    order = sorted(
        model.matrices,
        key=lambda matrix: list(alone).index(matrix.path) if matrix.path in alone else -1,
    )
    for matrix in order:
        size = f"{si(matrix.bytes_before, 'B')} -> {si(matrix.bytes_after, 'B')}"
        table.append((matrix.path, matrix.format, size, alone.get(matrix.path, "")))
    return [*lines, "", *_aligned(table)]


def _unmeasured(model: "QuantizedModel") -> str:
    """Why, and what would help."""
    if not model.measurable and model.unmeasured is None:
        return ": this kind of model has no measure of it here"
    why = "" if model.unmeasured is None else f" ({model.unmeasured})"
    cure = "give the text or pictures with --data" if model.measurable else "put the data back"
    return f"{why}: {cure}"


def _exceptions(model: "QuantizedModel") -> list[str]:
    """Lines on what is not in the format that was asked for, one for each reason."""
    lines, formats = [], {matrix.path: matrix.format for matrix in model.matrices}
    if model.choice is not None:
        formats = {
            sensitivity.path: sensitivity.asked for sensitivity in model.choice.sensitivities
        }
    narrow = [path for path, name in formats.items() if name == WeightFormat.int8.value]
    if model.asked.format.bits == 4 and narrow:
        lines.append(
            f"  int8, as matrices of the vocabulary or with fewer than 16 inputs to share a scale: {_few(narrow)}"
        )
    if model.asked.format.activations and narrow:
        lines.append(f"  weights only, as matrices of the vocabulary or of experts: {_few(narrow)}")
    if model.left:
        size = si(sum(tensor.bytes_before for tensor in model.left), "B")
        lines.append(f"  left as they are, {size}: {_few([tensor.path for tensor in model.left])}")
    return lines


def _over(model: "QuantizedModel") -> list[str]:
    """That the budget was not met, where it was not."""
    if model.choice is None or model.budget_met:
        return []
    return [
        f"  the budget of {model.choice.budget:.3%} was not met: the Bundle is at {_share(model)}, and was at {model.choice.lost:+.3%} in the search; give a smaller --budget or a wider format"
    ]


def fallen(model: "QuantizedModel") -> str:
    """That quality fell far, and what may keep it."""
    what = f"{'its quality' if model.before is None else model.before.name} fell far"
    if model.before is not None and model.after is not None:
        what += f", from {model.before.value:.4g} to {model.after.value:.4g}"
    else:
        what += f": outputs of a probe are {model.apart:.0%} of their own spread away"
    cure = "give --calibrate, --auto, a smaller --group, or --to int8"
    if model.asked.format.bits == 8:
        cure = "leave the worst matrices as they are, with --auto or --keep"
    return f"{model.path} is hardly the same model: {what}; {cure}"


def _share(model: "QuantizedModel") -> str:
    """Loss of quality of the Bundle: of accuracy in points."""
    assert model.before is not None
    assert model.lost is not None
    if model.before.name == "accuracy":
        return f"{round(-100 * model.lost, 2) + 0:+.2f} points"  # no loss is no -0
    return f"{round(model.lost, 4) + 0:+.2%}"


def _few(paths: Sequence[str]) -> str:
    """The first paths, and how many more."""
    more = len(paths) - SHOWN
    return ", ".join(paths[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
