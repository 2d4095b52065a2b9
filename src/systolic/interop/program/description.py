"""The description of an exported program; imports without jax."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    """Whether it has one entry an example."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a program takes, returns and costs."""

    framework: str
    """What it was exported from, with the version."""
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
    flops_per_example: float = 0.0
    """Matmul FLOPs of one example, 2 per multiply-add."""
