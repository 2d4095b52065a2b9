"""Settings of exports as programs; imports without jax."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, check
from systolic.job import Precision

LITERT = "litert"
"""Format for small devices."""

ONE_FUNCTION = (LITERT, "onnx")
"""Formats whose file has one function of a model."""

ROWS = 4
"""Examples of a comparison by default."""


class LiteQuantization(enum.Enum):
    """How a format for small devices stores and computes numbers."""

    none = "none"
    dynamic = "dynamic"
    """Weights in int8; activations are rounded while the model runs."""
    int8 = "int8"
    """Weights, activations, inputs and outputs in int8, by representative data."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """How a model is exported as programs.

    Raises:
        OptionError: a negative size, no examples, or a precision that not every format has.
    """

    precision: Precision = Precision.f32
    """Of the computation: f32 or bf16."""
    batch: Annotated[int, NOT_NEGATIVE] = 0
    """Examples of a call; 0 leaves them free."""
    sequence: Annotated[int, NOT_NEGATIVE] = 0
    """Tokens of a text; 0 leaves them free."""
    inputs: tuple[Path, ...] = ()
    """Files to compare on, as ``predict`` takes them; by default rows of the recipe's own evaluation data."""
    examples: Annotated[int, COUNT] = ROWS
    """Examples of the recipe's own data to compare on."""
    function: str = ""
    """Function of the model that a file of one function has; the first one by default."""
    python: Path | None = None
    """Python of an environment that has the format's framework; by default this one."""
    quantization: LiteQuantization = LiteQuantization.none
    """Of LiteRT."""
    data: Path | None = None
    """Files, or folders of classes, that stand for what the model will see: for LiteRT's quantization and its measurement."""
    edge_tpu: bool = False
    """Whether to say what the Edge TPU takes of a LiteRT file."""

    def __post_init__(self) -> None:
        check(self)
        if self.precision not in (Precision.f32, Precision.bf16):
            raise OptionError(
                f"precision is {self.precision.value}; programs are exported in f32 or bf16"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dims that are not free, by their names."""
        return {name: size for name in ("batch", "sequence") if (size := vars(self)[name])}

    def given(self) -> dict[str, Any]:
        """Settings that are not the default ones."""
        plain = vars(ExportSettings())
        return {name: value for name, value in vars(self).items() if value != plain[name]}

    def check_format(self, to: str) -> None:
        """Refuses settings that a format does not have.

        Raises:
            OptionError: one is given.
        """
        if self.function and to not in ONE_FUNCTION:
            raise OptionError(
                f"--function is {self.function}, and --to {to} has all functions of a model; leave it out"
            )
        for name, value in self.given().items():
            if to != LITERT and name in ("quantization", "data", "edge_tpu"):
                told = value.value if isinstance(value, enum.Enum) else value
                option = "precision" if name == "quantization" else name.replace("_", "-")
                raise OptionError(
                    f"--{option} is {told}, which only --to {LITERT} has; leave it out"
                )
