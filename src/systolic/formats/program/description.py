"""The description of an exported program; imports without jax, and in environments with jax and numpy alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from systolic.core.errors import OptionError

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
