"""A quantized model beside the one that it was made from, as lines: sizes, quality, speeds, and its matrices."""

from collections.abc import Sequence

from systolic.comparing.display.text import speed_rows, timed_lines
from systolic.core.units import si
from systolic.job import WeightFormat
from systolic.quantizing.quantize import QuantizedModel

SHOWN = 4
"""Paths that a line names."""


def title(made: QuantizedModel) -> str:
    """The format that was asked for, unless no matrix has it: then those that they have."""
    names = dict.fromkeys(one.format.partition(" ")[0] for one in made.matrices)
    if made.asked.format.value in names:
        return str(made.asked)
    found = [one.value for one in WeightFormat if one.value in names]
    return f"{' and '.join(found)}{', ' if found else ''}no matrix in {made.asked.format.value}"


def lines(made: QuantizedModel) -> list[str]:
    """The table: sizes, quality, speeds, outputs, the matrices, and what is not as it was asked for."""
    return [*_lines(made), *_exceptions(made), *_over(made)]


def _lines(made: QuantizedModel) -> list[str]:
    ratio = made.bytes_after / made.bytes_before
    sizes = si(made.bytes_before, "B"), si(made.bytes_after, "B")
    rows: list[tuple[str, ...]] = [
        ("", "before", "after", ""),
        ("weights", *sizes, f"x {ratio:.3f}"),
    ]
    if made.before is not None and made.after is not None:
        values = f"{made.before.value:.4f}", f"{made.after.value:.4f}"
        rows.append((made.before.name, *values, _share(made)))
    for name, value in made.answers_before.items():
        rows.append((name, f"{value:.4g}", f"{made.answers_after[name]:.4g}", ""))
    rows += [(*row, "") for row in speed_rows(made.speeds)]
    lines = _aligned(rows)
    if made.timed:
        lines += [f"  {line}" for line in timed_lines(made.speeds, made.timed)]
    if (found := made.outputs) is not None:
        lines.append(
            f"  outputs of a probe over {found.tokens} {found.unit}: largest difference {found.max_abs:.3g} ({found.max_relative:.2%} of the largest output), mean {found.mean_abs:.3g}, {found.agreement}"
        )
    if made.before is None:
        lines.append(f"  quality was not measured{_unmeasured(made)}")
    lines += [f"  {note}" for note in made.notes]
    alone = {}
    if made.choice is not None:
        alone = {one.path: f"{one.lost:+.3%}" for one in made.choice.sensitivities}
    table = [("matrix", "format", "bytes", "alone" if alone else "")]
    order = sorted(
        made.matrices, key=lambda one: list(alone).index(one.path) if one.path in alone else -1
    )
    for one in order:
        size = f"{si(one.bytes_before, 'B')} -> {si(one.bytes_after, 'B')}"
        table.append((one.path, one.format, size, alone.get(one.path, "")))
    return [*lines, "", *_aligned(table)]


def _unmeasured(made: QuantizedModel) -> str:
    """Why, and what would help."""
    if not made.measurable and made.unmeasured is None:
        return ": this kind of model has no measure of it here"
    why = "" if made.unmeasured is None else f" ({made.unmeasured})"
    cure = "give the text or pictures with --data" if made.measurable else "put the data back"
    return f"{why}: {cure}"


def _exceptions(made: QuantizedModel) -> list[str]:
    """Lines on what is not in the format that was asked for, one for each reason."""
    lines, asked = [], {one.path: one.format for one in made.matrices}
    if made.choice is not None:
        asked = {one.path: one.asked for one in made.choice.sensitivities}
    narrow = [path for path, name in asked.items() if name == WeightFormat.int8.value]
    if made.asked.format.bits == 4 and narrow:
        lines.append(
            f"  int8, as matrices of the vocabulary or with fewer than 16 inputs to share a scale: {_few(narrow)}"
        )
    if made.asked.format.activations and narrow:
        lines.append(f"  weights only, as matrices of the vocabulary or of experts: {_few(narrow)}")
    if made.left:
        size = si(sum(one.bytes_before for one in made.left), "B")
        lines.append(f"  left as they are, {size}: {_few([one.path for one in made.left])}")
    return lines


def _over(made: QuantizedModel) -> list[str]:
    """That the budget was not met, where it was not."""
    if made.choice is None or made.budget_met:
        return []
    return [
        f"  the budget of {made.choice.budget:.3%} was not met: the Bundle is at {_share(made)}, and was at {made.choice.lost:+.3%} in the search; give a smaller --budget or a wider format"
    ]


def fallen(made: QuantizedModel) -> str:
    """That quality fell far, and what may keep it."""
    what = f"{'its quality' if made.before is None else made.before.name} fell far"
    if made.before is not None and made.after is not None:
        what += f", from {made.before.value:.4g} to {made.after.value:.4g}"
    else:
        what += f": outputs of a probe are {made.apart:.0%} of their own spread away"
    cure = "give --calibrate, --auto, a smaller --group, or --to int8"
    if made.asked.format.bits == 8:
        cure = "leave the worst matrices as they are, with --auto or --keep"
    return f"{made.path} is hardly the same model: {what}; {cure}"


def _share(made: QuantizedModel) -> str:
    """Loss of quality of the Bundle: of accuracy in points."""
    assert made.before is not None
    assert made.lost is not None
    if made.before.name == "accuracy":
        return f"{round(-100 * made.lost, 2) + 0:+.2f} points"  # no loss is no -0
    return f"{round(made.lost, 4) + 0:+.2%}"


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
