"""Differences between the outputs of two programs: of models in files, and of what was exported."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from systolic.core.errors import RunError
from systolic.formats.probe import ParityInputs

if TYPE_CHECKING:
    from systolic.formats.program.convert import ProgramParity


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine:
    """Cosines of vectors with their counterparts."""

    mean: float
    least: float

    @classmethod
    def of(cls, ours: np.ndarray, theirs: np.ndarray) -> "Cosine":
        """Cosines of the vectors along the last dim of arrays [..., n]."""
        first, second = (np.asarray(side, np.float64) for side in (ours, theirs))
        lengths = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
        with np.errstate(invalid="ignore"):
            cosines = (first * second).sum(-1) / np.maximum(lengths, np.finfo(np.float64).tiny)
        return cls(mean=float(cosines.mean()), least=float(cosines.min()))

    def __str__(self) -> str:
        return f"cosine {self.mean:.5f} in the mean, {self.least:.5f} at least"


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
    """Cosines of outputs that are vectors (:data:`VECTORS`)."""
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
        output = _OutputDifferences()
        for source, exported in calls:
            output.add(name, source[name], exported.get(name))
        unequal += output.unequal
        absolute = float(np.maximum(absolute, output.largest))
        over = output.largest / max(output.scale, 1e-30)
        relative = float(np.maximum(relative, over))
        if name in VECTORS:
            sides = ([_flat(call[side][name]) for call in calls] for side in (1, 0))
            cosine = Cosine.of(*(np.concatenate(side) for side in sides))
        elif agreement is None and output.rows:
            agreement = output.same / output.rows
    counts = (
        next((len(array) for array in source.values() if array.ndim), 0) for source, _ in calls
    )
    return ExportDifference(
        examples=sum(counts) if examples is None else examples,
        max_abs=absolute,
        max_relative=relative,
        argmax_agreement=agreement,
        cosine=cosine,
        unequal=unequal,
    )


class _OutputDifferences:
    """Differences of one output over several calls."""

    def __init__(self) -> None:
        self.largest, self.scale = 0.0, 0.0
        """Largest magnitudes of a difference, and of the source's finite numbers."""
        self.same, self.rows = 0, 0
        """Rows of two or more numbers, and those of them whose largest is the same."""
        self.unequal = 0

    def add(self, name: str, wanted: np.ndarray, exported: np.ndarray | None) -> None:
        """One more call."""
        if exported is None or exported.shape != wanted.shape:
            shape = "missing" if exported is None else list(exported.shape)
            raise RunError(
                f"output {name} of the exported program is {shape} and {list(wanted.shape)} in the source; nothing was kept"
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
            wide, narrow = (side[start : start + rows].astype(np.float64) for side in (flat, other))
            # The same infinity on both sides is no difference.
            apart = np.where(wide == narrow, 0.0, np.abs(wide - narrow))
            self.largest = float(np.maximum(self.largest, apart.max(initial=0.0)))
            finite = np.abs(wide[np.isfinite(wide)])
            self.scale = max(self.scale, float(finite.max(initial=0.0)))
            if several:
                self.same += int((wide.argmax(-1) == narrow.argmax(-1)).sum())
                self.rows += len(wide)


def _flat(array: np.ndarray) -> np.ndarray:
    """Its rows along the last dim."""
    return array.reshape(-1, array.shape[-1] if array.ndim else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Differences between the outputs of an imported model and those of the library that it came from."""

    framework: str
    """``transformers 5.23.0``."""
    rows: int
    tokens: int
    """Positions that were compared; of image models pictures, of encoders vectors."""
    max_abs: float
    max_relative: float
    """Largest difference over the largest magnitude of the other's outputs."""
    mean_abs: float
    argmax_agreement: float | None
    """Share of positions at which the same output is the largest: the token or class that both predict; ``None`` for vectors."""
    tolerance: float
    """Limit of ``max_relative``."""
    unit: str = ParityInputs.unit
    """Name of a position, in the plural."""
    best: str | None = ParityInputs.best
    """Meaning of a row's argmax (token, class); ``None`` for vectors."""
    cosine: Cosine | None = None
    """Cosines of outputs that are vectors."""
    texts: int = 0
    """Texts that both tokenizers turned into ids, and of a language model back into text."""
    texts_alike: int = 0
    """Texts with the same ids and text on both sides."""
    text_differs: str | None = None
    """The first that differs, in words."""

    @property
    def passed(self) -> bool:
        """Whether the largest relative difference is within the tolerance; not if it is no number."""
        return self.max_relative <= self.tolerance

    def line(self) -> str:
        """The figures on one line."""
        return f"parity with {self.framework} over {self.tokens} {self.unit}, float32: max {self.max_abs:.2e} (relative {self.max_relative:.2e}, tolerance {self.tolerance:.0e}), mean {self.mean_abs:.2e}, {self.agreement}{self._words()}"

    def _words(self) -> str:
        if not self.texts:
            return ""
        if self.text_differs is None:
            return f", tokenizer alike over {self.texts} texts"
        return f"; warning: the tokenizer differs over {self.texts - self.texts_alike} of {self.texts} texts, first {self.text_differs}"

    @property
    def agreement(self) -> str:
        """How alike the outputs are to who uses them, in words."""
        if self.argmax_agreement is None:
            return str(self.cosine)
        return f"same {self.best} at {self.argmax_agreement:.1%}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "passed": self.passed}


def compare(
    ours: np.ndarray,
    theirs: np.ndarray,
    framework: str,
    tolerance: float,
    probe: ParityInputs | None = None,
) -> Parity:
    """Differences of outputs [rows, ..., n], by default of logits; ours may have rows of padding at the end of the vocabulary."""
    unit = ParityInputs.unit if probe is None else probe.unit
    best = ParityInputs.best if probe is None else probe.best
    # In the dtype of both: in float64 a large vocabulary would take gigabytes more, and close numbers subtract exactly.
    ours = ours[..., : theirs.shape[-1]]
    with np.errstate(
        all="ignore"
    ):  # Outputs that are no finite numbers have no finite differences.
        away = np.abs(ours - theirs)
        relative = away.max() / np.abs(theirs).max()
    return Parity(
        framework=framework,
        rows=theirs.shape[0],
        tokens=int(np.prod(theirs.shape[:-1])),
        max_abs=float(away.max()),
        max_relative=float(relative),
        mean_abs=float(away.mean(dtype=np.float64)),
        argmax_agreement=None if best is None else _same_largest(ours, theirs),
        tolerance=tolerance,
        unit=unit,
        best=best,
        cosine=Cosine.of(ours, theirs) if best is None else None,
    )


def _same_largest(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((ours.argmax(-1) == theirs.argmax(-1)).mean())


def check_passed(parity: "Parity | ProgramParity") -> None:
    """Ends an import whose model computes something else than its source.

    Raises:
        RunError: so.
    """
    if not parity.passed:
        raise RunError(
            f"{parity.line()}: the import is not the same model, and no Bundle was written; report it, or import with --no-parity"
        )
