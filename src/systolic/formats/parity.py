"""Parity of an imported model with the library that it came from: both compute the same rows, in float32."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from systolic.core.errors import RunError, SystolicError
from systolic.formats.cosine import Cosine
from systolic.formats.jobs import job_of
from systolic.formats.probe import PASSAGE, PROBES, ParityInputs, probe_of
from systolic.formats.source import Source, TransformersSource
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder

EXACT = 1e-4
"""Largest difference over the largest output; weights that --dtype rounds are rounded on the other side too."""


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
    """Of ``max_relative``."""
    unit: str = ParityInputs.unit
    """What a position is."""
    best: str | None = ParityInputs.best
    """What the largest output is; ``None`` for vectors."""
    cosine: Cosine | None = None
    """Of vectors."""
    texts: int = 0
    """Texts that both tokenizers turned into ids, and of a language model back into text."""
    texts_alike: int = 0
    """Those with the same ids and text on both sides."""
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


class Reference(NamedTuple):
    """What the other library answers."""

    outputs: np.ndarray
    framework: str
    words: list[tuple[list[int], str]]
    """Ids of each text, and the text of those without special tokens; [] where it has no tokenizer for them."""


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


def impossible(source: Source) -> str | None:
    """Why there is no parity check, and what would allow one; ``None`` where there is one."""
    if source.kind == "peft":
        return "no parity check for adapters merged here: to check, merge them with PEFT (merge_and_unload, save_pretrained) and import that folder, whose logits are compared"
    if type(source.model) not in PROBES or not isinstance(source, TransformersSource):
        return f"no parity check for a {type(source.model).__name__} from a {source.kind}"
    try:
        job_of(source, texts=False)
    except SystolicError as error:
        return f"no parity check: {error}"
    if source.kind == "gguf" and len(source.weight_files) > 1:
        return "no parity check: transformers reads no GGUF file that is split"
    needed = {
        "torch": importlib.util.find_spec("torch"),
        "transformers": importlib.util.find_spec("transformers"),
    }
    if source.kind == "gguf":
        needed["accelerate"] = importlib.util.find_spec("accelerate")
    lacking = [name for name, spec in needed.items() if spec is None]
    if lacking:
        return f"no parity check without {' and '.join(lacking)}: pip install {' '.join(lacking)}"
    wanted, free = 4 * _elements(source) * 5 // 4, _free_bytes()
    if wanted > free:
        return f"no parity check: float32 weights need {wanted / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB free"
    return None


def reference(
    source: Source,
    probe: ParityInputs,
    rounded: str | None = None,
    texts: Sequence[str] = (),
) -> "Reference":
    """Outputs float32[rows, ..., n] of transformers, computed in a process of its own, and its version.

    Args:
        source: The model.
        probe: What it reads.
        rounded: Numpy name of the dtype that its weights are rounded to before.
        texts: What its tokenizer turns into ids, and those into text.

    Raises:
        RunError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs, out = Path(folder) / "inputs.npz", Path(folder) / "outputs.npz"
        np.savez(inputs, allow_pickle=False, **probe.theirs)
        asked = {
            "path": str(source.path),
            "inputs": str(inputs),
            "loader": probe.loader,
            "outputs": probe.outputs,
            "rounded": rounded,
            "texts": list(texts),
            "out": str(out),
        }
        done = subprocess.run(
            [sys.executable, "-m", "systolic.formats.hugging_face.reference"],
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
            words = json.loads(str(found["words"]))
            return Reference(found["found"], str(found["framework"]), words)


def check(
    source: Source, ours: Callable[[ParityInputs], np.ndarray], *, rounded: str | None
) -> Parity:
    """Compares outputs with those of the source's own library.

    Args:
        source: What was imported, for which :func:`impossible` knows no reason.
        ours: Outputs of the imported model.
        rounded: Numpy name of the dtype that the weights were rounded to; ``None`` where they were not.
    """
    probe = probe_of(source)
    # One after the other: the memory of both is never needed at once.
    texts = _texts(source)
    theirs = reference(source, probe, rounded, texts)
    framework = theirs.framework
    if rounded is not None:
        framework = f"{framework} with weights rounded to {rounded}"
    found = compare(ours(probe), theirs.outputs, framework, EXACT, probe)
    differs = [said for said in _differences(source, texts, theirs.words) if said]
    return replace(
        found,
        texts=len(theirs.words),
        texts_alike=len(theirs.words) - len(differs),
        text_differs=differs[0] if differs else None,
    )


def _texts(source: Source) -> list[str]:
    """What both tokenizers read: prose, code, spaces, and the special tokens that the files name."""
    if source.kind != "hugging-face" or not isinstance(source.model, Decoder | Encoder):
        return []
    if (file := source.tokenizer) is None:
        return []
    from systolic.data.text.chat import special_tokens

    own = [text for _, text in special_tokens(file.parent)]
    return [PASSAGE, *PASSAGE.splitlines(), " a", "a\n  b ", *(f"x{one}y {one} z" for one in own)]


def _differences(
    source: Source, texts: Sequence[str], words: Sequence[tuple[list[int], str]]
) -> Iterator[str | None]:
    """What differs of each text, in words."""
    from systolic.data.text.tokenizer import Around, Tokenizer

    tokenizer = Tokenizer(path=source.tokenizer, around=Around.own)
    for text, (ids, back) in zip(texts, words, strict=False):
        (own,) = tokenizer.documents([text])
        if own.tolist() != ids:
            place = next((i for i, (a, b) in enumerate(zip(own.tolist(), ids, strict=False)) if a != b), -1)  # fmt: skip
            told = (
                "" if place < 0 else f": token {place} is {own[place]} here and {ids[place]} there"
            )
            yield f"{text[:40]!r} has {len(own)} ids here and {len(ids)} there{told}"
        elif isinstance(source.model, Decoder) and tokenizer.decode(ids) != back:
            yield f"{text[:40]!r} comes back as {tokenizer.decode(ids)[:40]!r} here and {back[:40]!r} there"
        else:
            yield None


def _elements(source: TransformersSource) -> int:
    return sum(int(np.prod(one.shape, dtype=np.int64)) for one in source.tensors.values())


def _free_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available
