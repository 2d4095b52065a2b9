"""Rules and fields that the families with experts share."""

from collections.abc import Mapping, Sequence
from typing import Any

from systolic.core.errors import OptionError
from systolic.models.decoder.config import Decoder
from systolic.models.families import Config
from systolic.models.mapping import Rule, matrix, plain

LAYER = "model.layers.{layer}."
EXPERT = "{expert}."

Layers = Mapping[str, Sequence[int]]
"""Stack of a rule: ``layer`` to the numbers of the layers in the file."""


def kinds_of_layers(model: Decoder) -> dict[str, Layers]:
    """Stacks of layers by the path of their blocks: those with a mixture, and the dense ones beside them."""
    if model.mixture_every > 1:
        mixtures = range(model.mixture_every - 1, model.layers, model.mixture_every)
    else:
        mixtures = range(model.dense_layers, model.layers)
    dense = [number for number in range(model.layers) if number not in mixtures]
    found: dict[str, Layers] = {"blocks": {"layer": mixtures}}
    return found | ({"dense_blocks": {"layer": dense}} if dense else {})


def ends(model: Decoder) -> list[Rule]:
    """Rules for the embeddings and the last norm."""
    found = [
        plain("embedding", "model.embed_tokens.weight"),
        plain("norm/scale", "model.norm.weight"),
    ]
    if not model.tie_embeddings:
        found.append(matrix("unembedding", "lm_head.weight", (model.d_model, model.vocab)))
    return found


def norms(path: str, layers: Layers) -> list[Rule]:
    """Rules for the two norms of the blocks at ``path``."""
    return [
        plain(f"{path}/attention_norm/scale", f"{LAYER}input_layernorm.weight", layers),
        plain(f"{path}/mlp_norm/scale", f"{LAYER}post_attention_layernorm.weight", layers),
    ]


def attention(model: Decoder, path: str, layers: Layers) -> list[Rule]:
    """Rules for the plain attention of the blocks at ``path``, with its biases, norms and sinks."""
    d, h, k, e = model.d_model, model.heads, model.kv_heads, model.head_dim
    there = f"{LAYER}self_attn."
    found = [
        matrix(f"{path}/query", f"{there}q_proj.weight", (d, h, e), stack=layers),
        matrix(f"{path}/key", f"{there}k_proj.weight", (d, k, e), stack=layers),
        matrix(f"{path}/value", f"{there}v_proj.weight", (d, k, e), stack=layers),
        matrix(f"{path}/out", f"{there}o_proj.weight", (h, e, d), inputs=2, stack=layers),
    ]
    if model.qkv_bias:
        found += [
            plain(f"{path}/{name}_bias", f"{there}{name[0]}_proj.bias", layers)
            for name in ("query", "key", "value")
        ]
    if model.out_bias:
        found.append(plain(f"{path}/out_bias", f"{there}o_proj.bias", layers))
    if model.qk_norm:
        found += [
            plain(f"{path}/query_norm/scale", f"{there}q_norm.weight", layers),
            plain(f"{path}/key_norm/scale", f"{there}k_norm.weight", layers),
        ]
    if model.sinks:
        found.append(plain(f"{path}/sinks", f"{there}sinks", layers))
    return found


def gated(
    path: str,
    theirs: str,
    shape: tuple[int, int],
    stack: Mapping[str, Sequence[int]],
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Rule]:
    """Rules for the matrices of a gated feed-forward part.

    Args:
        path: Of ours.
        theirs: Template of what their names begin with.
        shape: Width of the stream, and hidden units.
        stack: Layers, and experts where ``theirs`` names one.
        names: Of gate, up and down.
    """
    gate, up, down = (f"{theirs}{name}.weight" for name in names)
    return [
        matrix(f"{path}/gate", gate, shape, stack=stack),
        matrix(f"{path}/up", up, shape, stack=stack),
        matrix(f"{path}/down", down, shape[::-1], stack=stack),
    ]


def mixture(
    model: Decoder, layers: Layers, theirs: str, names: tuple[str, str, str] | None = None
) -> list[Rule]:
    """Rules for the router and the experts, which the file keeps one by one.

    Args:
        model: With experts.
        layers: Those with a mixture.
        theirs: Template of what their names begin with: the mixture's.
        names: Of an expert's gate, up and down.
    """
    stack = {**layers, "expert": range(model.experts)}
    known = {} if names is None else {"names": names}
    size, each = (model.d_model, model.d_ff), f"{theirs}experts.{EXPERT}"
    router = matrix(
        "blocks/mlp/router", f"{theirs}gate.weight", (size[0], model.experts), 1, layers
    )
    return [router, *gated("blocks/mlp", each, size, stack, **known)]


def dense(model: Decoder, layers: Layers) -> list[Rule]:
    """Rules for the feed-forward parts of the dense layers beside mixtures."""
    size = (model.d_model, model.dense_width)
    return gated("dense_blocks/mlp", f"{LAYER}mlp.", size, layers)


def tied(model: Decoder) -> tuple[str, ...]:
    """Tensors of the file that hold nothing of ours."""
    copies = ("lm_head.weight",) if model.tie_embeddings else ()
    return (r".*rotary_emb\.inv_freq", *copies)


def refuse_quantized(config: Config) -> None:
    """Refuses weights in a format of blocks with scales.

    Raises:
        OptionError: the configuration says that its weights are quantized.
    """
    given = config.get("quantization_config")
    if given:
        kind = given.get("quant_method", "an unnamed format")
        raise OptionError(
            f"quantization_config says that the weights are in {kind} and only plain ones are read; save the model in bfloat16 with transformers (dequantize=True) and import that"
        )


def shared_fields(model: Decoder) -> dict[str, Any]:
    """Fields of a config.json that these families name alike."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "num_experts_per_tok": model.experts_per_token,
        "hidden_act": "silu",
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tie_embeddings,
        "rms_norm_eps": model.norm_eps,
    }
