"""The sizes of an encoder; imports without jax."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from systolic.core.errors import LayoutError, OptionError
from systolic.core.ranges import COUNT, POSITIVE, Range, check
from systolic.job import Axis, Field, Layout, Model, Remat, Target
from systolic.job.layout import check_divides, check_names, refuse_axes

if TYPE_CHECKING:
    from flax import nnx

ACTIVATIONS = ("layer_input", "query", "key", "value", "attention", "out", "mlp", "down")
"""Names of a layer's activations, which rematerialisation policies may keep."""

MATRICES = frozenset(("query", "key", "value", "out", "gate", "up", "down"))
"""Last names of the paths of matrices that may be quantized."""


class FeedForward(enum.Enum):
    """Kind of feed-forward part: its activation, and whether a second matrix gates it."""

    gelu = "gelu"
    """GELU by the error function, as BERT checkpoints on Hugging Face have it."""
    gelu_tanh = "gelu-tanh"
    """GELU by its tanh approximation."""
    relu = "relu"
    """ReLU."""
    swiglu = "swiglu"
    """SiLU, gated: three matrices (Shazeer 2020)."""

    @property
    def gated(self) -> bool:
        """Whether a second matrix gates the activation."""
        return self is FeedForward.swiglu


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder(Model):
    """A bidirectional transformer with learned positions, layer norms after each sum, and biases.

    The structure, the parameters and their number are those of BERT (Devlin et al. 2019) with the head
    for masked tokens: a dense layer, a norm, and the embedding's transpose with a bias.

    Raises:
        OptionError: sizes that contradict each other (a width that the heads don't divide, ...).
    """

    layers: Annotated[int, Range(least=1, most=10_000)] = 12
    d_model: Annotated[int, Range(least=1, most=2**20)] = 768
    """Width of the residual stream."""
    d_ff: Annotated[int, Range(least=1, most=2**22)] = 3072
    """Hidden units of the MLP."""
    mlp: FeedForward = FeedForward.gelu
    """Kind of feed-forward part."""
    heads: Annotated[int, Range(least=1, most=2**14)] = 12
    """Attention heads; each is d-model / heads wide."""
    vocab: Annotated[int, Range(least=0, most=2**24)] = 0
    """Token ids; 0 takes the tokenizer's and the mask, rounded up to a multiple of 128."""
    positions: Annotated[int, Range(least=1, most=2**24)] = 512
    """Learned positions, the length of the longest document."""
    token_types: Annotated[int, COUNT] = 2
    """Kinds of token with an embedding of their own (first and second text of a pair); training uses the first."""
    norm_eps: Annotated[float, POSITIVE] = 1e-12
    """Epsilon of layer norms, added to the variance."""
    pooler: bool = False
    """Whether there is a dense layer on the first token, for tasks on a full text; masked tokens don't train it."""
    head: bool = True
    """Whether there is a head for masked tokens; a model of embeddings has none and is not trained by them."""

    def __post_init__(self) -> None:
        check(self, "model")
        if self.d_model % self.heads:
            raise OptionError(
                f"model.d-model {self.d_model} is not a multiple of model.heads {self.heads}; change one"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.heads

    @property
    def _matrices(self) -> int:
        return 3 if self.mlp.gated else 2

    @property
    def num_parameters(self) -> int:
        """Parameters: embeddings, blocks, and the head for masked tokens and the pooler where there are any."""
        d, f = self.d_model, self.d_ff
        norm = 2 * d
        hidden_biases = (self._matrices - 1) * f
        block = 4 * (d * d + d) + self._matrices * d * f + hidden_biases + d + 2 * norm
        embeddings = (self.vocab + self.positions + self.token_types) * d + norm
        head = d * d + d + norm + self.vocab if self.head else 0
        return self.layers * block + embeddings + head + (d * d + d if self.pooler else 0)

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """An :class:`~systolic.models.encoder.module.EncoderModule` in float32."""
        from systolic.models.encoder.module import EncoderModule

        if not self.vocab:
            raise OptionError(
                "model.vocab is 0; a recipe that does not read a tokenizer must say how many token ids there are"
            )
        return EncoderModule(self, rngs, target)

    def check(self, layout: Layout) -> None:
        """Checks that each axis divides the dims that it splits; there are no experts, stages or loss chunks."""
        instead = "layout.fsdp or layout.tensor"
        refuse_axes(layout, "an encoder", Axis.expert, Axis.pipeline, instead=instead)
        if layout.loss_chunks > 1:
            raise LayoutError(
                f"layout.loss-chunks is {layout.loss_chunks} but an encoder has logits of masked tokens only; leave it at 1"
            )
        divides = (
            (Axis.tensor, "heads", self.heads),
            (Axis.tensor, "d-ff", self.d_ff),
            (Axis.tensor, "vocab", self.vocab),
            (Axis.fsdp, "d-model", self.d_model),
        )
        check_divides(layout, divides)
        check_names(layout, "an encoder", ACTIVATIONS)

    def quantizable(self, path: str) -> bool:
        """See :meth:`systolic.job.Model.quantizable`."""
        return path.rpartition("/")[2] in MATRICES

    def axes(self) -> frozenset[Axis]:
        """Data, fsdp, tensor and context."""
        return frozenset((Axis.data, Axis.fsdp, Axis.tensor, Axis.context))

    def lasting(self) -> frozenset[str]:
        """All fields but the norms' epsilon."""
        return frozenset(self.__dataclass_fields__) - {"norm_eps"}

    def policies(self) -> frozenset[Remat]:
        """All policies."""
        return frozenset(Remat)

    def flops(self, fields: Mapping[str, Field]) -> float:
        """Matmul FLOPs of the forward pass of one row: attention is of all pairs, logits of the masked places only."""
        sequence = fields["tokens"].shape[0]
        places = fields["places"].shape[0] if "places" in fields else 0
        d = self.d_model
        token = 2 * d * (4 * d + self._matrices * self.d_ff) + 2 * 2 * sequence * d
        head = 2 * d * (d + self.vocab)
        return float(self.layers * sequence * token + places * head)

    def shrink(self, layout: Layout) -> "Encoder":
        """Two layers of one 16 wide head per tensor shard."""
        heads = layout.tensor
        while heads * 16 % (layout.fsdp * layout.context):
            heads += layout.tensor
        return replace(
            self,
            layers=min(self.layers, 2),
            heads=heads,
            d_model=16 * heads,
            d_ff=32 * heads,
        )
