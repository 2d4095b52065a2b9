"""What an export of a model as programs wrote, and how far it is from its source."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from systolic.formats.difference import ExportDifference
from systolic.formats.examples import ExampleInputs
from systolic.formats.inference import ExportableModel


@dataclass(frozen=True, kw_only=True)
class ModelExport:
    """An exported model on disk."""

    path: Path
    kind: str
    """Format."""
    parameters: int
    """Elements of all parameters."""
    bytes: int
    """Of all files."""
    differences: Mapping[str, ExportDifference]
    """By function."""
    compared_on: str
    """Origin of the inputs of the comparison."""
    notes: tuple[str, ...] = ()
    """What became of quantized matrices; the order of classes."""

    @classmethod
    def of(
        cls,
        model: ExportableModel,
        path: Path,
        kind: str,
        differences: Mapping[str, ExportDifference],
        examples: ExampleInputs,
    ) -> "ModelExport":
        """The export at a path, a folder or a file."""
        files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        return cls(
            path=path,
            kind=kind,
            parameters=sum(int(np.size(array)) for array in model.params.values()),
            bytes=sum(file.stat().st_size for file in files),
            differences=differences,
            compared_on=examples.origin,
        )

    def lines(self) -> list[str]:
        """The comparison, a line for each function, and notes."""
        made = [f"{name}: {one} ({self.compared_on})" for name, one in self.differences.items()]
        return [*made, *self.notes]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": str(self.path),
            "format": self.kind,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "compared_on": self.compared_on,
            "functions": {name: one.to_json() for name, one in self.differences.items()},
            "notes": list(self.notes),
        }
