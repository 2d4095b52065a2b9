"""Quality of a model in each format of quantized weights: ``python benchmarks/quantize.py MODEL DATA [BATCHES] [FORMAT ...]``.

A format is ``int8``, ``fp8``, ``int4`` or ``nf4``, with a group as in ``int4/32``. Weights are rounded to what their codes stand for
and run by the program of the plain model, as ``systolic quantize --auto`` does.
"""

import sys
from pathlib import Path

from systolic.core.units import si
from systolic.interop.quantizing import formats_of, matrices_in, planned_tensors
from systolic.interop.source import open_source
from systolic.job import MatrixFormat, WeightFormat
from systolic.session.sensitivity import Measure
from systolic.session.trained import from_source

FORMATS = ("int8", "fp8", "int4/32", "int4/64", "int4/128", "nf4/32", "nf4/64")


def format_of(text: str) -> MatrixFormat:
    """``int4/32`` and the like."""
    name, _, group = text.partition("/")
    kind = WeightFormat(name)
    return MatrixFormat(format=kind, group=int(group) if group else kind.group)


def main(path: str, data: str, batches: str = "8", *asked: str) -> None:
    """Prints a row for each format."""
    source = open_source(path)
    matrices = matrices_in(source)
    measure = Measure(from_source(source), Path(data), int(batches))
    before = sum(spec.nbytes for spec in planned_tensors(source, matrices, {}))
    plain = measure.before
    print(f"| format | weights | of before | {plain.name} | lost |\n|---|---|---|---|---|")
    print(f"| {source.dtype} | {si(before, 'B')} | | {plain.value:.4f} | |", flush=True)
    for text in asked or FORMATS:
        formats = formats_of(matrices, format_of(text), ())
        size = sum(spec.nbytes for spec in planned_tensors(source, matrices, formats))
        lost = measure.lost(matrices, formats)
        value = plain.value - lost if plain.name == "accuracy" else plain.value * (1 + lost)
        row = f"{text} | {si(size, 'B')} | {size / before:.1%} | {value:.4f} | {lost:+.3%}"
        print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
