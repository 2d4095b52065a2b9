"""HLO text to a :class:`Module`, checked for consistency, and the platform that it was scheduled for."""

import re
from functools import lru_cache

from systolic.core.errors import DataError, nearest
from systolic.hlo.module import Computation, Instruction, Module
from systolic.hlo.shape import split

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_END = re.compile(r"\}(?:, execution_thread=\"[^\"]*\")?(?:\s*//.*)?\s*")
"""End of a computation; SparseCore's have a thread of their own."""
_LITERALS = ("parameter", "constant", "iota")
"""Opcodes whose operands are no names."""
_INDEX = re.compile(r"/\*index=\d+\*/")
_ASYNC = ("-start", "-update", "-done")
OPCODES = frozenset(
    """
    abs acos acosh add add-dependency after-all all-gather all-reduce all-to-all and asin asinh async atan2
    atanh batch-norm-grad batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil
    cholesky clamp collective-broadcast collective-permute compare complex concatenate conditional constant convert
    convolution copy cosh cosine count-leading-zeros custom-call divide domain dot dynamic-reshape dynamic-slice
    dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather get-dimension-size
    get-tuple-element imag infeed iota is-finite log log-plus-one logistic map maximum minimum mulhi multiply negate not
    opt-barrier or outfeed pad parameter partition-id popcnt power ragged-all-to-all ragged-dot real recv reduce
    reduce-precision reduce-scatter reduce-window remainder replica-id reshape reverse rng rng-bit-generator
    rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scaled-dot scan scatter select
    select-and-scatter send set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine sinh
    slice sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve tuple while xor
    """.split()  # noqa: SIM905 a hundred names read better in lines
)
"""Opcodes of HLO (xla/hlo/ir/hlo_opcode.h); each may end in -start, -update or -done."""
_GPU_MARKS = (
    *("__cublas", "__cudnn", "__triton", "fusion_backend_config", "gpu_backend_config"),
    '"operation_queue_id"',
)


def parse(text: str) -> Module:
    """The module that ``text`` prints.

    Raises:
        DataError: it is not HLO text, or it ends in the middle.
    """
    lines = text.split("\n")
    at = next((n for n, line in enumerate(lines) if line.startswith("HloModule ")), None)
    if at is None:
        raise DataError(
            "no line begins with HloModule; give scheduled HLO text, as compiled.as_text() prints it"
        )
    header = lines[at]
    module = Module(name=header.split(maxsplit=2)[1].rstrip(","), header=header, computations={})
    computation: Computation | None = None
    table: list[str] | None = None
    pending: list[str] = []

    def flush() -> None:
        if pending and computation is not None:
            _add(computation, "\n".join(pending) if len(pending) > 1 else pending[0])
            pending.clear()

    for line in lines[at + 1 :]:
        if computation is None:
            if line in _TABLES:
                table = module.tables.setdefault(line, [])
            elif line.endswith("{") and line[:1] not in (" ", ""):
                table = None
                computation = _open(line)
            elif table is not None and line:
                table.append(line)
        elif line[:1] == "}":
            if pending and not _END.fullmatch(line):
                pending.append(line)  # the end of a braced attribute that spans lines
                continue
            flush()
            if not len(computation):
                raise DataError(f"computation {computation.name} is empty; the text may be damaged")
            module.computations[computation.name] = computation
            computation = None
        elif line[:2] == "  " and line[2:3] not in (" ", "") and " = " in line:
            flush()
            pending.append(line)
        elif line or pending:
            pending.append(line)
    if computation is not None:
        raise DataError(
            f"the text ends inside computation {computation.name}; the file was cut off, dump it again"
        )
    if not module.computations:
        raise DataError("the HLO text has no computation; dump the module again")
    return module


def _open(line: str) -> Computation:
    entry = line.startswith("ENTRY ")
    rest = line[6:] if entry else line
    name = re.split(r"[\s(]", rest.lstrip("%"), maxsplit=1)[0]
    return Computation(name=name, entry=entry)


def _add(computation: Computation, line: str) -> None:
    line = line.strip()
    root = line.startswith("ROOT ")
    if root:
        line = line[5:]
    name, _, body = line.partition(" = ")
    name = name.lstrip("%")
    if body.startswith("("):
        end = _closing(body, 0) + 1
        # layouts may follow a tuple only inside it
    else:
        end = body.find(" ")
        if end < 0:
            raise DataError(f"instruction {name} of {computation.name} has no opcode")
    shape = body[:end]
    body = body[end:].lstrip()
    opening = body.find("(")
    if opening < 0:
        raise DataError(f"instruction {name} of {computation.name} has no operands")
    opcode = body[:opening]
    closing = _closing(body, opening)
    operands = _operands(opcode, body[opening + 1 : closing])
    if opcode not in _LITERALS:
        for operand in operands:
            if "#" in operand:
                _add_part(computation, operand)
    instruction = Instruction(
        name=name,
        opcode=opcode,
        shape_text=shape,
        operands=operands,
        rest=body[closing + 1 :],
        root=root,
    )
    computation.instructions.append(instruction)
    computation.index[name] = instruction


def _add_part(computation: Computation, operand: str) -> None:
    """A get-tuple-element for ``fusion.1#2``, as XLA's dumps write part 2 of a tuple where it is read."""
    whole, _, number = operand.rpartition("#")
    if operand in computation.index:
        return
    if "#" in whole:
        _add_part(computation, whole)
    source = computation.index.get(whole)
    parts = () if source is None else _parts(source.shape_text)
    if not number.isdigit() or int(number) >= len(parts):
        raise DataError(
            f"{operand} in {computation.name} is no part of a tuple; the text may be damaged"
        )
    instruction = Instruction(
        name=operand,
        opcode="get-tuple-element",
        shape_text=parts[int(number)],
        operands=(whole,),
        rest=f", index={number}",
        root=False,
    )
    computation.instructions.append(instruction)
    computation.index[operand] = instruction


@lru_cache(maxsize=64)
def _parts(shape: str) -> tuple[str, ...]:
    """Shapes of the parts of a tuple; none of an array."""
    return tuple(split(shape[1:-1])) if shape.startswith("(") else ()


def _operands(opcode: str, text: str) -> tuple[str, ...]:
    if not text:
        return ()
    if opcode in _LITERALS:
        return (text.strip(),)
    if "[" not in text and "{" not in text:  # names only, as newer versions print them
        if "/*" in text:
            text = _INDEX.sub("", text)
        return tuple(part.strip().lstrip("%") for part in text.split(","))
    return tuple(part.rsplit(" ", 1)[-1].lstrip("%") for part in split(text))


def _closing(text: str, start: int) -> int:
    """The index of the parenthesis that closes the one at ``start``."""
    end = text.find(")", start)
    inner = text.count("(", start + 1, end if end >= 0 else len(text))
    while end >= 0 and inner:
        after = text.find(")", end + 1)
        inner += text.count("(", end, after if after >= 0 else len(text)) - 1
        end = after
    if end < 0:
        raise DataError(f"a parenthesis is not closed in {text[:60]!r}; the text may be damaged")
    return end


def check(module: Module, *, newer: bool = False) -> None:
    """Refuses a module with unknown opcodes or dtypes, or with names that nothing defines.

    Args:
        module: The parsed text.
        newer: Accept opcodes that are not known: the text comes from a compiler that may be newer than :data:`OPCODES`.

    Raises:
        DataError: what is wrong and where.
    """
    for computation in module.computations.values():
        for instruction in computation:
            where = f"{instruction.name} of {computation.name}"
            opcode = instruction.opcode
            for ending in _ASYNC:
                opcode = opcode.removesuffix(ending)
            if opcode not in OPCODES and not newer:
                raise DataError(
                    f"{where} has the opcode {instruction.opcode!r}, which HLO does not have"
                    f"{nearest(opcode, OPCODES)}; the text may be damaged, dump the module again"
                )
            for array in instruction.shape.arrays():
                if array.dtype:
                    _ = array.bits
            for called in instruction.called_computations:
                if called not in module.computations:
                    raise DataError(
                        f"{where} calls {called}, which the text does not have; dump the whole module"
                    )
            if instruction.opcode in ("constant", "parameter", "iota"):
                continue
            for name in instruction.operands:
                if name not in computation.index:
                    raise DataError(
                        f"{where} reads {name[:60]}, which its computation does not have; dump the whole module"
                    )


def platform_of(text: str) -> str:
    """``tpu``, ``gpu`` or ``cpu``: only a TPU's schedule tiles its arrays."""
    if ":T(" in text:
        return "tpu"
    return "gpu" if any(mark in text for mark in _GPU_MARKS) else "cpu"
