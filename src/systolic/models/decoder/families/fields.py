"""Fields of a config.json that many decoders share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from enum import Enum
from typing import Any

from systolic.core.errors import OptionError, misspelt
from systolic.models.decoder.config import Decoder, Mlp
from systolic.models.decoder.rotary import RopeScaling, Stretching
from systolic.models.families import Config, UnsaidError

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
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return given.get("mscale_all_dim") or 0.0


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
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if layers is not None and layers in given:
        given = given[layers] or {}
    given = {name: value for name, value in given.items() if value is not None}
    for fields in (config, given):
        if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise OptionError(
                f"partial_rotary_factor is {fields['partial_rotary_factor']} and only 1 is known"
            )
    bases = [f["rope_theta"] for f in (given, config) if f.get("rope_theta") is not None]
    theta = bases[0] if bases else theta
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise OptionError(f"rope_theta is {theta!r}; it takes a number above 0")
    name = given.get("rope_type", given.get("type", "default"))
    if name not in KINDS:
        raise OptionError(
            f"rope_type is {name!r}{misspelt(str(name), KINDS)} and only {', '.join(KINDS)} are known"
        )
    kind = KINDS[name]
    original = config.get("original_max_position_embeddings") or given.get(
        "original_max_position_embeddings"
    )
    longest = config.get("max_position_embeddings")
    factor = given.get("factor") or (longest / original if longest and original else 1.0)
    attention = given.get("attention_factor") or 1
    if kind is Stretching.yarn and factor == 1 and attention != 1:
        raise OptionError(
            f"attention_factor is {attention} beside a factor of 1, which stretches nothing, and is known with a larger one only"
        )
    if kind is Stretching.none or factor == 1:
        return theta, RopeScaling()
    more = {number: given[number] for number in NUMBERS[kind] if number in given}
    if kind is Stretching.yarn:
        more = {number: value for number, value in more.items() if value}
        more["truncate"] = given.get("truncate", True)
        if "mscale_all_dim" not in more:
            more.pop("mscale", None)
    if kind is not Stretching.linear and (original or longest):
        more["original_positions"] = original or longest
    return theta, RopeScaling(kind=kind, factor=factor, **more)


def rotary_fields(model: Decoder) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` of a config.json, which every version of transformers reads."""
    scaling = model.rope_scaling
    found: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": None}
    if not scaling:
        return found
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
    return found | {"rope_scaling": fields}


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


def faithful(
    model: Decoder, written: dict[str, Any], read: Callable[[Config], Decoder]
) -> dict[str, Any]:
    """A config.json, checked to make the same model again.

    Args:
        model: The model.
        written: Fields of the config.json for it.
        read: Makes a model of such fields.

    Raises:
        UnsaidError: the family has no field for something in the model; names all of it.
    """
    said = read(written)
    mine, theirs = _meaning(model), _meaning(said)
    away = [name for name in mine if mine[name] != theirs[name]]
    if away:
        told = {name: (_shown(model, mine, name), _shown(said, theirs, name)) for name in away}
        # Fields that mean something together differ together, also where a value is the same.
        seen = [name for name, (ours, other) in told.items() if ours != other] or away
        raise UnsaidError(
            written["model_type"],
            [
                f"model.{name.replace('_', '-')} is {told[name][0]}, not {told[name][1]}"
                for name in seen
            ],
        )
    return written


def _shown(model: Decoder, meaning: Mapping[str, Any], name: str) -> str:
    """A field's value for a message: what a number means, of all others what was set."""
    value = meaning[name] if isinstance(meaning[name], float) else getattr(model, name)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value.value if isinstance(value, Enum) else value)


def _meaning(model: Decoder) -> dict[str, Any]:
    """Fields of a decoder, those with several forms by what they mean."""
    found = {field.name: getattr(model, field.name) for field in dataclass_fields(model)}
    pattern = [model.windows[n % len(model.windows)] for n in range(model.layers)]
    rotaries = None if model.learned_positions else [model.rotary(window) for window in pattern]
    found |= {
        "embedding_scale": model.embedding_factor,
        "query_pre_attn_scalar": model.softmax_scale,
        "window": pattern,
        "global_every": pattern,
        "rope_theta": rotaries,
        "rope_scaling": rotaries,
        "local_rope_theta": rotaries,
    }
    return {name: value for name, value in found.items() if name not in UNSAID}
