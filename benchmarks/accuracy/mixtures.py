"""How a published mixture's tokens reach their experts, in options."""

from collections.abc import Mapping
from typing import Any


def dispatch(
    record: Mapping[str, Any], arch: Mapping[str, Any], departures: list[str]
) -> dict[str, Any]:
    """Slots where a capacity is stated, else dropless."""
    other, text = record.get("other_settings") or {}, str(record.get("moe_impl") or "")
    if not other.get("fsdp_shard_on_exp"):
        departures.append(
            "experts split over fsdp by number here, where it divides them; by width or not stated there"
        )
    factor = arch.get("capacity_factor") or other.get("capacity_factor")
    if isinstance(factor, int | float) and factor > 0:
        return {"capacity_factor": float(factor)}
    if other.get("use_tokamax_gmm") or "tokamax" in text:
        departures.append("tokamax's grouped matmuls there, megablox' here")
    if "dropless" not in text and not other.get("sparse_matmul"):
        departures.append("a mixture without a stated capacity: dropless here")
    return {"dispatch": "dropless"}
