"""Comparisons of a model with where it came from: inputs that both read, outputs, and their differences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from systolic.core.errors import RunError
from systolic.formats.jobs import job_of
from systolic.formats.source import Source
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.vision.config import CNN, MobileNetV2, Pixels, ResNet, ViT
from systolic.models.whisper.config import Whisper

if TYPE_CHECKING:
    import jax

    from systolic.formats.program.convert import ProgramParity
    from systolic.steps.step_functions import StepFunctions

ROWS, TOKENS = 4, 64
"""Rows of text, pictures or recordings that both read, and the most tokens of a row."""
FEW = 2
"""Most rows that a Bundle records, and that an export is compared on."""
LONGEST = 640
"""Tokens of the longest row for a model with windows: the 512 of Gemma 3 1B and 64 more."""
PASSAGE = """The harbour lies open to the north, so that ships wait outside while the wind blows from there.
In 1869 the canal was dug; 42 metres wide and 9 deep, it took eleven years and 1,200 workers.
def area(width: float, height: float) -> float:
    return width * height  # square metres
Question: what is the capital of France? Answer: the capital of France is Paris.
Die Messung ergab 3,7 Volt; le courant était de 0,5 ampère. El resultado no cambia.
"""
"""Prose, figures, code and other languages, so that many kinds of tokens are read."""
EXACT, NARROW = 1e-4, 0.2
"""Largest difference over the largest output of a program that computes the same, in float32 and in bfloat16."""
VECTORS = ("embedding", "encoded")
"""Outputs that are vectors, whose largest number chooses nothing."""
PART = 1 << 24
"""Numbers that are compared at a time, in float64."""
Call = tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]
"""The source's outputs and the exported ones."""


def outputs_of(
    steps: "StepFunctions", weights: Any, inputs: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Outputs float32[rows, ..., n] of a model, with matmuls as exact as the devices have.

    Args:
        steps: Programs of a job with the model.
        weights: Its parameters and other variables.
        inputs: ``tokens`` int32[rows, tokens]; also ``features`` for Whisper; for image models ``image`` alone.

    Returns:
        Logits; of an encoder without a head for masked tokens its vectors, then those of its pooler.
    """
    import jax
    import jax.numpy as jnp

    model = steps.job.model

    def forward(params: Any, rest: Any, arrays: Mapping[str, jax.Array]) -> jax.Array:
        module: Any = steps.network.module(steps.network.cast(params), rest, train=False)
        if "image" in arrays:
            outputs = module(arrays["image"])
        elif isinstance(model, Whisper):
            outputs = module(arrays["features"], arrays["tokens"])
        else:
            outputs = _of_tokens(model, module, arrays["tokens"])
        return outputs.astype(jnp.float32)

    # A TPU's default for float32 is one pass in bfloat16.
    with jax.default_matmul_precision("highest"):
        arrays = {name: jnp.asarray(value) for name, value in inputs.items()}
        return np.asarray(jax.jit(forward)(weights.params, weights.model_state, arrays))


def _of_tokens(model: Any, module: Any, tokens: "jax.Array") -> "jax.Array":
    import jax.numpy as jnp
    from flax import nnx

    assert isinstance(model, Decoder | Encoder)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    if isinstance(model, Decoder):
        # A mixture keeps the losses of its routers on the way, which nobody reads here.
        return nnx.capture(module, nnx.Intermediate)(tokens, jnp.ones_like(tokens), positions)[0]
    vectors = module(tokens, jnp.ones_like(tokens), positions)
    if model.head:
        return module.logits(vectors, positions)
    if model.pooler:
        return jnp.concatenate([vectors, module.pooled(vectors)[:, None]], axis=1)
    return vectors


@dataclass(frozen=True, kw_only=True)
class ParityInputs:
    """Inputs of one comparison, for either side."""

    ours: Mapping[str, np.ndarray]
    """Inputs for :func:`outputs_of`."""
    theirs: Mapping[str, np.ndarray]
    """Arguments of a model of transformers."""
    loader: str
    """Class of transformers that opens the source."""
    outputs: tuple[str, ...] = ("logits",)
    """Fields of its answer; several are joined, one position after another."""
    unit: str = "positions"
    """Name of the positions of outputs."""
    best: str | None = "next token"
    """Meaning of a row's argmax (class, token); ``None`` for vectors."""


def of_text(rows: np.ndarray) -> ParityInputs:
    """Tokens int32[rows, tokens] for a language model."""
    return ParityInputs(
        ours={"tokens": rows}, theirs={"input_ids": rows}, loader="AutoModelForCausalLM"
    )


def probe_of(source: Source) -> ParityInputs:
    """Inputs for a source's model.

    Raises: as :func:`systolic.formats.jobs.job_of`.
    """
    return PROBES[type(source.model)](source)


def _decoder(source: Source) -> ParityInputs:
    """Rows longer than the window of a layer, so that what lies beyond it shows; windows above :data:`LONGEST` are not passed."""
    model = source.model
    assert isinstance(model, Decoder)
    tokens = max(model.windows) + TOKENS
    most = model.learned_positions or LONGEST
    if tokens > min(LONGEST, most) or tokens == TOKENS:
        return of_text(_rows(source, model.vocab, min(TOKENS, most)))
    return of_text(_rows(source, model.vocab, tokens)[: max(1, ROWS * TOKENS // tokens)])


def _encoder(source: Source) -> ParityInputs:
    """Logits of masked tokens where there is a head for them, else vectors of tokens and of the text."""
    model = source.model
    assert isinstance(model, Encoder)
    rows = _rows(source, model.vocab, min(TOKENS, model.positions))
    inputs: dict[str, Any] = {"ours": {"tokens": rows}, "theirs": {"input_ids": rows}}
    if model.head:
        return ParityInputs(**inputs, loader="AutoModelForMaskedLM", best="token")
    outputs = ("last_hidden_state", *(["pooler_output"] if model.pooler else []))
    return ParityInputs(**inputs, loader="AutoModel", outputs=outputs, unit="vectors", best=None)


def _pictures(source: Source) -> ParityInputs:
    """Pictures of random bytes, of the size and with the mean and deviation of the model's own job."""
    model: Any = job_of(source, texts=False).model
    pixels: Pixels = model.pixels
    shape = (ROWS, pixels.size, pixels.size, pixels.channels)
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    scaled = (images / 255 - np.array(pixels.mean)) / np.array(pixels.std)
    return ParityInputs(
        ours={"image": images},
        theirs={"pixel_values": np.moveaxis(scaled, -1, 1).astype(np.float32)},
        loader="AutoModelForImageClassification",
        unit="pictures",
        best="class",
    )


def _speech(source: Source) -> ParityInputs:
    """Random spectrograms with a text, whose tokens before each one are given."""
    model = source.model
    assert isinstance(model, Whisper)
    rows = _rows(source, model.vocab, min(TOKENS, model.positions))
    shape = (ROWS, 2 * model.frames, model.mels)
    features = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    return ParityInputs(
        ours={"features": features, "tokens": rows},
        theirs={"input_features": features.swapaxes(1, 2), "decoder_input_ids": rows},
        loader="AutoModelForSpeechSeq2Seq",
    )


def _rows(source: Source, vocab: int, tokens: int) -> np.ndarray:
    """int32[rows, tokens]: text, or numbers where there is no tokenizer."""
    ids = np.random.default_rng(0).integers(0, vocab, ROWS * tokens)
    if source.tokenizer is not None:
        from systolic.data.text.tokenizer import Tokenizer

        ids = np.asarray(Tokenizer(path=source.tokenizer).encode(PASSAGE))
    return np.resize(ids, (ROWS, tokens)).astype(np.int32)


PROBES: Mapping[type, Callable[[Source], ParityInputs]] = {
    CNN: _pictures,
    Decoder: _decoder,
    Encoder: _encoder,
    MobileNetV2: _pictures,
    ResNet: _pictures,
    ViT: _pictures,
    Whisper: _speech,
}
"""Class of a model to what makes its inputs."""


def probe_inputs(source: Source) -> dict[str, np.ndarray] | None:
    """Few inputs for a source's model; ``None`` for a class of models that has none."""
    return few(probe_of(source).ours) if type(source.model) in PROBES else None


def few(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The first rows of inputs."""
    return {name: array[:FEW] for name, array in inputs.items()}


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
