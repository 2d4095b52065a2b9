"""Fields of a config.json that many decoders share: those of all, of dense families of Llama's shape, and of families with experts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from enum import Enum
from functools import wraps
from typing import Any

from systolic.core.errors import OptionError, misspelt
from systolic.job import Model
from systolic.models.decoder.config import Decoder, Mlp
from systolic.models.decoder.options import RopeScaling, Stretching
from systolic.models.families import Config, UnsaidError
from systolic.models.mapping import Conversion, Rule, matrix, plain

LAYER = "model.layers.{layer}."
EXPERT = "{expert}."

Layers = Mapping[str, Sequence[int]]
"""Stack of a rule: ``layer`` to the numbers of the layers in the file."""
KINDS = {
    "default": Stretching.none,
    "linear": Stretching.linear,
    "llama3": Stretching.llama3,
    "yarn": Stretching.yarn,
}
"""rope_type to ours."""
NUMBERS = {
    Stretching.linear: (),
    Stretching.llama3: ("low_freq_factor", "high_freq_factor"),
    Stretching.yarn: ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
}
"""Numbers of a kind beside factor and original positions, which have one name there and here."""
GATED = {"silu": Mlp.swiglu, "gelu_pytorch_tanh": Mlp.geglu, "gelu": Mlp.geglu_exact}
"""Activations of gated feed-forward parts by their names there."""
SLIDING, FULL = "sliding_attention", "full_attention"
"""Names of layers with a window and without in layer_types."""
UNSAID = ("capacity_factor", "dispatch", "router_loss", "router_bias_rate", "rounding")
"""Fields that no config.json has; of those a capacity that drops tokens changes what a model computes, and its export is refused."""


def kinds_of_layers(model: Decoder) -> dict[str, Layers]:
    """Stacks of layers by the path of their blocks: those with a mixture, and the dense ones beside them."""
    if model.mixture_every > 1:
        mixtures = range(model.mixture_every - 1, model.layers, model.mixture_every)
    else:
        mixtures = range(model.dense_layers, model.layers)
    dense = [number for number in range(model.layers) if number not in mixtures]
    stacks: dict[str, Layers] = {"blocks": {"layer": mixtures}}
    return stacks | ({"dense_blocks": {"layer": dense}} if dense else {})


def ends(model: Decoder) -> list[Rule]:
    """Rules for the embeddings and the last norm."""
    rules = [
        plain("embedding", "model.embed_tokens.weight"),
        plain("norm/scale", "model.norm.weight"),
    ]
    if not model.tie_embeddings:
        rules.append(matrix("unembedding", "lm_head.weight", (model.d_model, model.vocab)))
    return rules


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
    rules = [
        matrix(f"{path}/query", f"{there}q_proj.weight", (d, h, e), stack=layers),
        matrix(f"{path}/key", f"{there}k_proj.weight", (d, k, e), stack=layers),
        matrix(f"{path}/value", f"{there}v_proj.weight", (d, k, e), stack=layers),
        matrix(f"{path}/out", f"{there}o_proj.weight", (h, e, d), inputs=2, stack=layers),
    ]
    if model.qkv_bias:
        rules += [
            plain(f"{path}/{name}_bias", f"{there}{name[0]}_proj.bias", layers)
            for name in ("query", "key", "value")
        ]
    if model.out_bias:
        rules.append(plain(f"{path}/out_bias", f"{there}o_proj.bias", layers))
    if model.qk_norm:
        rules += [
            plain(f"{path}/query_norm/scale", f"{there}q_norm.weight", layers),
            plain(f"{path}/key_norm/scale", f"{there}k_norm.weight", layers),
        ]
    if model.sinks:
        rules.append(plain(f"{path}/sinks", f"{there}sinks", layers))
    return rules


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
    quantization = config.get("quantization_config")
    if quantization:
        kind = quantization.get("quant_method", "an unnamed format")
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


def follow(config: Config, known: Mapping[str, Any]) -> None:
    """Checks fields of which this decoder follows one value.

    Args:
        config: Fields of a config.json.
        known: Name to the value, which is also that of an absent field.

    Raises:
        OptionError: for the first field with another value.
    """
    for name, value in known.items():
        if config.get(name, value) != value:
            raise OptionError(f"{name} is {config[name]!r} and only {value!r} is known")


def required(config: Config, name: str) -> Any:
    """A field that has no default.

    Raises:
        OptionError: it is absent or null.
    """
    if config.get(name) is None:
        raise OptionError(
            f"{name} is absent and {config.get('model_type')} has no default of it; add it to config.json"
        )
    return config[name]


def all_dim(config: Config) -> float:
    """``mscale_all_dim`` of the rotary embeddings; 0 for none."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return scaling.get("mscale_all_dim") or 0.0


def rotary(
    config: Config, theta: float = 10_000.0, layers: str | None = None
) -> tuple[float, RopeScaling]:
    """Base and stretching of rotary embeddings.

    Reads ``rope_theta`` and ``rope_scaling``, and ``rope_parameters`` of transformers 5, flat or by kind of layer.

    Args:
        config: Fields of a config.json.
        theta: The base where the file gives none.
        layers: Kind of layer (``full_attention``) where ``rope_parameters`` are by kind.

    Raises:
        OptionError: an unknown rope_type, or rotation of a part of a head's dims.
    """
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name) or {}, Mapping):
            raise OptionError(f"{name} is {config[name]!r}; it takes an object with a rope_type")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if layers is not None and layers in scaling:
        scaling = scaling[layers] or {}
    scaling = {name: value for name, value in scaling.items() if value is not None}
    for fields in (config, scaling):
        if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise OptionError(
                f"partial_rotary_factor is {fields['partial_rotary_factor']} and only 1 is known"
            )
    bases = [f["rope_theta"] for f in (scaling, config) if f.get("rope_theta") is not None]
    theta = bases[0] if bases else theta
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise OptionError(f"rope_theta is {theta!r}; it takes a number above 0")
    name = scaling.get("rope_type", scaling.get("type", "default"))
    if name not in KINDS:
        raise OptionError(
            f"rope_type is {name!r}{misspelt(str(name), KINDS)} and only {', '.join(KINDS)} are known"
        )
    kind = KINDS[name]
    original = config.get("original_max_position_embeddings") or scaling.get(
        "original_max_position_embeddings"
    )
    longest = config.get("max_position_embeddings")
    factor = scaling.get("factor") or (longest / original if longest and original else 1.0)
    attention = scaling.get("attention_factor") or 1
    if kind is Stretching.yarn and factor == 1 and attention != 1:
        raise OptionError(
            f"attention_factor is {attention} beside a factor of 1, which stretches nothing, and is known with a larger one only"
        )
    if kind is Stretching.none or factor == 1:
        return theta, RopeScaling()
    more = {number: scaling[number] for number in NUMBERS[kind] if number in scaling}
    if kind is Stretching.yarn:
        more = {number: value for number, value in more.items() if value}
        more["truncate"] = scaling.get("truncate", True)
        if "mscale_all_dim" not in more:
            more.pop("mscale", None)
    if kind is not Stretching.linear and (original or longest):
        more["original_positions"] = original or longest
    return theta, RopeScaling(kind=kind, factor=factor, **more)


def rotary_fields(model: Decoder) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` of a config.json, which every version of transformers reads."""
    scaling = model.rope_scaling
    config: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": None}
    if not scaling:
        return config
    names = {kind: name for name, kind in KINDS.items()}
    fields: dict[str, Any] = {"rope_type": names[scaling.kind], "factor": scaling.factor}
    if scaling.kind is not Stretching.linear:
        fields["original_max_position_embeddings"] = scaling.original_positions
    numbers = {
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "attention_factor": scaling.attention_factor,
        "mscale": scaling.mscale or None,
        "mscale_all_dim": scaling.mscale_all_dim or None,
    }
    fields |= {name: numbers[name] for name in NUMBERS[scaling.kind] if numbers[name] is not None}
    if scaling.kind is Stretching.yarn:
        fields["truncate"] = scaling.truncate
    return config | {"rope_scaling": fields}


def activation(config: Config, name: str, known: Mapping[str, Mlp] = GATED) -> Mlp:
    """Kind of feed-forward part that a field names.

    Raises:
        OptionError: it is none of those known.
    """
    if config[name] not in known:
        raise OptionError(f"{name} is {config[name]!r} and only {', '.join(known)} are known")
    return known[config[name]]


def named(mlp: Mlp, known: Mapping[str, Mlp] = GATED) -> str:
    """Name there of an activation.

    Raises:
        UnsaidError: it has none in the family.
    """
    for name, kind in known.items():
        if kind is mlp:
            return name
    there = " or ".join(dict.fromkeys(kind.value for kind in known.values()))
    raise UnsaidError("this family", [f"model.mlp is {mlp.value}, not {there}"], whole=False)


def windows(types: Sequence[str], window: int | None) -> tuple[int, int]:
    """``window`` and ``global_every`` of a decoder whose layers are of these kinds.

    Args:
        types: Kind of each layer (``layer_types``).
        window: Window of the sliding ones (``sliding_window``).

    Raises:
        OptionError: an unknown kind, or kinds that do not end each period with a layer of full attention.
    """
    if not window or all(kind == FULL for kind in types):
        return 0, 0
    every = types.index(FULL) + 1 if FULL in types else 0
    if every == 0 and all(kind == SLIDING for kind in types):
        return window, 0
    expected = [SLIDING if (n + 1) % every else FULL for n in range(len(types))] if every else []
    if every < 2 or list(types) != expected:
        raise OptionError(
            f"layer_types is {', '.join(types)} and only {SLIDING} with {FULL} in the last layer of each period is known"
        )
    return window, every


def layer_types(model: Decoder) -> list[str]:
    """``layer_types`` of a decoder."""
    pattern = model.windows
    return [SLIDING if pattern[n % len(pattern)] else FULL for n in range(model.layers)]


def config_of(
    kind: str, architecture: str, read: Callable[[Config], Decoder]
) -> Callable[[Callable[[Decoder], dict[str, Any]]], Callable[[Model], dict[str, Any]]]:
    """Decorator for the fields of a family's config.json: says its kind first, and checks that it makes the same model again.

    What it decorates raises UnsaidError, an OptionError, where the family has no field for something in the model; it names all of it.

    Args:
        kind: The family's ``model_type``.
        architecture: Its class in transformers.
        read: Makes a model of such fields.
    """

    def checked(own: Callable[[Decoder], dict[str, Any]]) -> Callable[[Model], dict[str, Any]]:
        @wraps(own)
        def config(model: Model) -> dict[str, Any]:
            assert isinstance(model, Decoder)
            written = {"model_type": kind, "architectures": [architecture], **own(model)}
            _check_said(model, read(written), kind)
            return written

        return config

    return checked


def _check_said(model: Decoder, said: Decoder, kind: str) -> None:
    mine, theirs = _meaning(model), _meaning(said)
    away = [name for name in mine if mine[name] != theirs[name]]
    if away:
        shown = {name: (_shown(model, mine, name), _shown(said, theirs, name)) for name in away}
        # Fields that mean something together differ together, also where a value is the same.
        seen = [name for name, (ours, other) in shown.items() if ours != other] or away
        raise UnsaidError(
            kind,
            [
                f"model.{name.replace('_', '-')} is {shown[name][0]}, not {shown[name][1]}"
                for name in seen
            ],
        )


def _shown(model: Decoder, meaning: Mapping[str, Any], name: str) -> str:
    """A field's value for a message: what a number means, of all others what was set."""
    value = meaning[name] if isinstance(meaning[name], float) else getattr(model, name)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value.value if isinstance(value, Enum) else value)


def _meaning(model: Decoder) -> dict[str, Any]:
    """Fields of a decoder, those with several forms by what they mean."""
    meaning = {field.name: getattr(model, field.name) for field in dataclass_fields(model)}
    pattern = [model.windows[n % len(model.windows)] for n in range(model.layers)]
    rotaries = None if model.learned_positions else [model.rotary(window) for window in pattern]
    meaning |= {
        "embedding_scale": model.embedding_factor,
        "query_pre_attn_scalar": model.softmax_scale,
        "window": pattern,
        "global_every": pattern,
        "rope_theta": rotaries,
        "rope_scaling": rotaries,
        "local_rope_theta": rotaries,
    }
    return {name: value for name, value in meaning.items() if name not in UNSAID}


def sizes(config: Config) -> dict[str, Any]:
    """Arguments of :class:`Decoder` from fields that all of them name alike."""
    heads = config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "d_model": config["hidden_size"],
        "d_ff": config["intermediate_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab": config["vocab_size"],
        "tie_embeddings": config["tie_word_embeddings"],
        "embedding_scale": 1.0,
        "norm_eps": config["rms_norm_eps"],
    }


def fields(model: Decoder) -> dict[str, Any]:
    """The inverse of :func:`sizes`, and the fields of rotary embeddings."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tie_embeddings,
        "rms_norm_eps": model.norm_eps,
        **rotary_fields(model),
    }


def conversion(model: Decoder) -> Conversion:
    """Rules of embeddings, norms, attention and gated feed-forward part, with their biases."""
    layers = {"layer": range(model.layers)}
    rules = [*ends(model), *attention(model, "blocks", layers)]
    if model.post_norms:
        names = {
            "attention_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "post_mlp_norm": "post_feedforward_layernorm",
        }
        rules += [
            plain(f"blocks/{ours}/scale", f"{LAYER}{theirs}.weight", layers)
            for ours, theirs in names.items()
        ]
    else:
        rules += norms("blocks", layers)
    rules += gated("blocks/mlp", f"{LAYER}mlp.", (model.d_model, model.d_ff), layers)
    if model.mlp_bias:
        rules += [
            plain(f"blocks/mlp/{name}_bias", f"{LAYER}mlp.{name}_proj.bias", layers)
            for name in ("gate", "up", "down")
        ]
    return Conversion(rules=rules, unused=tied(model))
