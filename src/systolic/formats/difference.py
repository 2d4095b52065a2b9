"""Differences between the outputs of a source and those of what was exported from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from systolic.core.errors import RunError
from systolic.formats.cosine import Cosine

EXACT, NARROW = 1e-4, 0.2
"""Largest difference over the largest output of a program that computes the same, in float32 and in bfloat16."""
VECTORS = ("embedding", "encoded")
"""Outputs that are vectors, whose largest number chooses nothing."""

PART = 1 << 24
"""Numbers that are compared at a time, in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportDifference:
    """Largest differences of an exported function's outputs from its source's on the same inputs."""

    examples: int
    max_abs: float
    max_relative: float
    """Over the largest magnitude of the source's output of that name."""
    argmax_agreement: float | None = None
    """Share of rows of the first output with two or more numbers whose largest is the same; None where there are none, and for vectors."""
    cosine: Cosine | None = None
    """Of vectors (:data:`VECTORS`)."""
    unequal: int = 0
    """Whole numbers, such as tokens, that are not the same: they name things, and are near to none."""

    def check(self, what: str, tolerance: float) -> None:
        """Refuses a difference above a tolerance.

        Raises:
            RunError: it is above it, or no number; or a whole number is another one although all is computed as
                exactly as in the source. Fewer bits may end in another token.
        """
        if self.unequal and tolerance <= EXACT:
            raise RunError(
                f"{what} returns {self.unequal} whole numbers, such as tokens, that are not those of its source; nothing was kept"
            )
        if not self.max_relative <= tolerance:
            raise RunError(
                f"{what} differs from its source by {self.max_abs:.3g}, {self.max_relative:.3g} of the largest output, and {tolerance:g} is allowed; nothing was kept"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        agreed = "" if self.cosine is None else f", {self.cosine}"
        if self.argmax_agreement is not None:
            agreed = f", largest agrees in {self.argmax_agreement:.1%}"
        other = f", {self.unequal} whole numbers are others" if self.unequal else ""
        return f"largest error {self.max_abs:.3g} ({self.max_relative:.2g} of the largest output{agreed}){other} on {self.examples} examples"


def difference(
    source: Mapping[str, np.ndarray], exported: Mapping[str, np.ndarray]
) -> ExportDifference:
    """Compares outputs by name, [examples, ...] each; whole numbers are equal or not.

    Raises:
        RunError: a name is missing or has another shape.
    """
    return joined([(source, exported)])


Call = tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]
"""The source's outputs and the exported ones."""


def joined(calls: Sequence[Call], examples: int | None = None) -> ExportDifference:
    """:func:`difference` over all examples of several calls, which may have other sizes; ``examples`` where some are in several calls.

    Raises: as :func:`difference`.
    """
    absolute = relative = 0.0
    agreement, cosine, unequal = None, None, 0
    for name in calls[0][0]:
        found = _Compared()
        for source, exported in calls:
            found.add(name, source[name], exported.get(name))
        unequal += found.unequal
        absolute = float(np.maximum(absolute, found.largest))
        over = found.largest / max(found.scale, 1e-30)
        relative = float(np.maximum(relative, over))
        if name in VECTORS:
            sides = ([_flat(call[side][name]) for call in calls] for side in (1, 0))
            cosine = Cosine.of(*(np.concatenate(side) for side in sides))
        elif agreement is None and found.rows:
            agreement = found.same / found.rows
    counts = (next((len(one) for one in source.values() if one.ndim), 0) for source, _ in calls)
    return ExportDifference(
        examples=sum(counts) if examples is None else examples,
        max_abs=absolute,
        max_relative=relative,
        argmax_agreement=agreement,
        cosine=cosine,
        unequal=unequal,
    )


class _Compared:
    """Differences of one output over several calls."""

    def __init__(self) -> None:
        self.largest, self.scale = 0.0, 0.0
        """Of a difference, and of the source's finite numbers."""
        self.same, self.rows = 0, 0
        """Rows of two or more numbers, and those of them whose largest is the same."""
        self.unequal = 0

    def add(self, name: str, wanted: np.ndarray, exported: np.ndarray | None) -> None:
        """One more call."""
        if exported is None or exported.shape != wanted.shape:
            found = "missing" if exported is None else list(exported.shape)
            raise RunError(
                f"output {name} of the exported program is {found} and {list(wanted.shape)} in the source; nothing was kept"
            )
        if wanted.dtype.kind in "iub":
            self.unequal += int((wanted != exported).sum())
            return
        if not wanted.size:
            return
        flat, other = _flat(wanted), _flat(exported)
        last = flat.shape[1]
        rows = max(1, PART // last)
        several = wanted.ndim > 1 and last > 1
        for start in range(0, len(flat), rows):
            wide, made = (one[start : start + rows].astype(np.float64) for one in (flat, other))
            # The same infinity on both sides is no difference.
            apart = np.where(wide == made, 0.0, np.abs(wide - made))
            self.largest = float(np.maximum(self.largest, apart.max(initial=0.0)))
            finite = np.abs(wide[np.isfinite(wide)])
            self.scale = max(self.scale, float(finite.max(initial=0.0)))
            if several:
                self.same += int((wide.argmax(-1) == made.argmax(-1)).sum())
                self.rows += len(wide)


def _flat(array: np.ndarray) -> np.ndarray:
    """Its rows along the last dim."""
    return array.reshape(-1, array.shape[-1] if array.ndim else 1)
