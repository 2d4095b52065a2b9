"""An exported program as a model of a job; imports without jax.

The description of an exported program; imports without jax.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from systolic.core.errors import NotFoundError, OptionError
from systolic.core.files import as_paths
from systolic.job import Field, Precision, Target
from systolic.models.program.config import ForeignModel, only_f32

if TYPE_CHECKING:
    from flax import nnx


PROGRAM = "program.bin"
"""jax.export's serialization (a FlatBuffer) of (weights by name, inputs by name) -> outputs by name."""
WEIGHTS = "weights.safetensors"
SAMPLE = "sample.safetensors"
"""Inputs (``input:NAME``) and what the framework makes of them (``output:NAME``), for the comparison at the end of an import."""
TOLERANCE = 1e-4
"""Largest difference from the framework's outputs over their largest magnitude, in float32."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """An input or output of a program, without the batch dim."""

    shape: tuple[int, ...]
    dtype: str
    batched: bool = True
    """Whether it has one entry an example; else it is one for a whole call."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """Inputs, outputs and cost of a program."""

    framework: str
    """The framework that it was exported from, with the version."""
    jax: str
    """Version that wrote it."""
    digest: str
    """SHA-256 of the program's file."""
    platforms: tuple[str, ...]
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    trained: tuple[str, ...]
    """Names of the weights that training changes."""
    state: tuple[str, ...] = ()
    """Names of the other arrays."""
    parameters: int
    """Elements of the trained weights."""
    batch: int | None = None
    """Examples that a call takes; ``None``: any number."""
    independent: bool = True
    """Whether an example's outputs are the same whatever other examples are in its batch; if not, ``batch`` is a number."""
    flops_per_example: float = 0.0
    """Matmul FLOPs of one example, 2 per multiply-add."""

    @property
    def together(self) -> int:
        """Examples that depend on each other, so that their number is a multiple of it."""
        return 1 if self.independent or self.batch is None else self.batch

    @property
    def notes(self) -> tuple[str, ...]:
        """The warning that examples depend on each other, on one line; () if they don't."""
        if self.independent:
            return ()
        return (
            f"the model's outputs for an example depend on the others of its batch: it is computed in batches of {self.batch}, as many as the example inputs have",
        )

    def check_examples(self, count: int) -> None:
        """Raises OptionError for a number of examples that would leave some without the others that they depend on."""
        if count % self.together:
            raise OptionError(
                f"the batch has {count} examples, and the model's outputs for an example depend on the others of its batch, which was {self.batch} when it was imported; give a multiple of {self.batch}, or import it again with another example batch"
            )


@dataclass(frozen=True, kw_only=True)
class ExportedProgram(ForeignModel):
    """A program exported from another framework, which it no longer needs; in float32, always in evaluation.

    It trains as it is: no dropout, and batch norm keeps its running statistics. Training starts from the weights
    in its folder.
    """

    about: Description
    folder: Path | None = None
    """Folder of its Bundle."""

    def __post_init__(self) -> None:
        as_paths(self, "folder")

    @classmethod
    def of(cls, folder: Path | str) -> "ExportedProgram":
        """The program of a Bundle, for a job of one's own.

        Raises:
            NotFoundError: the folder is no Bundle, or holds another kind of model.
            DataError: it is damaged.
        """
        from systolic.formats.bundle import open_bundled

        model = open_bundled(Path(folder).absolute()).model
        if not isinstance(model, cls):
            raise NotFoundError(
                f"{folder} holds a {type(model).__name__}, not an exported program; give a Bundle that was imported from PyTorch, Keras or TensorFlow"
            )
        return model

    def check_batch(self, examples: int) -> None:
        """Raises OptionError where examples depend on each other and a pass would hold a part of their batch."""
        self.about.check_examples(examples)

    def check_precision(self, precision: Precision) -> None:
        """Raises OptionError for anything but f32."""
        only_f32(precision, "an exported program computes in float32")

    def flops(self, fields: Mapping[str, Field]) -> float:
        """Matmul FLOPs of one example, counted when it was exported."""
        del fields
        return self.about.flops_per_example

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """A :class:`~systolic.models.program.function.ProgramModule` with the exported weights.

        Raises:
            NotFoundError: a file of the Bundle is missing.
            DataError: a file is another one than was imported.
        """
        from systolic.formats.program.exported import exported_function
        from systolic.models.program.function import ProgramModule

        assert self.folder is not None  # set when a Bundle is opened
        return ProgramModule(exported_function(self.folder, self.about), rngs, target)
