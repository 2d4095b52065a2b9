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
        written = _Body(
            parse_shape(out),
            [parse_shape(text) for text in operands],
            row["config"].get("name", ""),
        )
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
    name: str
    """Of the fusion: the opcodes that the compiler named it after."""
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
        exact = any(shape.dtype == "f32" for shape in self.operands)
        left = Shape("f32" if exact else "bf16", (rows, depth), (1, 0), (8, 128))
        more = round((flops - 2.0 * out.elements * depth) / left.elements)
        small = [n for n in range(len(self.operands)) if n not in (weights, *lefts)]
        value = self.chain(left, lefts, small, more - exact)
        if exact:
            rounded = Shape("bf16", left.dims, left.minor_to_major, left.tile)
            value = self.add(_layout(rounded), "convert", value)
        contracted = held.dims.index(depth) if held.dims[0] != held.dims[1] else 1
        dims = f", lhs_contracting_dims={{1}}, rhs_contracting_dims={{{contracted}}}"
        self.add(_layout(out), "dot", f"{value}, %p{weights}", dims)

    def chain(self, shape: Shape, whole: Sequence[int], small: Sequence[int], count: int) -> str:
        """``count`` operations on arrays of one shape, which take in all operands; the last one's name."""
        terms = [term for n in whole for term in self.whole(shape, n)] + self.small(shape, small)
        value = terms[0]
        for term in terms[1:]:
            value = self.add(_layout(shape), "add", f"{value}, {term}")
        roots = self.name.count("rsqrt")
        for n in range(count - len(terms) + 1 + roots):
            opcode, operands = ("rsqrt", value) if n < roots else ("multiply", f"{value}, {value}")
            value = self.add(_layout(shape), opcode, operands)
        return value

    def whole(self, shape: Shape, number: int) -> list[str]:
        """An operand of as many elements as a shape, or the gate and the other half of one of twice as many."""
        operand = self.operands[number]
        if operand.elements >= 2 * shape.elements > 0:
            first, second = self.halves(number, shape)
            gate = self.add(_layout(shape), "logistic", first)
            return [self.add(_layout(shape), "multiply", f"{first}, {gate}"), second]
        turned = operand.dims != shape.dims and _turned(operand, shape)
        return [self.add(_layout(shape), "copy" if turned else "bitcast", f"%p{number}")]

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
                dims = _places(operand.dims, shape.dims) or ()
                opcode, rest = "broadcast", f"dimensions={{{','.join(map(str, dims))}}}"
            terms.append(self.add(_layout(shape), opcode, f"%p{number}", f", {rest}"))
        return terms

    def elementwise(self, flops: float, moved: float) -> None:
        """Operations on the largest array, then slices and sums of it as results."""
        outs = list(self.out.arrays())
        halved = [n for n, s in enumerate(self.operands) if _halves(s, outs)]
        if halved and flops:
            self.of_halves(halved[0], round(flops / outs[0].elements))
            return
        read = moved - sum(shape.bytes for shape in outs)
        sliced = read < WHOLE * sum(shape.bytes for shape in self.operands)
        largest = max([*outs, *(() if sliced else self.operands)], key=lambda s: s.elements)
        largest = self.joined() or largest
        exact = "maximum" in self.name or any(s.dtype == "f32" for s in (*outs, *self.operands))
        dtype = "f32" if exact else largest.dtype
        shape = Shape(dtype, largest.dims, largest.minor_to_major, largest.tile)
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

    def joined(self) -> Shape | None:
        """Shape of the operands side by side along their last dim, where the result is that; None where it isn't."""
        first, *others = self.operands
        width = sum(shape.dims[-1] for shape in self.operands if shape.dims)
        alike = all(shape.dims[:-1] == first.dims[:-1] for shape in others)
        if not (others and alike) or self.out.is_tuple or self.out.dims[-1:] != (width,):
            return None
        return Shape(self.out.dtype, (*first.dims[:-1], width), first.minor_to_major, first.tile)

    def of_halves(self, number: int, count: int) -> None:
        """A gated unit of the halves of an operand, or, where there are two results, a rotation of them.

        Args:
            number: Of the operand.
            count: Operations an element of a result; the gate's logistic is not among them.
        """
        outs = list(self.out.arrays())
        shape = outs[0]
        first, second = self.halves(number, shape)
        terms = self.small(shape, [n for n in range(len(self.operands)) if n != number])
        if len(outs) == 1:
            value = self.add(_layout(shape), "logistic", first)
            for term in (first, second, *terms):
                value = self.add(_layout(shape), "multiply", f"{value}, {term}")
            for _ in range(count - len(terms) - 2):
                value = self.add(_layout(shape), "multiply", f"{value}, {value}")
            return
        results = []
        for left, right in ((first, second), (second, first)):
            terms = (terms * 2)[:2] or [left, right]
            pair = [
                self.add(_layout(shape), "multiply", f"{half}, {term}")
                for half, term in zip((left, right), terms, strict=True)
            ]
            results.append(self.add(_layout(shape), "add", ", ".join(pair)))
        self.add(str(self.out), "tuple", ", ".join(results))

    def halves(self, number: int, shape: Shape) -> list[str]:
        """Slices of an operand along its last dim, as large as a shape."""
        places = [
            ", ".join([*(f"[0:{size}]" for size in shape.dims[:-1]), f"[{n}:{n + shape.dims[-1]}]"])
            for n in (0, shape.dims[-1])
        ]
        laid = Shape(self.operands[number].dtype, shape.dims, shape.minor_to_major, shape.tile)
        return [
            self.add(_layout(laid), "slice", f"%p{number}", f", slice={{{place}}}")
            for place in places
        ]

    def result(self, value: str, shape: Shape, out: Shape, number: int) -> str:
        """One result, of the value whose shape is ``shape``; slices follow each other."""
        if out.elements == shape.elements:
            opcode = "copy" if len(out.dims) == len(shape.dims) else "reshape"
            return self.add(_layout(out), opcode if _turned(shape, out) else "bitcast", value)
        kept = _places(out.dims, shape.dims)
        if kept is not None and len(kept) < len(shape.dims):
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


def _halves(operand: Shape, outs: Sequence[Shape]) -> bool:
    """Whether an operand is as large as two arrays of the results' shape, side by side."""
    dims = {out.dims for out in outs}
    sizes = [size for size in operand.dims if size > 1]
    return len(dims) == 1 and any(
        sizes == [*(n for n in size[:-1] if n > 1), 2 * size[-1]] for size in dims if size
    )


def _places(part: Sequence[int], whole: Sequence[int]) -> tuple[int, ...] | None:
    """Dims of an array, in order, that have the sizes of another one's; None where they don't."""
    left, places = list(enumerate(whole)), []
    for size in part:
        at = next((n for n, (_, other) in enumerate(left) if other == size), None)
        if at is None:
            return None
        places.append(left[at][0])
        left = left[at + 1 :]
    return tuple(places)


def _turned(before: Shape, after: Shape) -> bool:
    """Whether two layouts of the same elements have another fastest dim, or other tiles."""

    def fastest(shape: Shape) -> tuple[int, ...]:
        order = [d for d in shape.minor_to_major if shape.dims[d] > 1]
        return tuple(shape.dims[d] for d in order)

    return fastest(before) != fastest(after) or before.tile[-2:] != after.tile[-2:]
