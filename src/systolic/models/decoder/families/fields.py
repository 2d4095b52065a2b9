"""Fields of a config.json that many decoders share."""

from collections.abc import Mapping
from typing import Any

from systolic.core.errors import OptionError, nearest
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.rotary import RopeScaling, Stretching
from systolic.models.families import Config

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
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if layers is not None and layers in given:
        given = given[layers] or {}
    given = {name: value for name, value in given.items() if value is not None}
    for fields in (config, given):
        if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise OptionError(
                f"partial_rotary_factor is {fields['partial_rotary_factor']} and only 1 is known"
            )
    theta = given.get("rope_theta") or config.get("rope_theta") or theta
    name = given.get("rope_type", given.get("type", "default"))
    if name not in KINDS:
        raise OptionError(
            f"rope_type is {name!r}{nearest(str(name), KINDS)} and only {', '.join(KINDS)} are known"
        )
    kind = KINDS[name]
    original = config.get("original_max_position_embeddings") or given.get(
        "original_max_position_embeddings"
    )
    longest = config.get("max_position_embeddings")
    factor = given.get("factor") or (longest / original if longest and original else 1.0)
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
