"""Inputs that an imported model and the library it came from both read, and the model's outputs for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from systolic.formats.jobs import job_of
from systolic.formats.source import Source
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.vision.cnn.config import CNN
from systolic.models.vision.mobilenet.config import MobileNetV2
from systolic.models.vision.pixels import Pixels
from systolic.models.vision.resnet.config import ResNet
from systolic.models.vision.vit.config import ViT
from systolic.models.whisper.config import Whisper

if TYPE_CHECKING:
    import jax

    from systolic.steps.step_functions import StepFunctions


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
