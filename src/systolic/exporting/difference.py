"""Differences between the outputs of a source and those of what was exported from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from systolic.core.errors import RunError
from systolic.interop.cosine import Cosine

EXACT, NARROW = 1e-4, 0.2
"""Largest difference over the largest output of a program that computes the same, in float32 and in bfloat16."""
VECTORS = ("embedding", "encoded")
"""Outputs that are vectors, whose largest number chooses nothing."""


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
    absolute = relative = 0.0
    agreement, cosine, unequal = None, None, 0
    for name, wanted in source.items():
        if name not in exported or exported[name].shape != wanted.shape:
            found = list(exported[name].shape) if name in exported else "missing"
            raise RunError(
                f"output {name} of the exported program is {found} and {list(wanted.shape)} in the source; nothing was kept"
            )
        if wanted.dtype.kind in "iub":
            unequal += int((wanted != exported[name]).sum())
            continue
        wide, made = wanted.astype(np.float64), exported[name].astype(np.float64)
        apart = np.abs(wide - made)
        # The same infinity on both sides is no difference.
        apart = np.where(wide == made, 0.0, apart)
        largest = float(apart.max(initial=0.0))
        finite = np.abs(wide[np.isfinite(wide)])
        absolute = max(absolute, largest) if largest == largest else largest
        over = largest / max(float(finite.max(initial=0.0)), 1e-30)
        relative = max(relative, over) if over == over else over
        if name in VECTORS:
            cosine = Cosine.of(made, wide)
            continue
        floating = np.issubdtype(wanted.dtype, np.floating)
        if agreement is None and floating and wanted.ndim > 1 and wanted.shape[-1] > 1:
            agreement = float((wide.argmax(-1) == made.argmax(-1)).mean())
    count = next((len(one) for one in source.values() if one.ndim), 0)
    return ExportDifference(
        examples=count,
        max_abs=absolute,
        max_relative=relative,
        argmax_agreement=agreement,
        cosine=cosine,
        unequal=unequal,
    )


def joined(
    calls: Sequence[tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]],
) -> ExportDifference:
    """:func:`difference` over all examples of several calls: (the source's outputs, the exported ones) of each."""
    source, exported = (
        {
            name: np.concatenate([np.atleast_1d(call[side][name]) for call in calls])
            for name in calls[0][side]
        }
        for side in (0, 1)
    )
    return difference(source, exported)
