"""An exported program as a model of a job; imports without jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from systolic.job import Field, Precision, Target
from systolic.models.program.config import ForeignModel, only_f32

if TYPE_CHECKING:
    from flax import nnx


@dataclass(frozen=True, kw_only=True)
class ExportedProgram(ForeignModel):
    """A program exported from another framework, which it no longer needs; in float32, always in evaluation.

    It trains as it is: no dropout, and batch norm keeps its running statistics.

    Raises:
        OptionError: a precision other than f32, where one is asked for.
    """

    folder: Path
    """Folder with the program, its description and its weights."""
    digest: str
    """SHA-256 of the program."""
    flops_per_example: float = 0.0
    trained: int = 0
    """Elements of the weights that training changes."""
    inputs: Mapping[str, Field] = field(default_factory=dict)
    """Inputs by name, without the batch dim."""

    def check_precision(self, precision: Precision) -> None:
        """Raises OptionError for anything but f32."""
        only_f32(precision, "an exported program computes as it was exported")

    def flops(self, fields: Mapping[str, Field]) -> float:
        """Matmul FLOPs of one example, counted when it was exported."""
        del fields
        return self.flops_per_example

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """A :class:`~systolic.models.program.module.ProgramModule` with the exported weights."""
        from systolic.interop.program.exported import exported_function
        from systolic.models.program.module import ProgramModule

        return ProgramModule(exported_function(self.folder, self.digest), rngs, target)
