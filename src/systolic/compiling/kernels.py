"""Work of Pallas kernels (FLOPs, vector operations, bytes), counted from the Mosaic code of a call.

``python -m systolic.compiling.kernels < module.txt`` prints the module with the counts beside each body, like
:func:`counted`. It runs in a child process, since JAX's own dialect reads the code.
"""

import base64
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_BODY = re.compile(r'([{,]\s*)("body"\s*:\s*"([A-Za-z0-9+/=]{64,})")')
"""The code of a kernel, at any place in its ``custom_call_config``: newer versions of libtpu sort a config's members."""
_KNOWN = '"counted":'
_MOST_STEPS = 1 << 16
"""Most steps of a grid whose indices and conditions are evaluated one by one."""
_MOST_TURNS = 256
"""Most iterations of a loop that are followed one by one."""
_DYNAMIC = -(1 << 63)
"""MLIR's size of a dynamic dim."""
_WEIGHTS = {
    "exp": 4,
    "exp2": 4,
    "log": 5,
    "log1p": 6,
    "divf": 6,
    "rsqrt": 3,
    "sqrt": 4,
    "tanh": 6,
    "erf": 10,
    "powf": 10,
    "sin": 15,
    "cos": 15,
}
"""Vector operations per element, 1 for other ops; the same as for fusions in :mod:`systolic.sim.estimate`."""
_FREE = frozenset(("constant", "index_cast", "bitcast"))
_BOUNDS = re.compile(r"window_bounds = array<i64: ([\d, ]+)>")
_HBM = ("#tpu.memory_space<any>", "#tpu.memory_space<hbm>")
_DEVICE = 4
"""Place of the device among the operands of ``tpu.enqueue_dma``: source, its semaphore, target, its semaphore, device, core."""
_SPACE = re.compile(r"#tpu\.memory_space<(\w+)>")


def counted(text: str) -> str:
    """A module's text with a ``counted`` object before each kernel's body that could be read.

    The object has ``grid`` and ``steps``, and ``parallel``, the dims of the grid that cores may share; over the whole call ``flops`` by the dtype of the matmuls' operands
    (``f32x6`` for f32 at full precision), ``vector`` operations, elements of ``tanh``, ``bytes`` of device memory that its windows and
    transfers move, ``window_bytes``, the part of them that each window moves, ``remote`` bytes that go to other devices, and ``whole``: false where a loop or a branch depends on data; a branch counts as taken, and with ``loops`` a loop counts once. For a grid
    with dynamic bounds it has only ``windows``, the block sizes of each operand and result, and ``parallel``.
    """
    known: dict[str, str | None] = {}

    def beside(body_match: re.Match[str]) -> str:
        body = body_match[3]
        if body not in known:
            known[body] = _count(body)
        more = known[body]
        return body_match[0] if more is None else f"{body_match[1]}{_KNOWN}{more},{body_match[2]}"

    return text if _KNOWN in text else _BODY.sub(beside, text)


def counted_elsewhere(text: str) -> str:
    """:func:`counted` in a child process; the text as it is where nothing is to count or JAX can't read it."""
    if "tpu_custom_call" not in text or not _BODY.search(text) or _KNOWN in text:
        return text
    done = subprocess.run(
        [sys.executable, "-m", "systolic.compiling.kernels"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 and done.stdout else text


def _count(body: str) -> str | None:
    from jax._src.lib import tpu
    from jax._src.lib.mlir import ir
    from jax.interpreters import mlir

    # Pallas writes operations of any dialect by name; the compiler's own kernels are written as those dialects print.
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    try:
        with context, ir.Location.unknown():
            tpu.register_dialect(context)
            context.load_all_available_dialects()
            module = ir.Module.parse(base64.b64decode(body))
            kernel = _KernelFunction.of(module)
            if kernel is None:
                return None
            if kernel.dynamic:
                counts = {"windows": kernel.blocks(), "parallel": kernel.parallel}
            else:
                counts = kernel.count()
            return json.dumps(counts, separators=(",", ":"))
    except (ir.MLIRError, ValueError):
        return None  # written by a version whose code this one can't read


def _short(operation: Any) -> str:
    """``stable_mosaic.arith.addf`` is ``addf``."""
    return operation.name.rpartition(".")[2]


@dataclass
class _Totals:
    flops: dict[str, float] = field(default_factory=dict)
    vector: float = 0.0
    tanh: float = 0.0
    bytes: float = 0.0
    remote: float = 0.0
    """Bytes that go to other devices."""


@dataclass
class _KernelFunction:
    """Function of a kernel, with the functions that place its windows."""

    entry: Any
    functions: Mapping[str, Any]
    grid: Sequence[int]
    whole: bool = True
    """Whether no loop and no branch depends on data."""
    loops: bool = False
    """Whether a loop depends on data."""
    values: dict[Any, int | None] = field(default_factory=dict)
    """Values of arguments: indices of the grid and of loops, and loop carries."""
    memo: dict[Any, int | None] = field(default_factory=dict)
    """Values computed from the arguments; cleared whenever one of these changes."""
    makers: dict[Any, Any] = field(default_factory=dict)
    """Cache of the operation that makes a value; None for an argument of a block."""

    @staticmethod
    def of(module: Any) -> "_KernelFunction | None":
        """Kernel of a module, its first function; None where it has none."""
        functions = {}
        for operation in module.body.operations:
            inner = operation.operation
            if _short(inner) == "func" and "sym_name" in inner.attributes:
                functions[str(inner.attributes["sym_name"]).strip('"')] = inner
        if not functions:
            return None
        entry: Any = functions.get("main", next(iter(functions.values())))
        grid: list[int] = []
        if "iteration_bounds" in entry.attributes:
            grid = [int(n) for n in entry.attributes["iteration_bounds"]]
        return _KernelFunction(entry, functions, grid)

    @property
    def dynamic(self) -> bool:
        """Whether the number of the grid's steps depends on data."""
        return any(n == _DYNAMIC or n < 0 for n in self.grid)

    def blocks(self) -> list[list[int]]:
        """Block sizes of operands and results, from the grid's windows."""
        if "window_params" not in self.entry.attributes:
            return []
        bounds = [_BOUNDS.search(str(window)) for window in self.entry.attributes["window_params"]]
        return [[int(n) for n in match[1].split(",")] for match in bounds if match]

    @property
    def steps(self) -> int:
        """Sizes of the grid."""
        return math.prod(self.grid)

    @property
    def parallel(self) -> list[int]:
        """Dims of the grid whose steps may run in any order, so that cores can share them."""
        if "dimension_semantics" not in self.entry.attributes:
            return []
        said = re.findall(r"semantics<(\w+)>", str(self.entry.attributes["dimension_semantics"]))
        return [n for n, how in zip(self.grid, said, strict=False) if how == "parallel"]

    def count(self) -> dict[str, Any]:
        """Counts of a whole call."""
        totals = _Totals()
        self.block(self.entry.regions[0].blocks[0], float(self.steps), totals)
        windows = self.windows()
        totals.bytes += sum(windows)
        return {
            "grid": list(self.grid),
            "steps": self.steps,
            "parallel": self.parallel,
            "flops": totals.flops,
            "vector": totals.vector,
            "tanh": totals.tanh,
            "bytes": totals.bytes,
            "window_bytes": windows,
            "remote": totals.remote,
            "whole": self.whole,
            "loops": self.loops,
        }

    def block(self, block: Any, times: float, totals: _Totals) -> None:
        """Adds the work of a block that runs ``times`` times."""
        for each in block.operations:
            operation = each.operation
            name = _short(operation)
            if name == "for":
                self.loop(operation, times, totals)
            elif name == "while":
                self.whole, self.loops = False, True
                for region in operation.regions:
                    self.block(region.blocks[0], times, totals)
            elif name == "if":
                self.branches(operation, times, totals)
            elif name in ("matmul", "contract"):
                self.product(operation, times, totals)
            elif name == "enqueue_dma":
                totals.bytes += times * _transferred(operation)
                totals.remote += times * _sent(operation)
            else:
                operations = _vector(operation)
                totals.vector += times * operations
                totals.tanh += times * operations / _WEIGHTS["tanh"] if name == "tanh" else 0.0
                for region in operation.regions:
                    for inner in region.blocks:
                        self.block(inner, times, totals)

    def loop(self, operation: Any, times: float, totals: _Totals) -> None:
        """Adds the work of a loop, by iterations where it is short, since its carries decide conditions inside."""
        bounds = [self.value(operation.operands[n]) for n in range(3)]
        body = operation.regions[0].blocks[0]
        if None in bounds:
            self.whole, self.loops = False, True
            self.block(body, times, totals)
            return
        low, high, step = (int(n or 0) for n in bounds)
        turns = range(low, high, max(step, 1))
        if len(turns) > _MOST_TURNS:
            self.block(body, times * len(turns), totals)
            return
        arguments = list(body.arguments)
        carried = [self.value(operand) for operand in list(operation.operands)[3:]]
        for turn in turns:
            self.given(dict(zip(arguments, [turn, *carried], strict=False)))
            self.block(body, times, totals)
            last = list(body.operations)[-1].operation
            carried = [self.value(operand) for operand in last.operands]
        self.forget(arguments)
        self.given(dict(zip(list(operation.results), carried, strict=False)))

    def branches(self, operation: Any, times: float, totals: _Totals) -> None:
        """Adds the work of branches; a condition on the grid is evaluated at each step, one on data counts as true."""
        share = self.share(operation.operands[0])
        if share is None:
            self.whole = False
            share = 1.0
        for region, part in zip(operation.regions, (share, 1.0 - share), strict=False):
            for inner in region.blocks:
                if part:
                    self.block(inner, times * part, totals)

    def product(self, operation: Any, times: float, totals: _Totals) -> None:
        """Adds the FLOPs of a matmul, 2 per multiply-add."""
        left, right, out = (list(operation.operands[n].type.shape) for n in range(3))
        batch = out[0] if len(out) > 2 else 1
        depth = math.sqrt(math.prod(left) * math.prod(right) / max(math.prod(out) * batch, 1))
        dtype = str(operation.operands[0].type.element_type)
        precision = str(operation.attributes.get("precision", "")) if dtype == "f32" else ""
        if "fp32" in precision:
            dtype = "f32x6"
        elif "bf16" in precision:  # the compiler's own kernels say so: rounded, and one pass
            dtype = "bf16"
        totals.flops[dtype] = totals.flops.get(dtype, 0.0) + times * 2.0 * math.prod(out) * depth

    def windows(self) -> list[float]:
        """Bytes of the blocks of each window that the grid's steps fetch and write, one for each change of place.

        A place changes when an index that it depends on does; grid axes after the last of these
        don't change it.
        """
        if "window_params" not in self.entry.attributes:
            return []
        arguments = list(self.entry.regions[0].blocks[0].arguments)[len(self.grid) :]
        if "scalar_prefetch" in self.entry.attributes:
            arguments = arguments[_integer(self.entry.attributes["scalar_prefetch"]) :]
        moved = []
        for window, argument in zip(
            self.entry.attributes["window_params"], arguments, strict=False
        ):
            transform = re.search(r"transform_indices = @(\w+)", str(window))
            space = _SPACE.search(str(argument.type))
            if transform is None or space is None or space[1] != "vmem":
                moved.append(0.0)
                continue
            axes = self.axes_of_transform(self.functions.get(transform[1]))
            times = math.prod(self.grid[: max(axes, default=-1) + 1])
            moved.append(_bytes(argument.type) * times)
        return moved

    def axes_of_transform(self, transform: Any) -> set[int]:
        """Axes of the grid that a window's place depends on."""
        if transform is None:
            return set()
        block = transform.regions[0].blocks[0]
        axes = {argument: n for n, argument in enumerate(block.arguments)}
        sources: set[int] = set()
        for result in list(block.operations)[-1].operation.operands:
            sources |= self.sources(result, axes)
        return {axis for axis in sources if axis < len(self.grid)}

    def share(self, condition: Any) -> float | None:
        """Share of the grid's steps in which a condition holds; None where it depends on data."""
        indices = list(self.entry.regions[0].blocks[0].arguments)[: len(self.grid)]
        axes = sorted(self.sources(condition, {argument: n for n, argument in enumerate(indices)}))
        if math.prod(self.grid[axis] for axis in axes) > _MOST_STEPS:
            return None
        held = number = 0
        for step in itertools.product(*(range(self.grid[axis]) for axis in axes)):
            self.given({indices[axis]: at for axis, at in zip(axes, step, strict=True)})
            holds = self.value(condition)
            if holds is None:
                break
            held, number = held + bool(holds), number + 1
        else:
            holds = 0
        self.forget([indices[axis] for axis in axes])
        return None if holds is None or not number else held / number

    def given(self, values: Mapping[Any, int | None]) -> None:
        """Sets values of the body."""
        self.values |= values
        self.memo.clear()

    def forget(self, names: Sequence[Any]) -> None:
        """Marks values as unknown."""
        for name in names:
            self.values.pop(name, None)
        self.memo.clear()

    def value(self, of: Any) -> int | None:
        """Integer computed from constants and from indices of loops and the grid; None where it depends on data."""
        if of in self.values:
            return self.values[of]
        if of not in self.memo:
            self.memo[of] = self.computed(of)
        return self.memo[of]

    def computed(self, of: Any) -> int | None:
        """:meth:`value` of what an operation makes."""
        operation = self.maker(of)
        if operation is None:
            return None
        name = _short(operation)
        if name == "constant":
            text = str(operation.attributes["value"])
            match = re.match(r"-?\d+\b(?!\.)", text)
            return {"true": 1, "false": 0}.get(text, int(match[0]) if match else None)
        if name == "if":
            taken = self.value(operation.operands[0])
            if taken is None or len(operation.regions) < 2:
                return None
            last = list(operation.regions[0 if taken else 1].blocks[0].operations)[-1].operation
            return self.value(last.operands[list(operation.results).index(of)])
        if name in ("for", "while"):
            return None
        operands = [self.value(operand) for operand in operation.operands]
        if None in operands:
            return None
        return _evaluated(name, [int(n or 0) for n in operands], operation)

    def maker(self, of: Any) -> Any:
        """Operation that makes a value; None for an argument of a block."""
        from jax._src.lib.mlir import ir

        # Each access to an owner makes MLIR search the disk for a module of its dialect.
        if of not in self.makers:
            owner = of.owner
            self.makers[of] = None if isinstance(owner, ir.Block) else owner.operation
        return self.makers[of]

    def sources(self, of: Any, members: Mapping[Any, int]) -> set[int]:
        """Members of ``members`` that a value is computed from."""
        origins: set[int] = set()
        seen, todo = set(), [of]
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            if at in members:
                origins.add(members[at])
            elif (operation := self.maker(at)) is not None:
                todo.extend(operation.operands)
        return origins


def _integer(attribute: Any) -> int:
    match = re.match(r"-?\d+", str(attribute))
    return int(match[0]) if match else 0


def _arrays(operation: Any) -> list[Any]:
    """Types of the two ends of a transfer."""
    return [
        operand.type
        for operand in operation.operands
        if str(operand.type).startswith("memref") and "semaphore" not in str(operand.type)
    ]


def _sent(operation: Any) -> float:
    """Bytes of a transfer to another device, which has an operand that says to which one."""
    segments = list(operation.attributes["operandSegmentSizes"])
    to_device = len(segments) > _DEVICE and segments[_DEVICE]
    return min(map(_bytes, _arrays(operation)), default=0.0) if to_device else 0.0


def _transferred(operation: Any) -> float:
    """Bytes of a transfer that begins or ends in device memory."""
    arrays = _arrays(operation)
    if not any(space in str(array) for array in arrays for space in _HBM):
        return 0.0
    return min(map(_bytes, arrays), default=0.0)


def _evaluated(name: str, operands: list[int], operation: Any) -> int | None:
    if name in ("extui", "extsi", "trunci", "index_cast", "index_castui"):
        return operands[0]
    if name == "select":
        return operands[1] if operands[0] else operands[2]
    if len(operands) != 2:
        return None
    a, b = operands
    if name == "cmpi":
        which = _integer(operation.attributes["predicate"])
        return int(
            (a == b, a != b, a < b, a <= b, a > b, a >= b, a < b, a <= b, a > b, a >= b)[which]
        )
    if name in ("divsi", "remsi", "divui", "remui", "floordivsi"):
        if b == 0:
            return None
        whole = a // b if name == "floordivsi" else int(a / b)
        return whole if name.startswith(("div", "floor")) else a - int(a / b) * b
    rules = {
        "addi": a + b,
        "subi": a - b,
        "muli": a * b,
        "andi": a & b,
        "ori": a | b,
        "xori": a ^ b,
    }
    rules |= {"minsi": min(a, b), "maxsi": max(a, b)}
    return rules.get(name)


def _vector(operation: Any) -> float:
    """Vector operations of an arithmetic op; 0 for moves and scalars."""
    dialect = operation.name.rpartition(".")[0].rpartition(".")[2]
    name = _short(operation)
    if name in _FREE or (dialect not in ("arith", "math") and "reduction" not in name):
        return 0.0
    types = [operation.results[0].type] if len(operation.results) else []
    if "reduction" in name:
        types = [operation.operands[0].type]
    elements = [math.prod(kind.shape) for kind in types if str(kind).startswith("vector")]
    return float(max(elements, default=0)) * _WEIGHTS.get(name, 1)


def _bytes(array: Any) -> float:
    # The first number of a dtype's name: f8E4M3FN has 8 bits, bf16 16.
    match = re.search(r"[a-z](\d+)", str(array.element_type))
    bits = int(match[1]) if match else 32
    if any(n == _DYNAMIC or n < 0 for n in array.shape):
        return 0.0
    return math.prod(array.shape) * bits / 8


if __name__ == "__main__":
    sys.stdout.write(counted(sys.stdin.read()))
