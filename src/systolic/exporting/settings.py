"""Settings of an export as programs; imports without jax."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, check
from systolic.job import Precision

ROWS = 4
"""Examples of a comparison by default."""


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
    python: Path | None = None
    """Python of an environment that has the format's framework; by default this one."""

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
