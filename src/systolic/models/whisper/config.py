"""Sizes of Whisper and the codes of its languages; imports without jax."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from systolic.core.errors import LayoutError, OptionError
from systolic.core.ranges import POSITIVE, Range, check
from systolic.job import Axis, Field, Layout, Model, Remat, Target
from systolic.job.layout import check_divides, check_names

if TYPE_CHECKING:
    from flax import nnx


ACTIVATIONS = ("layer_input", "query", "key", "value", "attention", "out", "mlp", "down")
"""Names of a layer's activations, which rematerialisation policies may keep; cross attention's have those of attention."""
TAPS = 3
"""Frames that each of the two convolutions reads (Radford et al. 2022, section 2.2)."""
STRIDE = 2
"""Frames of the spectrogram for each position of the encoder."""
MULTILINGUAL_VOCAB = 51_865
"""Token ids from which a model knows languages and tasks; English ones have 51,864 (openai/whisper, ``is_multilingual``)."""

MATRICES = frozenset(("query", "key", "value", "out", "up", "down"))
"""Last names of the paths of matrices that may be quantized."""
NAMES = """
en english zh chinese de german es spanish ru russian ko korean fr french ja japanese pt portuguese tr turkish
pl polish ca catalan nl dutch ar arabic sv swedish it italian id indonesian hi hindi fi finnish vi vietnamese
he hebrew uk ukrainian el greek ms malay cs czech ro romanian da danish hu hungarian ta tamil no norwegian th
thai ur urdu hr croatian bg bulgarian lt lithuanian la latin mi maori ml malayalam cy welsh sk slovak te
telugu fa persian lv latvian bn bengali sr serbian az azerbaijani sl slovenian kn kannada et estonian mk
macedonian br breton eu basque is icelandic hy armenian ne nepali mn mongolian bs bosnian kk kazakh sq
albanian sw swahili gl galician mr marathi pa punjabi si sinhala km khmer sn shona yo yoruba so somali af
afrikaans oc occitan ka georgian be belarusian tg tajik sd sindhi gu gujarati am amharic yi yiddish lo lao uz
uzbek fo faroese ht haitian_creole ps pashto tk turkmen nn nynorsk mt maltese sa sanskrit lb luxembourgish my
myanmar bo tibetan tl tagalog mg malagasy as assamese tt tatar haw hawaiian ln lingala ha hausa ba bashkir jw
javanese su sundanese yue cantonese my burmese ca valencian nl flemish ht haitian lb letzeburgesch ps pushto
pa panjabi ro moldavian ro moldovan si sinhalese es castilian zh mandarin
"""
"""Codes, each with a name behind it; some have several (openai/whisper, whisper/tokenizer.py: LANGUAGES, TO_LANGUAGE_CODE)."""
_WORDS = NAMES.split()
CODES = {name.replace("_", " "): code for code, name in zip(_WORDS[::2], _WORDS[1::2], strict=True)}
"""Name of a language in lower case to its code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whisper(Model):
    """An encoder of log-mel spectrograms and a decoder of their text (Radford et al. 2022); defaults are those of tiny.

    Norms are before each part, keys have no bias, and the logits' matrix is the embedding's transpose.

    Raises:
        OptionError: sizes that contradict each other (a width that the heads don't divide, ...).
    """

    encoder_layers: Annotated[int, Range(least=1, most=10_000)] = 4
    decoder_layers: Annotated[int, Range(least=1, most=10_000)] = 4
    d_model: Annotated[int, Range(least=4, most=2**20)] = 384
    """Width of both residual streams."""
    d_ff: Annotated[int, Range(least=1, most=2**22)] = 1536
    """Hidden units of the MLPs."""
    heads: Annotated[int, Range(least=1, most=2**14)] = 6
    """Attention heads; each is d-model / heads wide."""
    vocab: Annotated[int, Range(least=2, most=2**24)] = MULTILINGUAL_VOCAB
    """Token ids."""
    mels: Annotated[int, Range(least=1, most=2**12)] = 80
    """Mel bins of a frame of the spectrogram; 128 in large-v3."""
    frames: Annotated[int, Range(least=1, most=2**20)] = 1500
    """Positions of the encoder, 20 ms each: half the frames of the spectrogram."""
    positions: Annotated[int, Range(least=1, most=2**20)] = 448
    """Learned positions of the decoder: most tokens of a text, the prompt included."""
    norm_eps: Annotated[float, POSITIVE] = 1e-5
    """Epsilon of layer norms, added to the variance."""

    def __post_init__(self) -> None:
        check(self, "model")
        if self.d_model % self.heads or self.d_model % 2:
            raise OptionError(
                f"model.d-model {self.d_model} is not an even multiple of model.heads {self.heads}; change one"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.heads

    @property
    def num_parameters(self) -> int:
        """Parameters; the encoder's positions are fixed and not among them."""
        d, f = self.d_model, self.d_ff
        attention, mlp, norm = 4 * d * d + 3 * d, 2 * d * f + f + d, 2 * d
        stem = TAPS * self.mels * d + d + TAPS * d * d + d
        encoder = self.encoder_layers * (attention + mlp + 2 * norm) + norm
        decoder = self.decoder_layers * (2 * attention + mlp + 3 * norm) + norm
        return stem + encoder + decoder + (self.vocab + self.positions) * d

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """A :class:`~systolic.models.whisper.module.WhisperModule` in float32."""
        from systolic.models.whisper.module import WhisperModule

        return WhisperModule(self, rngs, target)

    def check(self, layout: Layout) -> None:
        """Checks that each axis divides the dims that it splits; no sequence, experts, stages or loss chunks are split."""
        for axis in (Axis.context, Axis.expert, Axis.pipeline):
            if layout.size(axis) > 1:
                raise LayoutError(
                    f"layout.{axis.value} is {layout.size(axis)} but Whisper is not split that way; set it to 1 and use layout.fsdp or layout.tensor"
                )
        if layout.loss_chunks > 1:
            raise LayoutError(
                f"layout.loss-chunks is {layout.loss_chunks} but the texts of Whisper are short; leave it at 1"
            )
        divides = (
            (Axis.tensor, "heads", self.heads),
            (Axis.tensor, "d-ff", self.d_ff),
            (Axis.fsdp, "d-model", self.d_model),
        )
        check_divides(layout, divides)
        check_names(layout, "Whisper", ACTIVATIONS)

    def quantizable(self, path: str) -> bool:
        """See :meth:`systolic.job.Model.quantizable`."""
        return path.rpartition("/")[2] in MATRICES

    def axes(self) -> frozenset[Axis]:
        """Data, fsdp and tensor."""
        return frozenset((Axis.data, Axis.fsdp, Axis.tensor))

    def lasting(self) -> frozenset[str]:
        """All fields but the norms' epsilon."""
        return frozenset(self.__dataclass_fields__) - {"norm_eps"}

    def policies(self) -> frozenset[Remat]:
        """All policies."""
        return frozenset(Remat)

    def flops(self, fields: Mapping[str, Field]) -> float:
        """Matmul FLOPs of the forward pass of one recording: a token sees those before it and all of the encoder."""
        frames, tokens = fields["features"].shape[0], fields["tokens"].shape[0]
        d, places = self.d_model, frames // STRIDE
        stem = self.input_flops(fields) + 2 * places * TAPS * d * d
        mlp = 2 * 2 * d * self.d_ff
        encoder = places * (2 * 4 * d * d + mlp) + 2 * 2 * places * places * d
        decoder = tokens * (2 * 6 * d * d + mlp) + places * 2 * 2 * d * d
        decoder += 2 * 2 * d * (tokens * (tokens + 1) // 2 + tokens * places)
        logits = 2 * tokens * d * self.vocab
        return float(stem + self.encoder_layers * encoder + self.decoder_layers * decoder + logits)

    def input_flops(self, fields: Mapping[str, Field]) -> float:
        """FLOPs of the first convolution, which reads the spectrogram."""
        return float(2 * fields["features"].shape[0] * TAPS * self.mels * self.d_model)

    def shrink(self, layout: Layout) -> "Whisper":
        """Two layers each of one 16 wide head per tensor shard; the spectrogram's shape stays."""
        heads = layout.tensor
        while heads * 16 % layout.fsdp:
            heads += layout.tensor
        return replace(
            self,
            encoder_layers=min(self.encoder_layers, 2),
            decoder_layers=min(self.decoder_layers, 2),
            heads=heads,
            d_model=16 * heads,
            d_ff=32 * heads,
        )


def token_of(language: str) -> str:
    """The token of a language: ``<|de|>`` for ``de``, ``<|de|>``, ``german`` and ``German``."""
    lowered = language.lower()
    return lowered if lowered.startswith("<|") else f"<|{CODES.get(lowered, lowered)}|>"


def language_of(token: str) -> str:
    """The code of a language's token: ``de`` for ``<|de|>``; "" for any other token."""
    code = token.removeprefix("<|").removesuffix("|>")
    return code if token == f"<|{code}|>" and code in CODES.values() else ""


def name_of(code: str) -> str:
    """The first name of a language by its code: ``german``; "" for ""."""
    return next((name for name, listed in CODES.items() if listed == code), "")
