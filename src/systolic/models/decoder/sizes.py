"""Parameters and matmul FLOPs of a decoder, from its sizes; imports without jax."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from systolic.models.decoder.config import Decoder


class ForwardFlops(NamedTuple):
    """Matmul FLOPs of the forward pass."""

    token: int
    """FLOPs of a token in all layers, without attention's own products."""
    logits: int
    """FLOPs of a token's logits."""
    pair: int
    """FLOPs of a pair of a token and one that it sees, per layer, with keys and values of each token."""
    cached: int
    """FLOPs of such a pair with a cache: latents are compared as they are stored."""


def attention(config: "Decoder") -> int:
    """Elements of the matrices of a layer's attention."""
    latent, d, heads = config.latent, config.d_model, config.heads
    if not latent:
        return d * config.head_dim * 2 * (heads + config.kv_heads)
    q, r = latent.q_lora_rank, latent.kv_lora_rank
    query = (d * q + q * heads * latent.query_dim) if q else d * heads * latent.query_dim
    narrow = d * (r + latent.qk_rope_head_dim)
    return query + narrow + r * heads * (latent.qk_nope_head_dim + latent.v_head_dim) + out(config)


def out(config: "Decoder") -> int:
    """Elements of attention's output matrix."""
    return config.heads * config.value_dim * config.d_model


def dense(config: "Decoder") -> int:
    """Elements of the feed-forward part of a dense layer beside mixtures, or of a dense model."""
    return config.mlp_matrices * config.d_model * config.dense_width


def expert(config: "Decoder") -> int:
    """Elements of one expert."""
    return config.mlp_matrices * config.d_model * config.d_ff


def mixture(config: "Decoder", experts: int) -> int:
    """Elements of the feed-forward part of a mixture, counting this many routed experts."""
    return (experts + config.shared_experts) * expert(config) + config.d_model * config.experts


def mixture_biases(config: "Decoder") -> int:
    """Elements of the biases of a mixture's router and experts."""
    inner = config.mlp_matrices - 1
    each = inner * config.d_ff + config.d_model if config.expert_bias else 0
    return config.experts * (each + (1 if config.router.logit_bias else 0))


def feed_forward(config: "Decoder", experts: int) -> int:
    """Elements of the feed-forward parts of all layers; of a mixture this many routed experts."""
    if config.experts == 1:
        return config.layers * dense(config)
    return (config.layers - config.mixtures) * dense(config) + config.mixtures * mixture(
        config, experts
    )


def biases(config: "Decoder") -> int:
    """Elements of a layer's biases, and its sinks."""
    total = config.heads if config.sinks else 0
    if config.qkv_bias:
        total += (config.heads + 2 * config.kv_heads) * config.head_dim
    if config.out_bias:
        total += config.d_model
    if config.mlp_bias:
        total += (config.mlp_matrices - 1) * config.dense_width + config.d_model
    return total


def adapters(config: "Decoder") -> dict[str, int]:
    """Elements of adapters of rank 1 by the names of their matrices, over all layers: inputs and outputs of each."""
    latent, d, heads, layers = config.latent, config.d_model, config.heads, config.layers
    if latent:
        q, r = latent.q_lora_rank, latent.kv_lora_rank
        sizes = {
            "query": (q or d) + heads * latent.query_dim,
            "down": d + r + latent.qk_rope_head_dim,
            "key": r + heads * latent.qk_nope_head_dim,
            "value": r + heads * latent.v_head_dim,
        }
        sizes |= {"query_down": d + q} if q else {}
    else:
        keys = d + config.kv_heads * config.head_dim
        sizes = {"query": d + heads * config.head_dim, "key": keys, "value": keys}
    sizes["out"] = heads * config.value_dim + d
    totals = {name: layers * size for name, size in sizes.items()}
    dense, mixtures = layers - config.mixtures, config.mixtures
    hidden = dense * (d + config.dense_width)
    if config.shared_experts:
        hidden += mixtures * (d + config.shared_experts * config.d_ff)
    if hidden:
        names = ("gate", "up", "down") if config.mlp.gated else ("up", "down")
        totals |= {name: totals.get(name, 0) + hidden for name in names}
    return totals


def parameters(config: "Decoder") -> int:
    """Parameters, embeddings included, without the router's biases."""
    per_norm = 2 if config.norm.biased else 1
    norms = (4 if config.post_norms else 2) * config.d_model
    norms += 2 * config.head_dim if config.qk_norm else 0
    norms += config.latent.q_lora_rank + config.latent.kv_lora_rank
    layer = attention(config) + per_norm * norms + biases(config)
    embeddings = config.vocab * config.d_model * (1 if config.tie_embeddings else 2)
    embeddings += config.learned_positions * config.d_model
    orders = max(config.ngrams - 1, 0)
    ngrams = orders * config.ngram_dim * (config.ngram_rows + config.d_model)
    total = config.layers * layer + feed_forward(config, config.experts)
    total += config.mixtures * mixture_biases(config)
    return total + embeddings + ngrams + per_norm * config.d_model


def work(config: "Decoder") -> ForwardFlops:
    """FLOPs by what they depend on; of a mixture those of a token's experts."""
    matrices = config.layers * attention(config) + feed_forward(config, config.experts_per_token)
    pair = 2 * config.heads * (config.query_dim + config.value_dim)
    latent = config.latent
    read = 2 * latent.kv_lora_rank + latent.qk_rope_head_dim
    cached = 2 * config.heads * read if latent else pair
    return ForwardFlops(2 * matrices, 2 * config.d_model * config.vocab, pair, cached)


def pairs(config: "Decoder", sequence: int) -> float:
    """Pairs of a token and one that it sees, over all layers."""
    windows = config.windows

    def seen(window: int) -> float:
        reach = min(window or sequence, sequence)
        return reach * (reach + 1) / 2 + (sequence - reach) * reach

    return sum(seen(windows[layer % len(windows)]) for layer in range(config.layers))
