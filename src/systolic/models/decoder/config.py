"""Sizes of a decoder, and what an analytic model of time and memory needs of them; imports without jax."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Needs, Range, check, check_needs
from systolic.job import (
    Axis,
    Field,
    Layout,
    Model,
    ModelStats,
    OptimizerKind,
    Precision,
    Remat,
    Rounding,
    Target,
)
from systolic.models.decoder import sizes
from systolic.models.decoder.options import Latent, Mup, RopeScaling, Rotary, Router

if TYPE_CHECKING:
    from flax import nnx


VOCABULARY = ("embedding", "unembedding")
"""Paths of the matrices of the vocabulary."""
MOST_PARAMETERS = 10**14
"""Limit of parameters, far above any published model; larger sizes are typing errors that the compiler would take hours over."""
BEST, PLAIN, PER_CHANNEL, UNSCALED = Router(), Latent(), Rounding(), RopeScaling()
STANDARD = Mup()
MIXTURE = Needs("model.experts", "the model is dense", lambda model: model.experts > 1)
SLOTS = Needs(
    "model.dispatch slots",
    "model.dispatch is dropless",
    lambda model: model.dispatch is Dispatch.slots,
)
DENSE = Needs(
    "model.dense-layers",
    "no layer of the mixture is dense",
    lambda model: model.dense_layers or model.mixture_every > 1,
)
BIAS = Needs("model.router.bias", "model.router.bias is off", lambda model: model.router.bias)
ROTARY = Needs(
    "model.learned-positions 0",
    "model.learned-positions is set, which replaces rotary embeddings",
    lambda model: not model.learned_positions,
)
WINDOW = Needs("model.window", "model.window is 0", lambda model: model.window)
NGRAMS = Needs("model.ngrams", "model.ngrams is 0", lambda model: model.ngrams)
ATTENTION = 0.05
"""Rough share of attention's own products in the forward pass; the true one grows with the sequence, which is unknown here."""


class Mlp(enum.Enum):
    """Kind of feed-forward part: its activation, and whether a second matrix gates it."""

    swiglu = "swiglu"
    """SiLU, gated: three matrices (Shazeer 2020)."""
    swiglu_clamped = "swiglu_clamped"
    """Gated by gate * sigmoid(1.702 gate), times up plus 1; gate at most 7, up between -7 and 7 (gpt-oss)."""
    geglu = "geglu"
    """GELU by its tanh form, gated (Gemma)."""
    geglu_exact = "geglu_exact"
    """GELU, gated."""
    gelu = "gelu"
    """GELU by its tanh form, two matrices (GPT-2)."""
    gelu_exact = "gelu_exact"
    """GELU, two matrices."""
    relu = "relu"
    """ReLU, two matrices."""

    @property
    def gated(self) -> bool:
        """Whether a second matrix gates the activation."""
        return self in (Mlp.swiglu, Mlp.swiglu_clamped, Mlp.geglu, Mlp.geglu_exact)


class NormKind(enum.Enum):
    """Kind of the norms of the residual stream, queries and keys."""

    rms = "rms"
    """RMSNorm with a scale."""
    rms_offset = "rms_offset"
    """RMSNorm whose scale is 1 plus a parameter that starts at 0 (Gemma)."""
    layer = "layer"
    """LayerNorm with scale and bias (GPT-2)."""

    @property
    def biased(self) -> bool:
        """Whether a bias is added to the scaled result."""
        return self is NormKind.layer


class Dispatch(enum.Enum):
    """Dispatch of the tokens of a mixture to their experts."""

    slots = "slots"
    """Slots: capacity_factor times the mean load per expert and sequence; tokens without a slot skip the expert."""
    dropless = "dropless"
    """Grouped matmuls over the tokens of each expert; none is dropped. Not available in a pipeline."""


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
    """Kind of feed-forward part."""
    mlp_bias: bool = False
    """Bias of the feed-forward part's products, in a dense model (GPT-2)."""
    heads: Annotated[int, Range(least=1, most=2**14)] = 12
    """Query heads."""
    kv_heads: Annotated[int, COUNT] = 12
    """Key and value heads; fewer than heads is grouped-query attention."""
    head_dim: Annotated[int, Range(least=2, most=2**14)] = 64
    """Width of a head, an even number."""
    qkv_bias: bool = False
    """Bias of queries, keys and values (Qwen2)."""
    out_bias: bool = False
    """Bias of attention's output (GPT-2, gpt-oss)."""
    vocab: Annotated[int, Range(least=0, most=2**24)] = 0
    """Token ids; 0 takes the tokenizer's, rounded up to a multiple of 128."""
    tie_embeddings: bool = True
    """Whether the output matrix is the embedding's transpose."""
    embedding_scale: Annotated[float, NOT_NEGATIVE] = 0.0
    """Factor of the embedding's rows; 0 takes the root of d-model, or 1 where the output matrix is their transpose."""
    experts: Annotated[int, Range(least=1, most=2**14)] = 1
    """Experts per layer; 1 is a dense model."""
    experts_per_token: Annotated[int, COUNT, MIXTURE] = 2
    """Mixture: experts per token."""
    dispatch: Annotated[Dispatch, MIXTURE] = Dispatch.slots
    """Mixture: dispatch of tokens to experts; slots bound the tokens per expert, dropless does not."""
    capacity_factor: Annotated[float, NOT_NEGATIVE, MIXTURE, SLOTS] = 1.25
    """Mixture: slots per expert over the mean load; tokens without a slot are dropped. 0 drops none."""
    shared_experts: Annotated[int, NOT_NEGATIVE, MIXTURE] = 0
    """Mixture: shared experts that process every token, as one gated MLP of this many times d-ff (n_shared_experts)."""
    dense_layers: Annotated[int, NOT_NEGATIVE, MIXTURE] = 0
    """Mixture: number of first layers with a dense feed-forward part (first_k_dense_replace)."""
    mixture_every: Annotated[int, COUNT, MIXTURE] = 1
    """Mixture: period of the layers with experts, the others being dense (interleave_moe_layer_step; Llama 4 Maverick: 2)."""
    dense_d_ff: Annotated[int, Range(least=0, most=2**22), MIXTURE, DENSE] = 0
    """Mixture: hidden units of the dense layers; 0 takes d-ff."""
    expert_bias: Annotated[bool, MIXTURE] = False
    """Mixture: biases of the routed experts' matrices (gpt-oss)."""
    router: Annotated[Router, MIXTURE] = BEST
    """Mixture: choice and weights of the experts."""
    router_loss: Annotated[float, NOT_NEGATIVE, MIXTURE] = 0.01
    """Mixture: weight of the load balancing loss."""
    router_bias_rate: Annotated[float, NOT_NEGATIVE, MIXTURE, BIAS] = 0.001
    """Mixture with router.bias: amount that a step adds to the bias of each expert below the mean load and subtracts from the others."""
    latent: Latent = PLAIN
    """Multi-head latent attention (MLA, DeepSeek-V2); head-dim and kv-heads are then unused."""
    learned_positions: Annotated[int, Range(least=0, most=2**24)] = 0
    """Learned embeddings of so many positions, in place of rotary ones (GPT-2); 0 for rotary."""
    rope_theta: Annotated[float, POSITIVE, ROTARY] = 10_000.0
    """Base of the rotary embedding wavelengths."""
    rope_scaling: Annotated[RopeScaling, ROTARY] = UNSCALED
    """Stretching of rotary embeddings to longer texts."""
    norm_eps: Annotated[float, POSITIVE] = 1e-6
    """Epsilon of norms, added to the mean square."""
    norm: NormKind = NormKind.rms
    """Kind of the norms."""
    post_norms: bool = False
    """Norms on the results of attention and of the feed-forward part, beside those before them (Gemma 2)."""
    qk_norm: bool = False
    """Norms on queries and keys (Qwen3)."""
    window: Annotated[int, NOT_NEGATIVE] = 0
    """Sliding window: a token attends to itself and the window - 1 tokens before it; 0 for full attention."""
    global_every: Annotated[int, Range(least=2, only=(0,)), WINDOW] = 0
    """Period of layers with full attention beside those with a window (Gemma 3: 6, gpt-oss and Gemma 2: 2); 0 for none."""
    local_rope_theta: Annotated[float | None, POSITIVE, WINDOW, ROTARY] = None
    """rope-theta of the layers with a window, which rope-scaling then leaves as they are (Gemma 3: 10,000 beside 1,000,000)."""
    query_pre_attn_scalar: Annotated[float, NOT_NEGATIVE] = 0.0
    """Number whose inverse root is the scale of attention's products (Gemma 2 27B: 144); 0 takes the width of a query."""
    attention_cap: Annotated[float, NOT_NEGATIVE] = 0.0
    """Soft cap of the attention logits, cap * tanh(logit / cap) (Gemma 2: 50); 0 for none."""
    logit_cap: Annotated[float, NOT_NEGATIVE] = 0.0
    """Soft cap of the output logits (Gemma 2: 30); 0 for none."""
    sinks: bool = False
    """Attention sinks: a learned logit per head in the denominator of the softmax (gpt-oss)."""
    ngrams: Annotated[int, Range(least=2, most=64, only=(0,))] = 0
    """Longest n-gram with a hashed embedding, 2 or more; 0 for none."""
    ngram_rows: Annotated[int, Range(least=1, most=2**30), NGRAMS] = 2**15
    """Rows of each n-gram table, a power of two."""
    ngram_dim: Annotated[int, Range(least=1, most=2**16), NGRAMS] = 32
    """Width of an n-gram's embedding."""
    mup: Mup = STANDARD
    """muP: learning rates found at a small d-model hold at a large one."""
    rounding: Rounding = PER_CHANNEL
    """Rounding of weight matmuls with precision int8 or fp8."""

    def __post_init__(self) -> None:
        check(self, "model")
        check_needs(self, "model")
        if self.num_parameters > MOST_PARAMETERS:
            raise OptionError(
                f"the model's sizes make {self.num_parameters:.3g} parameters; it takes up to {MOST_PARAMETERS:.0e}, lower one of layers, d-model, d-ff and experts"
            )
        if not self.latent and self.heads % self.kv_heads:
            raise OptionError(
                f"model.heads {self.heads} is not a multiple of model.kv-heads {self.kv_heads}; change one"
            )
        if self.head_dim % 2:
            raise OptionError(
                f"model.head-dim {self.head_dim} is odd; rotary embeddings rotate pairs of dims, use an even one"
            )
        if self.ngrams and self.ngram_rows & (self.ngram_rows - 1):
            raise OptionError(
                f"model.ngram-rows {self.ngram_rows} is not a power of two; rows are picked by the low bits of a hash"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        from systolic.models.decoder.checks import check_latent, check_mixture, check_mup

        check_mixture(self)
        check_latent(self)
        check_mup(self)

    @property
    def mlp_matrices(self) -> int:
        """Matrices of a feed-forward part."""
        return 3 if self.mlp.gated else 2

    @property
    def mixtures(self) -> int:
        """Layers with a mixture."""
        if self.experts == 1:
            return 0
        return (self.layers - self.dense_layers) // self.mixture_every

    @property
    def drops(self) -> bool:
        """Whether a mixture leaves out tokens that get no slot."""
        return self.experts > 1 and self.dispatch is Dispatch.slots and self.capacity_factor > 0

    @property
    def dense_width(self) -> int:
        """Hidden units of a dense layer."""
        return self.dense_d_ff or self.d_ff

    @property
    def query_dim(self) -> int:
        """Width of a head's query and key."""
        return self.latent.query_dim if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of the products of queries and keys."""
        if base := self.mup.base_head_dim:
            return base**0.5 / self.head_dim
        scale = (self.query_pre_attn_scalar or self.query_dim) ** -0.5
        return scale * self.rope_scaling.softmax_factor if self.latent else scale

    @property
    def embedding_factor(self) -> float:
        """Factor of the embedding's rows."""
        return self.embedding_scale or (1.0 if self.tie_embeddings else self.table_width**0.5)

    @property
    def table_width(self) -> int:
        """Width whose inverse square root is the standard deviation of initial embeddings."""
        return self.mup.base_width or self.d_model

    @property
    def shrinkage(self) -> float:
        """Base width divided by the width: update factor of matrices whose fan-in grows with the width; 1 in the standard parametrisation."""
        return self.table_width / self.d_model

    @property
    def output_factor(self) -> float:
        """Factor of the output matrix's inputs if it is tied; an untied one has smaller updates instead."""
        return self.shrinkage if self.tie_embeddings else 1.0

    @property
    def num_parameters(self) -> int:
        """Parameters, embeddings included."""
        return sizes.parameters(self)

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each layer in one period of the pattern, 0 for none."""
        if not self.window or not self.global_every:
            return (self.window,)
        return (self.window,) * (self.global_every - 1) + (0,)

    @property
    def rolling(self) -> bool:
        """Whether every layer has a window, so that a cache keeps no more positions than that."""
        return all(self.windows)

    def rotary(self, window: int) -> Rotary:
        """Rotary embeddings of a layer with this window."""
        if window and self.local_rope_theta:
            return Rotary(self.local_rope_theta, UNSCALED)
        return Rotary(self.rope_theta, self.rope_scaling)

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """A :class:`~systolic.models.decoder.module.DecoderModule` in float32."""
        from systolic.models.decoder.module import DecoderModule

        if not self.vocab:
            raise OptionError(
                "model.vocab is 0; a recipe without a tokenizer must give the number of token ids"
            )
        return DecoderModule(self, rngs, target)

    def check(self, layout: Layout) -> None:
        """Checks that each axis divides the dims that it splits."""
        from systolic.models.decoder.checks import check_layout

        check_layout(self, layout)

    def check_effects(self, precision: Precision) -> None:
        """Checks that global-every is within the layers and that rounding has matmuls that round."""
        if self.global_every > self.layers:
            raise OptionError(
                f"model.global-every is {self.global_every} and model.layers {self.layers}, so that it has no effect: no layer is global; lower it, or leave it out"
            )
        if precision.matmul_format is None and self.rounding != PER_CHANNEL:
            raise OptionError(
                f"model.rounding is set but precision is {precision.value}, so that it has no effect; leave it out, or set --precision int8 or fp8"
            )

    def check_optimizer(self, kind: OptimizerKind) -> None:
        """Checks that the update rule supports muP, if the decoder has a base width."""
        from systolic.models.decoder.checks import check_rule

        check_rule(self, kind)

    def update_factor(self, path: str, kind: OptimizerKind) -> float:
        """Factor of updates: below 1 for matrices whose fan-in is larger than at the base width."""
        from systolic.models.decoder.mup import update_factor

        return update_factor(self, path, kind)

    def lasting(self) -> frozenset[str]:
        """All fields but losses, capacity, dispatch, rounding, and constants."""
        changing = {
            "capacity_factor",
            "dispatch",
            "experts_per_token",
            "router_loss",
            "router_bias_rate",
            "rope_theta",
            "rope_scaling",
            "norm_eps",
            "rounding",
        }
        return frozenset(self.__dataclass_fields__) - changing

    def flops(self, fields: Mapping[str, Field]) -> float:
        """Matmul FLOPs of the forward pass of one sequence; attention counts what the causal mask or window leaves."""
        sequence, work = fields["tokens"].shape[0], sizes.work(self)
        return sequence * (work.token + work.logits) + work.pair * sizes.pairs(self, sequence)

    def weight_flops(self, fields: Mapping[str, Field]) -> float:
        """FLOPs of one sequence without attention's own products."""
        work = sizes.work(self)
        return fields["tokens"].shape[0] * (work.token + work.logits)

    @property
    def grouped(self) -> bool:
        """Whether experts are computed by grouped matmuls."""
        return self.experts > 1 and self.dispatch is Dispatch.dropless

    def adaptable(self) -> Mapping[str, int]:
        """Matrices of attention, of dense feed-forward parts and of shared experts; other experts have no adapters."""
        return sizes.adapters(self)

    def quantizable(self, path: str) -> bool:
        """The matrices of :meth:`adaptable`, those of experts, the embedding and the output matrix."""
        *_, home, name = ("", *path.split("/"))
        expert = home == "mlp" and name in ("gate", "up", "down")
        return name in self.adaptable() or expert or path in VOCABULARY

    def fewest_bits(self, path: str) -> int:
        """8 of the embedding and the output matrix."""
        return 8 if path in VOCABULARY else 4

    def prefill_flops(self, sequence: int) -> float:
        """Matmul FLOPs of reading a prompt of so many tokens: logits of the last one only."""
        work = sizes.work(self)
        return sequence * work.token + work.logits + work.pair * sizes.pairs(self, sequence)

    def decode_flops(self, sequence: int) -> float:
        """Matmul FLOPs of the last token of so many, the others in a cache."""
        work = sizes.work(self)
        seen = sizes.pairs(self, sequence) - sizes.pairs(self, sequence - 1)
        return work.token + work.logits + work.cached * seen

    def axes(self) -> frozenset[Axis]:
        """All axes; the expert axis only in a mixture."""
        return frozenset(Axis) - (frozenset() if self.experts > 1 else {Axis.expert})

    def policies(self) -> frozenset[Remat]:
        """All policies."""
        return frozenset(Remat)

    def matmul_formats(self) -> frozenset[str]:
        """int8 and fp8; routing and logits stay in the compute dtype."""
        return frozenset(("int8", "fp8"))

    def outline(self, layout: Layout) -> ModelStats:
        """See :mod:`systolic.models.decoder.config`."""

        return outline(self, layout)

    def slots_per_token(self) -> float:
        """Capacity factor of a mixture with slots; with a factor of 0 each expert has a slot for every token."""
        if self.experts <= 1 or self.dispatch is Dispatch.dropless:
            return 1.0
        return self.capacity_factor or self.experts / self.experts_per_token

    def shrink(self, layout: Layout) -> "Decoder":
        """Two layers per stage and a few heads per tensor shard, with this model's ratios of heads and experts."""
        groups = 1 if self.latent else self.heads // self.kv_heads
        kv_heads = max(layout.tensor, 1)
        width = 16 * layout.fsdp * layout.expert * layout.context
        dense, hidden = min(self.dense_layers, 1), 32 * layout.tensor
        unit = math.lcm(len(self.windows), self.mixture_every)
        grouped = self.router.groups > 1
        every = self.router.top_groups == self.router.groups
        router = replace(
            self.router, groups=2 if grouped else 1, top_groups=2 if grouped and every else 1
        )
        experts = max(2 * layout.expert, 4) if grouped else 2 * layout.expert
        return replace(
            self,
            layers=dense + min(self.layers - dense, max(2, unit) * layout.pipeline),
            d_model=width,
            d_ff=hidden,
            dense_layers=dense,
            dense_d_ff=hidden if self.dense_d_ff else 0,
            latent=self.latent.shrunk(),
            ngram_rows=64 * layout.tensor if self.ngrams else self.ngram_rows,
            heads=kv_heads * min(groups, 4),
            kv_heads=kv_heads,
            head_dim=16,
            router=router,
            experts=min(self.experts, experts) if self.experts > 1 else 1,
            experts_per_token=min(self.experts_per_token, 2),
        )


def outline(config: "Decoder", layout: Layout) -> ModelStats:
    """Elements that each policy saves, by the names of the blocks' activations."""
    whole, split = activations(config)
    queries = config.heads * config.query_dim
    matmuls = ("latent", "query", "key", "value", "out", "mlp", "down")
    named = set(layout.remat_names)
    stays = set(layout.saved_names)

    def kept(names: set[str]) -> tuple[int, int]:
        return (
            sum(size for name, size in whole.items() if name in names),
            sum(size for name, size in split.items() if name in names),
        )

    everything = kept({*whole, *split})
    dropless = config.experts > 1 and config.dispatch is Dispatch.dropless
    expert_rows = split["mlp"] if dropless else 0
    # Grouped products are kernels, which a policy for matmuls does not save.
    saved = {name for name in matmuls if not (dropless and name in ("mlp", "down"))}
    some, more = kept({"layer_input", *saved})
    return ModelStats(
        parameters=config.num_parameters,
        layers=config.layers,
        stream=config.d_model,
        keys=_key_heads(config) * (config.query_dim + config.value_dim),
        routed=config.experts_per_token if config.experts > 1 else 0,
        vocab=config.vocab,
        experts=config.experts if dropless else 0,
        hidden={
            Remat.none: expert_rows + expert_rows // 2,
            Remat.minimal: 0,
            Remat.save_names: expert_rows if "mlp" in named else 0,
            Remat.offload: expert_rows if "mlp" in stays else 0,
            Remat.full: 0,
        },
        kept={
            # Besides what is named: the norms' results, the rotated queries and keys, the activation.
            Remat.none: (
                everything[0] + (6 if config.post_norms else 4) * config.d_model,
                everything[1] + queries + split["mlp"] // 2,
            ),
            Remat.minimal: (some, more),
            Remat.save_names: kept({"layer_input", *named}),
            Remat.offload: kept(({"layer_input"} - named) | stays),
            Remat.full: kept({"layer_input"}),
        },
        repeated={
            Remat.none: 0.0,
            Remat.minimal: _repeated(config, saved | {"attention"}) + ATTENTION,
            Remat.save_names: _repeated(config, {*named}),
            Remat.offload: _repeated(config, named | stays),
            Remat.full: 1.0,
        },
    )


def activations(config: "Decoder") -> tuple[dict[str, int], dict[str, int]]:
    """Elements per token and layer by name: those that the tensor axis leaves whole, and those that it splits."""
    heads, key_heads = config.heads, _key_heads(config)
    copies = float(config.experts_per_token) if config.experts > 1 else 1.0
    if config.dispatch is Dispatch.slots and config.experts > 1:
        copies *= config.capacity_factor
    width = config.d_ff * (max(copies, 1.0) + config.shared_experts)
    if config.mixtures < config.layers:
        width += (config.dense_width - width) * (1 - config.mixtures / config.layers)
    whole = {"layer_input": config.d_model, "out": config.d_model, "down": config.d_model}
    if latent := config.latent:
        whole["latent"] = latent.q_lora_rank + latent.kv_lora_rank + latent.qk_rope_head_dim
    split = {
        "query": heads * config.query_dim,
        "key": key_heads * config.query_dim,
        "value": key_heads * config.value_dim,
        "attention": heads * config.value_dim,
        "mlp": math.ceil(width * (2 if config.mlp.gated else 1)),
    }
    return whole, split


def _key_heads(config: "Decoder") -> int:
    return config.heads if config.latent else config.kv_heads


def _costs(config: "Decoder") -> dict[str, float]:
    """Parameters of the matmul that makes each activation: its share of the FLOPs of a mean layer."""
    d, keys = config.d_model, config.kv_heads * config.head_dim
    hidden = sizes.feed_forward(config, config.experts_per_token) / config.layers
    router = d * config.experts * config.mixtures / config.layers
    down = (hidden - router) / config.mlp_matrices
    ends = {"out": sizes.out(config), "mlp": hidden - router - down, "down": down}
    if latent := config.latent:
        q, r = latent.q_lora_rank, latent.kv_lora_rank
        return ends | {
            "latent": d * (q + r + latent.qk_rope_head_dim),
            "query": (q or d) * config.heads * config.query_dim,
            "key": r * config.heads * latent.qk_nope_head_dim,
            "value": r * config.heads * latent.v_head_dim,
        }
    return ends | {"query": d * config.heads * config.head_dim, "key": d * keys, "value": d * keys}


def _repeated(config: "Decoder", names: set[str]) -> float:
    """Share of a layer's matmuls that are recomputed: those whose results are needed and not saved."""
    costs = _costs(config)
    # What a block ends in is never asked for again by itself.
    again = sum(
        cost for name, cost in costs.items() if name not in names and name not in ("out", "down")
    )
    if "attention" not in names:
        again += ATTENTION * sum(costs.values())
    return again / sum(costs.values())
