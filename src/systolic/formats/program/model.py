"""An exported program as a model of a job; imports without jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from systolic.core.errors import NotFoundError
from systolic.core.files import as_paths
from systolic.formats.program.description import Description
from systolic.job import Field, Precision, Target
from systolic.models.program.config import ForeignModel, only_f32

if TYPE_CHECKING:
    from flax import nnx


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
        from systolic.models.program.module import ProgramModule

        assert self.folder is not None  # set when a Bundle is opened
        return ProgramModule(exported_function(self.folder, self.about), rngs, target)
