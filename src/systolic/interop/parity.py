"""Parity of an imported model with the library that it came from: both compute the same rows, in float32."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import RunError
from systolic.interop.source import Source
from systolic.models.decoder.config import Decoder

ROWS, TOKENS = 4, 64
"""Rows of text that both read, and their tokens."""
EXACT, ROUNDED = 1e-4, 5e-2
"""Largest difference over the largest logit: with the source's own weights, and with weights rounded by --dtype."""
PASSAGE = """The harbour lies open to the north, so that ships wait outside while the wind blows from there.
In 1869 the canal was dug; 42 metres wide and 9 deep, it took eleven years and 1,200 workers.
def area(width: float, height: float) -> float:
    return width * height  # square metres
Question: what is the capital of France? Answer: the capital of France is Paris.
Die Messung ergab 3,7 Volt; le courant était de 0,5 ampère. El resultado no cambia.
"""
"""Prose, figures, code and other languages, so that many kinds of tokens are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Differences between the logits of an imported model and those of the library that it came from."""

    framework: str
    """``transformers 5.23.0``."""
    rows: int
    tokens: int
    """Positions that were compared."""
    max_abs: float
    max_relative: float
    """Largest difference over the largest magnitude of the other's logits."""
    mean_abs: float
    argmax_agreement: float
    """Share of positions at which both predict the same token."""
    tolerance: float
    """Of ``max_relative``."""

    @property
    def passed(self) -> bool:
        """Whether the largest relative difference is within the tolerance; not if it is no number."""
        return self.max_relative <= self.tolerance

    def line(self) -> str:
        """The figures on one line."""
        return f"parity with {self.framework} over {self.tokens} positions, float32: max {self.max_abs:.2e} (relative {self.max_relative:.2e}, tolerance {self.tolerance:.0e}), mean {self.mean_abs:.2e}, same next token at {self.argmax_agreement:.1%}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "passed": self.passed}


def compare(ours: np.ndarray, theirs: np.ndarray, framework: str, tolerance: float) -> Parity:
    """Differences of logits [rows, tokens, vocab]; ours may have rows of padding at the end of the vocabulary."""
    ours = ours[..., : theirs.shape[-1]].astype(np.float64)
    away = np.abs(ours - theirs)
    return Parity(
        framework=framework,
        rows=theirs.shape[0],
        tokens=int(np.prod(theirs.shape[:-1])),
        max_abs=float(away.max()),
        max_relative=float(away.max() / np.abs(theirs).max()),
        mean_abs=float(away.mean()),
        argmax_agreement=float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        tolerance=tolerance,
    )


def impossible(source: Source) -> str | None:
    """Why there is no parity check, and what would allow one; ``None`` where there is one."""
    if not isinstance(source.model, Decoder) or source.kind == "bundle":
        return f"no parity check for a {type(source.model).__name__} from a {source.kind}"
    needed = {
        "torch": importlib.util.find_spec("torch"),
        "transformers": importlib.util.find_spec("transformers"),
    }
    if source.kind == "gguf":
        needed["accelerate"] = importlib.util.find_spec("accelerate")
    lacking = [name for name, spec in needed.items() if spec is None]
    if lacking:
        return f"no parity check without {' and '.join(lacking)}: pip install {' '.join(lacking)}"
    wanted, free = 4 * _parameters(source) * 5 // 4, _free_bytes()
    if wanted > free:
        return f"no parity check: float32 weights need {wanted / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB free"
    return None


def rows_of(source: Source) -> np.ndarray:
    """int32[rows, tokens] that both read: text, or numbers where there is no tokenizer."""
    model = source.model
    assert isinstance(model, Decoder)
    ids = np.random.default_rng(0).integers(0, model.vocab, ROWS * TOKENS)
    if source.tokenizer is not None:
        from systolic.data.text.tokenizer import Tokenizer

        ids = np.asarray(Tokenizer(path=source.tokenizer).encode(PASSAGE))
    return np.resize(ids, (ROWS, TOKENS)).astype(np.int32)


def reference(source: Source, rows: np.ndarray) -> tuple[np.ndarray, str]:
    """Logits float32[rows, tokens, vocab] of transformers, computed in a process of its own, and its version.

    Raises:
        RunError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npz"
        asked = {"path": str(source.path), "rows": rows.tolist(), "out": str(out)}
        done = subprocess.run(
            [sys.executable, "-m", "systolic.interop.reference"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        if done.returncode or not out.is_file():
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RunError(
                f"transformers could not compute {source.path} ({lines[-1]}); import with --no-parity to leave the comparison out"
            )
        with np.load(out) as found:
            return found["logits"], str(found["framework"])


def check(source: Source, ours: Callable[[np.ndarray], np.ndarray], *, rounded: bool) -> Parity:
    """Compares logits with those of the source's own library.

    Args:
        source: What was imported.
        ours: Logits of int32[rows, tokens].
        rounded: Whether the weights were rounded to another dtype.
    """
    rows = rows_of(source)
    # One after the other: the memory of both is never needed at once.
    theirs, framework = reference(source, rows)
    return compare(ours(rows), theirs, framework, ROUNDED if rounded else EXACT)


def _parameters(source: Source) -> int:
    assert isinstance(source.model, Decoder)
    return source.model.num_parameters


def _free_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available
