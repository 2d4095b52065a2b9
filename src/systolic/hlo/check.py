"""Whether a module that came from elsewhere holds together, and for what platform it was scheduled."""

from systolic.core.errors import DataError, nearest
from systolic.hlo.module import Module

_ASYNC = ("-start", "-update", "-done")
OPCODES = frozenset(
    """
    abs acos acosh add add-dependency after-all all-gather all-reduce all-to-all and asin asinh async atan2
    atanh batch-norm-grad batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil
    cholesky clamp collective-broadcast collective-permute compare complex concatenate conditional constant convert
    convolution copy cosh cosine count-leading-zeros custom-call divide domain dot dynamic-reshape dynamic-slice
    dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather get-dimension-size
    get-tuple-element imag infeed iota is-finite log log-plus-one logistic map maximum minimum multiply negate not
    opt-barrier or outfeed pad parameter partition-id popcnt power ragged-all-to-all ragged-dot real recv reduce
    reduce-precision reduce-scatter reduce-window remainder replica-id reshape reverse rng rng-bit-generator
    rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scaled-dot scan scatter select
    select-and-scatter send set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine sinh
    slice sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve tuple while xor
    """.split()  # noqa: SIM905 a hundred names read better in lines
)
"""Opcodes of HLO (xla/hlo/ir/hlo_opcode.h); each may end in -start, -update or -done."""
_GPU_MARKS = ("__cublas", "__cudnn", "__triton", "fusion_backend_config", "gpu_backend_config")


def check(module: Module) -> None:
    """Refuses a module with unknown opcodes or dtypes, or with names that nothing defines.

    Raises:
        DataError: what is wrong and where.
    """
    for computation in module.computations.values():
        for instruction in computation:
            where = f"{instruction.name} of {computation.name}"
            opcode = instruction.opcode
            for ending in _ASYNC:
                opcode = opcode.removesuffix(ending)
            if opcode not in OPCODES:
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
