"""Which matrices of a model are stored in fewer bits, and how their products are made."""

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
