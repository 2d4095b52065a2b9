"""The sizes of a decoder; imports without jax."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from systolic.core.errors import LayoutError, OptionError, nearest
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Range, check
from systolic.job import Axis, Field, Layout, Model, Outline, Remat, Target

if TYPE_CHECKING:
    from flax import nnx


ACTIVATIONS = ("layer_input", "query", "key", "value", "attention", "out", "mlp", "down")
"""Names of a layer's activations, which rematerialisation policies may keep."""
MOST_PARAMETERS = 10**14
"""Far above any published model; sizes beyond it are slips of the hand that the compiler would take hours over."""


class Mlp(enum.Enum):
    """The feed-forward part: its activation, and whether a second matrix gates it."""

    swiglu = "swiglu"
    """SiLU, gated: three matrices (Shazeer 2020)."""
    geglu = "geglu"
    """GELU, gated."""
    gelu = "gelu"
    """GELU, two matrices."""
    relu = "relu"
    """ReLU, two matrices."""

    @property
    def gated(self) -> bool:
        """Whether it has a gate."""
        return self in (Mlp.swiglu, Mlp.geglu)


class Dispatch(enum.Enum):
    """How the tokens of a mixture reach their experts."""

    slots = "slots"
    """Each expert has capacity_factor times the mean load of slots for a sequence; the rest skip it."""
    dropless = "dropless"
    """Grouped matmuls over as many tokens as each expert gets; none is dropped. Not in a pipeline."""


@dataclass(frozen=True, kw_only=True)
class Decoder(Model):
    """A decoder-only transformer.

    Raises:
        OptionError: sizes that contradict each other (heads that kv_heads don't divide, ...).
    """

    layers: Annotated[int, Range(least=1, most=10_000)] = 12
    d_model: Annotated[int, Range(least=1, most=2**20)] = 768
    """Width of the residual stream."""
    d_ff: Annotated[int, Range(least=1, most=2**22)] = 2048
    """Hidden units (of each expert, in a mixture)."""
    mlp: Mlp = Mlp.swiglu
    """The feed-forward part."""
    heads: Annotated[int, Range(least=1, most=2**14)] = 12
    """Query heads."""
    kv_heads: Annotated[int, COUNT] = 12
    """Key and value heads; fewer than heads is grouped-query attention."""
    head_dim: Annotated[int, Range(least=2, most=2**14)] = 64
    """Width of a head, an even number."""
    vocab: Annotated[int, Range(least=0, most=2**24)] = 0
    """Token ids; 0 takes the tokenizer's, rounded up to a multiple of 128."""
    tie_embeddings: bool = True
    """Whether the output matrix is the embedding's transpose."""
    experts: Annotated[int, Range(least=1, most=2**14)] = 1
    """Experts per layer; 1 is a dense model."""
    experts_per_token: Annotated[int, COUNT] = 2
    """Mixture: experts that each token visits."""
    dispatch: Dispatch = Dispatch.slots
    """Mixture: how tokens reach their experts; slots are bounded, dropless takes as many as come."""
    capacity_factor: Annotated[float, NOT_NEGATIVE] = 1.25
    """Mixture: slots per expert over the mean load; a token without a slot skips its expert. 0 never drops."""
    router_loss: Annotated[float, NOT_NEGATIVE] = 0.01
    """Mixture: weight of the load balancing loss."""
    rope_theta: Annotated[float, POSITIVE] = 10_000.0
    """Base of the rotary embeddings' wavelengths."""
    norm_eps: Annotated[float, POSITIVE] = 1e-6
    """Added to the mean square in RMSNorm."""
    qk_norm: bool = False
    """RMSNorm on queries and keys."""
    window: Annotated[int, NOT_NEGATIVE] = 0
    """Sliding window: a token sees itself and the window - 1 tokens before it; 0 sees all before it."""
    global_every: Annotated[int, NOT_NEGATIVE] = 0
    """With a window: each so many'th layer sees all before it (Gemma 3: 6, gpt-oss and Gemma 2: 2); 0 for none."""
    local_rope_theta: Annotated[float | None, POSITIVE] = None
    """rope-theta of the layers with a window, where it is another one (Gemma 3: 10,000 beside 1,000,000)."""
    attention_cap: Annotated[float, NOT_NEGATIVE] = 0.0
    """Soft cap of the attention's logits, cap * tanh(logit / cap) (Gemma 2: 50); 0 for none."""
    logit_cap: Annotated[float, NOT_NEGATIVE] = 0.0
    """Soft cap of the output logits (Gemma 2: 30); 0 for none."""
    sinks: bool = False
    """Attention sinks: a learned logit for each head that takes its share of the softmax (gpt-oss)."""
    ngrams: Annotated[int, Range(least=2, most=64, only=(0,))] = 0
    """The longest n-gram with a hashed embedding of its own, 2 or more; 0 has none."""
    ngram_rows: Annotated[int, Range(least=1, most=2**30)] = 2**15
    """Rows of each n-gram table, a power of two."""
    ngram_dim: Annotated[int, Range(least=1, most=2**16)] = 32
    """Width of an n-gram's embedding."""

    def __post_init__(self) -> None:
        check(self, "model")
        if self.num_parameters > MOST_PARAMETERS:
            raise OptionError(
                f"the model's sizes make {self.num_parameters:.3g} parameters; it takes up to {MOST_PARAMETERS:.0e}, lower one of layers, d-model, d-ff and experts"
            )
        if self.heads % self.kv_heads:
            raise OptionError(
                f"model.heads {self.heads} is not a multiple of model.kv-heads {self.kv_heads}; change one"
            )
        if self.head_dim % 2:
            raise OptionError(
                f"model.head-dim {self.head_dim} is odd; rotary embeddings turn pairs of dims, use an even one"
            )
        if self.global_every and not self.window:
            raise OptionError(
                f"model.global-every is {self.global_every} but model.window is 0, so that every layer sees everything; give a window"
            )
        if self.ngrams and self.ngram_rows & (self.ngram_rows - 1):
            raise OptionError(
                f"model.ngram-rows {self.ngram_rows} is not a power of two; rows are picked by the low bits of a hash"
            )
        if self.experts > 1 and not self.mlp.gated:
            raise OptionError(
                f"model.mlp {self.mlp.value} has no mixture of experts; use swiglu or geglu"
            )
        if self.experts > 1 and self.experts_per_token > self.experts:
            raise OptionError(
                f"model.experts-per-token {self.experts_per_token} is more than its {self.experts} experts; lower one or raise the other"
            )

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.mlp.gated else 2

    @property
    def num_parameters(self) -> int:
        """Parameters, embeddings included."""
        attention = self.d_model * self.head_dim * 2 * (self.heads + self.kv_heads)
        attention += self.heads if self.sinks else 0
        norms = 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)
        router = self.d_model * self.experts if self.experts > 1 else 0
        layer = (
            attention
            + norms
            + router
            + self._mlp_matrices * self.d_model * self.d_ff * self.experts
        )
        embeddings = self.vocab * self.d_model * (1 if self.tie_embeddings else 2)
        orders = max(self.ngrams - 1, 0)
        ngrams = orders * self.ngram_dim * (self.ngram_rows + self.d_model)
        return self.layers * layer + embeddings + ngrams + self.d_model

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer of a period of the pattern, 0 for none; the layers repeat it."""
        if not self.window or not self.global_every:
            return (self.window,)
        return (self.window,) * (self.global_every - 1) + (0,)

    def theta(self, window: int) -> float:
        """The base of the rotary wavelengths of a layer with this window."""
        return self.local_rope_theta if window and self.local_rope_theta else self.rope_theta

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """A :class:`~systolic.models.decoder.module.DecoderModule` in float32."""
        from systolic.models.decoder.module import DecoderModule

        if not self.vocab:
            raise OptionError(
                "model.vocab is 0; a recipe that does not read a tokenizer must say how many token ids there are"
            )
        return DecoderModule(self, rngs, target)

    def check(self, layout: Layout) -> None:
        """Each axis must divide what it splits."""
        divides = [
            ("tensor", layout.tensor, "heads", self.heads),
            ("tensor", layout.tensor, "kv-heads", self.kv_heads),
            ("tensor", layout.tensor, "d-ff", self.d_ff),
            ("tensor", layout.tensor, "vocab", self.vocab),
            ("pipeline", layout.pipeline, "layers", self.layers),
            ("fsdp", layout.fsdp, "d-model", self.d_model),
        ]
        if self.experts > 1:
            divides.append(("expert", layout.expert, "experts", self.experts))
            if self.dispatch is Dispatch.dropless and layout.pipeline > 1:
                raise LayoutError(
                    f"layout.pipeline is {layout.pipeline} and model.dispatch dropless, whose grouped matmuls do not run in a pipeline; use --model.dispatch slots, or layout.fsdp and layout.expert"
                )
        elif layout.expert > 1:
            raise LayoutError(
                f"layout.expert is {layout.expert} but the model is dense; set model.experts, or use layout.fsdp"
            )
        if layout.remat in (Remat.save_names, Remat.offload):
            for name in (*layout.remat_names, *layout.saved_names):
                if name not in ACTIVATIONS:
                    raise LayoutError(
                        f"layout.remat-names has {name!r}{nearest(name, ACTIVATIONS)}; a decoder names {', '.join(ACTIVATIONS)}"
                    )
        if (self.layers // layout.pipeline) % len(self.windows) and layout.pipeline > 1:
            raise LayoutError(
                f"layout.pipeline {layout.pipeline} makes stages of {self.layers // layout.pipeline} layers, which model.global-every {self.global_every} does not divide; each stage repeats the whole pattern of windows"
            )
        for axis, ways, dim, size in divides:
            if size % ways:
                raise LayoutError(
                    f"layout.{axis} {ways} does not divide model.{dim} {size}; use a divisor of {size}, or change model.{dim}"
                )

    def lasting(self) -> frozenset[str]:
        """All but losses, capacity, how tokens reach their experts, and constants."""
        changing = {
            "capacity_factor",
            "dispatch",
            "experts_per_token",
            "router_loss",
            "rope_theta",
            "norm_eps",
        }
        return frozenset(self.__dataclass_fields__) - changing

    def flops(self, fields: Mapping[str, Field]) -> float:
        """Matmul FLOPs of the forward pass of one sequence; attention counts what the causal mask or window leaves."""
        sequence = fields["tokens"].shape[0]
        token, logits, pair = self._flops()
        return sequence * (token + logits) + pair * self._pairs(sequence)

    def prefill_flops(self, sequence: int) -> float:
        """Matmul FLOPs of reading a prompt of so many tokens: logits of the last one only."""
        token, logits, pair = self._flops()
        return sequence * token + logits + pair * self._pairs(sequence)

    def decode_flops(self, sequence: int) -> float:
        """Matmul FLOPs of the last token of so many, the others in a cache."""
        token, logits, pair = self._flops()
        return token + logits + pair * (self._pairs(sequence) - self._pairs(sequence - 1))

    def _flops(self) -> tuple[int, int, int]:
        """Matmul FLOPs of a token in all layers but for its attention, of its logits, and of a pair of tokens in a layer."""
        projections = 2 * self.d_model * self.head_dim * 2 * (self.heads + self.kv_heads)
        active = self.experts_per_token if self.experts > 1 else 1
        mlp = 2 * self._mlp_matrices * self.d_model * self.d_ff * active
        router = 2 * self.d_model * self.experts if self.experts > 1 else 0
        token = self.layers * (projections + mlp + router)
        return token, 2 * self.d_model * self.vocab, 2 * 2 * self.heads * self.head_dim

    def _pairs(self, sequence: int) -> float:
        """Pairs of a token and one that it sees, over all layers."""
        windows = self.windows

        def seen(window: int) -> float:
            reach = min(window or sequence, sequence)
            return reach * (reach + 1) / 2 + (sequence - reach) * reach

        return sum(seen(windows[layer % len(windows)]) for layer in range(self.layers))

    def axes(self) -> frozenset[Axis]:
        """All of them; the expert axis only in a mixture."""
        return frozenset(Axis) - (frozenset() if self.experts > 1 else {Axis.expert})

    def policies(self) -> frozenset[Remat]:
        """All of them."""
        return frozenset(Remat)

    def operands(self) -> frozenset[str]:
        """Both; routing and logits stay in the compute dtype."""
        return frozenset(("int8", "fp8"))

    def outline(self, layout: Layout) -> Outline:
        """See :mod:`systolic.models.decoder.outline`."""
        from systolic.models.decoder.outline import outline

        return outline(self, layout)

    def shrink(self, layout: Layout) -> "Decoder":
        """Two layers a stage and a few heads a tensor shard, with this model's ratios of heads and experts."""
        groups = self.heads // self.kv_heads
        kv_heads = max(layout.tensor, 1)
        width = 16 * layout.fsdp * layout.expert * layout.context
        return replace(
            self,
            layers=min(self.layers, max(2, len(self.windows)) * layout.pipeline),
            d_model=width,
            d_ff=32 * layout.tensor,
            ngram_rows=64 * layout.tensor if self.ngrams else self.ngram_rows,
            heads=kv_heads * min(groups, 4),
            kv_heads=kv_heads,
            head_dim=16,
            experts=min(self.experts, 2 * layout.expert) if self.experts > 1 else 1,
            experts_per_token=min(self.experts_per_token, 2),
        )
