"""Ops of a profile: a module around the HLO line of each, which has shapes, layouts and memories but no bodies.

A fusion's body is written so that it does the work that the profile counts: its matmul by the shapes, its elementwise
FLOPs as operations on its largest array, its slices by the bytes that it accessed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from systolic.hlo import Module, Shape, parse
from systolic.hlo.shape import parse_shape, split

KIND = "traced"
"""What the ``what`` of such a row begins with; the profiler's category follows."""
MATMUL = "convolution fusion"
WHOLE = 0.95
"""Share of its operands' bytes that a fusion which reads all of them accesses at least."""
_HEADER = "HloModule traced, is_scheduled=true, num_partitions=2\n\n"
_CALLED = re.compile(r", (?:calls|to_apply)=\S*")


def program(row: Mapping[str, Any]) -> Module:
    """Module of one op."""
    shapes = row["shapes"]
    out, opcode, operands, rest = _parts(shapes["hlo"])
    rest, computations = _CALLED.sub("", rest), ""
    if opcode == "fusion":
        written = _Body(parse_shape(out), [parse_shape(text) for text in operands])
        category = row["what"].removeprefix(KIND).strip()
        body = written.text(category, float(shapes["flops"]), float(shapes["bytes"]))
        computations, rest = f"%fused () -> {out} {{\n{body}}}\n\n", f"{rest}, calls=%fused"
    elif opcode in ("reduce", "all-reduce"):
        sums = "\n".join(f"  %a{n} = f32[] parameter({n})" for n in range(2))
        computations = f"%sum () -> f32[] {{\n{sums}\n  ROOT %s = f32[] add(%a0, %a1)\n}}\n\n"
        rest += ", to_apply=%sum"
    kernel = row["config"]["kernel"] or "op"
    if counted := row["config"]["counted"]:
        config = json.dumps({"custom_call_config": {"counted": counted}})
        rest += f", backend_config={config}"
    names = [f"%p{n}" for n in range(len(operands))]
    lines = [
        f"  {name} = {text} parameter({n})"
        for n, (name, text) in enumerate(zip(names, operands, strict=True))
    ]
    lines.append(f"  ROOT %{kernel} = {out} {opcode}({', '.join(names)}){rest}")
    return parse(
        f"{_HEADER}{computations}ENTRY %main () -> {out} {{\n" + "\n".join(lines) + "\n}\n"
    )


def _parts(line: str) -> tuple[str, str, list[str], str]:
    """Result, opcode, operands' shapes and what follows them."""
    end = _closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
    opcode, _, _ = line[end:].strip().partition("(")
    opening = line.index("(", end)
    closing = _closing(line, opening)
    operands = split(line[opening + 1 : closing])
    return (
        line[:end],
        opcode,
        [text.rpartition(" %")[0].strip() for text in operands],
        line[closing + 1 :],
    )


def _closing(text: str, at: int) -> int:
    depth = 0
    for place in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"{text[:60]!r} has no closing parenthesis; the line was cut off")


def _layout(shape: Shape) -> str:
    order = ",".join(map(str, shape.minor_to_major))
    tile = f":T({','.join(map(str, shape.tile))})" if shape.tile else ""
    dims = ",".join(map(str, shape.dims))
    return f"{shape.dtype}[{dims}]{{{order}{tile}}}"


@dataclass
class _Body:
    """Body of a fusion, line by line."""

    out: Shape
    operands: Sequence[Shape]
    lines: list[str] = field(default_factory=list)

    def text(self, category: str, flops: float, moved: float) -> str:
        """Its instructions."""
        for n, shape in enumerate(self.operands):
            self.lines.append(f"  %p{n} = {_layout(shape)} parameter({n})")
        if category == MATMUL:
            self.matmul(flops)
        elif category == "custom fusion":
            self.gather()
        else:
            self.elementwise(flops, moved)
        self.lines[-1] = self.lines[-1].replace("  %", "  ROOT %", 1)
        return "\n".join(self.lines) + "\n"

    def add(self, shape: str, opcode: str, operands: str, rest: str = "") -> str:
        """Appends an instruction; its name."""
        name = f"%i{len(self.lines)}"
        self.lines.append(f"  {name} = {shape} {opcode}({operands}){rest}")
        return name

    def gather(self) -> None:
        """Rows of a table."""
        table = self.operands[0]
        sizes = ",".join(map(str, (1, *table.dims[1:])))
        rest = f", offset_dims={{1}}, collapsed_slice_dims={{0}}, start_index_map={{0}}, index_vector_dim=1, slice_sizes={{{sizes}}}"
        self.add(_layout(self.out), "gather", "%p0, %p1", rest)

    def matmul(self, flops: float) -> None:
        """A product of the two operands whose shapes fit, operations on the left one, sums with what has the result's size."""
        out = next(self.out.arrays())
        weights, (rows, _, depth) = max(
            (
                (n, (out.elements // b, b, a))
                for n, shape in enumerate(self.operands)
                if len(shape.dims) == 2 and shape.tile
                for a, b in (shape.dims, shape.dims[::-1])
                if out.elements % b == 0 and 2.0 * out.elements * a <= flops
            ),
            key=lambda fit: (fit[1][2], self.operands[fit[0]].elements),
        )
        held = self.operands[weights]
        lefts = [
            n
            for n, s in enumerate(self.operands)
            if n != weights and s.elements in (rows * depth, 2 * rows * depth)
        ]
        if not lefts:
            lefts = [n for n in range(len(self.operands)) if n != weights][:1]
        left = Shape("bf16", (rows, depth), (1, 0), (8, 128))
        more = round((flops - 2.0 * out.elements * depth) / left.elements)
        small = [n for n in range(len(self.operands)) if n not in (weights, *lefts)]
        value = self.chain(left, lefts, small, more)
        contracted = held.dims.index(depth) if held.dims[0] != held.dims[1] else 1
        dims = f", lhs_contracting_dims={{1}}, rhs_contracting_dims={{{contracted}}}"
        self.add(_layout(out), "dot", f"{value}, %p{weights}", dims)

    def chain(self, shape: Shape, whole: Sequence[int], small: Sequence[int], count: int) -> str:
        """``count`` operations on arrays of one shape, which take in all operands; the last one's name."""
        terms = [term for n in whole for term in self.whole(shape, n)] + self.small(shape, small)
        value = terms[0]
        for term in terms[1:]:
            value = self.add(_layout(shape), "add", f"{value}, {term}")
        for _ in range(count - len(terms) + 1):
            value = self.add(_layout(shape), "multiply", f"{value}, {value}")
        return value

    def whole(self, shape: Shape, number: int) -> list[str]:
        """An operand of as many elements as a shape, or slices of it that have as many."""
        operand = self.operands[number]
        parts = max(operand.elements // max(shape.elements, 1), 1)
        turned = operand.dims != shape.dims and _turned(operand, shape)
        opcode = "slice" if parts > 1 else "copy" if turned else "bitcast"
        return [self.add(_layout(shape), opcode, f"%p{number}") for _ in range(parts)]

    def small(self, shape: Shape, numbers: Sequence[int]) -> list[str]:
        """Operands of fewer elements: parts of a concatenation, or one value a row."""
        terms, place = [], 0
        for number in numbers:
            operand = self.operands[number]
            if len(operand.dims) == len(shape.dims) and operand.dims[:-1] == shape.dims[:-1]:
                lows = [*[0] * (len(shape.dims) - 1), place]
                opcode, rest = "pad", f"padding={'x'.join(f'{low}_0' for low in lows)}"
                place += operand.dims[-1]
            else:
                dims = [n for n, size in enumerate(shape.dims) if operand.dims == (size,)][:1]
                opcode, rest = "broadcast", f"dimensions={{{','.join(map(str, dims))}}}"
            terms.append(self.add(_layout(shape), opcode, f"%p{number}", f", {rest}"))
        return terms

    def elementwise(self, flops: float, moved: float) -> None:
        """Operations on the largest array, then slices and sums of it as results."""
        outs = list(self.out.arrays())
        read = moved - sum(shape.bytes for shape in outs)
        sliced = read < WHOLE * sum(shape.bytes for shape in self.operands)
        largest = max([*outs, *(() if sliced else self.operands)], key=lambda s: s.elements)
        shape = Shape(largest.dtype, largest.dims, largest.minor_to_major, largest.tile)
        count = round(flops / max(shape.elements, 1))
        whole = [n for n, s in enumerate(self.operands) if s.elements == shape.elements]
        small = [n for n, s in enumerate(self.operands) if s.elements < shape.elements]
        value = self.chain(shape, whole, small, count) if whole or small else ""
        for n, operand in enumerate(self.operands):
            if operand.elements > shape.elements:
                piece = self.add(_layout(shape), "slice", f"%p{n}")
                value = self.add(_layout(shape), "add", f"{value}, {piece}") if value else piece
        results = [self.result(value, shape, out, n) for n, out in enumerate(outs)]
        if self.out.is_tuple:
            self.add(str(self.out), "tuple", ", ".join(results))

    def result(self, value: str, shape: Shape, out: Shape, number: int) -> str:
        """One result, of the value whose shape is ``shape``; slices follow each other."""
        if out.elements == shape.elements:
            return self.add(_layout(out), "copy" if _turned(shape, out) else "bitcast", value)
        left = list(shape.dims)
        kept = []
        for size in out.dims:
            if size in left:
                at = left.index(size)
                kept.append(len(shape.dims) - len(left) + at)
                left = left[at + 1 :]
        if len(kept) == len(out.dims) < len(shape.dims):
            zero = self.add(f"{out.dtype}[]", "constant", "0")
            summed = [n for n in range(len(shape.dims)) if n not in kept]
            return self.add(
                _layout(out),
                "reduce",
                f"{value}, {zero}",
                f", dimensions={{{','.join(map(str, summed))}}}",
            )
        begins = [*[0] * (len(out.dims) - 1), number * out.dims[-1]]
        parts = ", ".join(f"[{a}:{a + size}]" for a, size in zip(begins, out.dims, strict=True))
        return self.add(_layout(out), "slice", value, f", slice={{{parts}}}")


def _turned(before: Shape, after: Shape) -> bool:
    """Whether two layouts of the same elements have another fastest dim, or other tiles."""

    def fastest(shape: Shape) -> tuple[int, ...]:
        order = [d for d in shape.minor_to_major if shape.dims[d] > 1]
        return tuple(shape.dims[d] for d in order)

    return fastest(before) != fastest(after) or before.tile[-2:] != after.tile[-2:]
