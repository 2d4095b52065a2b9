"""Numeric formats of compute, of the arrays that training keeps between steps, and of matrices in fewer bits."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from systolic.core.errors import OptionError
from systolic.core.ranges import NOT_NEGATIVE, check

GROUP = 64
"""Inputs that share a scale in 4 bits where nothing else is said, as in QLoRA (Dettmers et al. 2023, section 3)."""

CODES, SCALES, INPUTS = "codes", "scales", "inputs"
"""Last names of the paths of a quantized matrix's parts."""


class WeightFormat(enum.Enum):
    """Format of the codes of a quantized matrix."""

    int8 = "int8"
    """Symmetric, a scale for each output channel."""
    int4 = "int4"
    """Symmetric, a scale for each group of inputs of an output channel."""
    fp8 = "fp8"
    """float8 e4m3, a scale for each output channel."""
    nf4 = "nf4"
    """Quantiles of a normal distribution in 4 bits, a scale for each group of inputs (QLoRA, Dettmers et al. 2023)."""
    w8a8 = "w8a8"
    """int8, and the inputs of the product are rounded to int8 too: each is divided by a factor of its own, then by a scale of the token."""

    @property
    def dtype(self) -> str:
        """Numpy name of the dtype of codes."""
        others = {"fp8": "float8_e4m3fn", "nf4": "uint4", "w8a8": "int8"}
        return others.get(self.value, self.value)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self in (WeightFormat.int4, WeightFormat.nf4) else 8

    @property
    def activations(self) -> bool:
        """Whether the inputs of the product are rounded too; the other formats are of weights only."""
        return self is WeightFormat.w8a8

    @property
    def group(self) -> int:
        """Inputs that share a scale where nothing else is said; 0 for all of a channel."""
        return GROUP if self.bits == 4 else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixFormat:
    """Format of one matrix.

    Raises:
        OptionError: a negative group, 4 bits without a group, or activations in int8 with one.
    """

    format: WeightFormat
    group: Annotated[int, NOT_NEGATIVE] = 0
    """Neighbours in the last input dim that share a scale, fewer where they don't divide it; 0: all inputs of a channel."""

    def __post_init__(self) -> None:
        check(self, "quantization")
        if self.group == 0 and self.format.bits == 4:
            raise OptionError(
                f"group is 0, and {self.format.value} has a scale for each group of inputs; give 32, 64 or 128"
            )

        if self.group and self.format.activations:
            raise OptionError(
                f"group is {self.group}, and sums of int8 products have one scale for each output channel; leave --group out"
            )

    def __str__(self) -> str:
        return f"{self.format.value} in groups of {self.group}" if self.group else self.format.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """Formats of the quantized matrices of a model; all other parameters are stored as they are."""

    matrices: tuple[tuple[str, MatrixFormat], ...] = ()
    """Path of each parameter with its format, sorted by path."""

    @classmethod
    def of(cls, formats: Mapping[str, MatrixFormat]) -> "Quantization":
        """From formats by path."""
        return cls(
            matrices=tuple(sorted(formats.items(), key=lambda path_and_format: path_and_format[0]))
        )

    def __bool__(self) -> bool:
        return bool(self.matrices)

    def by_path(self) -> dict[str, MatrixFormat]:
        """Format of each quantized parameter."""
        return dict(self.matrices)


class Precision(enum.Enum):
    """The dtype of activations and of the weights' working copy."""

    auto = "auto"
    """bf16 where the chip supports it natively, else f32."""
    bf16 = "bf16"
    f32 = "f32"
    f16 = "f16"
    """float16 with dynamic loss scaling."""
    int8 = "int8"
    """bf16 with int8 operands in the layers' weight matmuls, forward and backward, scaled per channel (decoders)."""
    fp8 = "fp8"
    """bf16 with float8 operands in the same matmuls: e4m3 forward, e5m2 gradients (decoders)."""
    qat_int8 = "qat-int8"
    """bf16, computed with matrices rounded as ``systolic quantize --to int8`` rounds them; gradients go to the unrounded ones."""
    qat_int4 = "qat-int4"
    """The same for ``--to int4`` in its usual groups."""

    def resolve(self, platform: str) -> "Precision":
        """Precision with ``auto`` resolved: bf16 on ``tpu`` and ``gpu``, f32 on ``cpu``."""
        if self is not Precision.auto:
            return self
        return Precision.f32 if platform == "cpu" else Precision.bf16

    @property
    def dtype(self) -> str:
        """Numpy name of the compute dtype of a resolved precision."""
        return {"f32": "float32", "f16": "float16"}.get(self.value, "bfloat16")

    @property
    def matmul_format(self) -> str | None:
        """``int8`` or ``fp8`` if weight matmuls have narrower operands than the dtype."""
        return self.value if self in (Precision.int8, Precision.fp8) else None

    @property
    def weight_format(self) -> WeightFormat | None:
        """Format that matrices are rounded to in quantization-aware training."""
        formats = {Precision.qat_int8: WeightFormat.int8, Precision.qat_int4: WeightFormat.int4}
        return formats.get(self)


class RoundedBackward(enum.Enum):
    """Weight matmuls that round their gradients too, with int8 or fp8 operands."""

    all = "all"
    heads = "heads"
    """Matmuls that make queries, keys and values; the others have gradients in the compute dtype."""
    none = "none"
    """No matmul: operands are rounded in the forward pass only."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Rounding of weight matmuls with int8 or fp8 operands.

    Raises:
        OptionError: a negative range.
    """

    backward: RoundedBackward = RoundedBackward.all
    """Matmuls whose gradients are rounded too; the backward pass of the others reads the original operands, not the rounded ones."""
    largest: Annotated[float, NOT_NEGATIVE] = 0.0
    """Fixed clipping range of weights and activations (MaxText's fp8_full: 224), with one scale per array; 0 scales each channel by its own maximum in each step."""

    def __post_init__(self) -> None:
        check(self, "model.rounding")

    def gradients(self, *, heads: bool) -> bool:
        """Whether a matmul's gradients are rounded; ``heads`` if it makes queries, keys or values."""
        return self.backward is RoundedBackward.all or (
            heads and self.backward is RoundedBackward.heads
        )


class Stored(enum.Enum):
    """Dtype of arrays that are stored between steps."""

    f32 = "f32"
    bf16 = "bf16"

    @property
    def dtype(self) -> str:
        """Numpy name of the dtype."""
        return "float32" if self is Stored.f32 else "bfloat16"

    @property
    def bytes(self) -> float:
        """Bytes of one element."""
        return 4.0 if self is Stored.f32 else 2.0


class ServedWeights(enum.Enum):
    """Format of the weights that a generating program reads."""

    plain = "plain"
    """The compute dtype."""
    int8 = "int8"
    """Matrices of attention, feed-forward parts and experts in int8, a scale for each output channel; activations stay in the compute dtype (decoders)."""
    int4 = "int4"
    """The same in int4, a scale for each 64 inputs."""
    fp8 = "fp8"
    """The same in float8 (e4m3), a scale for each output channel."""
    nf4 = "nf4"
    """The same in nf4, a scale for each 64 inputs."""
    w8a8 = "w8a8"
    """The same in int8, and the activations that they are multiplied with: int8 products with sums in int32."""


class ServedCache(enum.Enum):
    """Format of the keys and values that a generating program keeps."""

    plain = "plain"
    """The compute dtype."""
    int8 = "int8"
    """int8, with a scale for each position and head (decoders)."""
    fp8 = "fp8"
    """float8 (e4m3) without scales, as TPU kernels read it (decoders); larger values than it has become its largest."""

    @property
    def item_bytes(self) -> float | None:
        """Bytes of an element; None for those of the compute dtype."""
        return None if self is ServedCache.plain else 1.0


class ExpertAxis(enum.Enum):
    """Use of the expert axis of a generating program beside the experts."""

    rows = "rows"
    """Each of its devices has a part of the texts with their cache, and a copy of the other weights."""
    heads = "heads"
    """Heads, vocabulary and dense layers are split over it as over the tensor axis, as far as it divides them; each device has all texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Formats and split of a generating program."""

    weights: ServedWeights = ServedWeights.plain
    cache: ServedCache = ServedCache.plain
    expert_axis: ExpertAxis = ExpertAxis.rows
    adapters: int = 0
    """Adapters side by side in that of the job, of which each text has one or none."""

    def __post_init__(self) -> None:
        check(self)

    def to_json(self) -> dict[str, str | int]:
        """Values by field."""
        return {
            "weights": self.weights.value,
            "cache": self.cache.value,
            "expert_axis": self.expert_axis.value,
            **({"adapters": self.adapters} if self.adapters else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtypes:
    """Dtypes of the arrays that training keeps, whatever the precision of compute."""

    parameters: Stored = Stored.f32
    """Weights. bf16 takes updates with stochastic rounding: exact on average, with noise below 1/128 of a weight."""
    gradients: Stored = Stored.f32
    """Gradients and their sum over the passes of a step; in bf16 the sum of many passes loses small terms."""
    moments: Stored = Stored.f32
    """Optimizer state. bf16 takes stochastic rounding, so that slow averages still move."""

    def __post_init__(self) -> None:
        check(self, "dtypes")
