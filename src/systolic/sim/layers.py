"""Places in the model, from the path of names that JAX gives an op."""

import re
from functools import lru_cache

_WRAPPED = re.compile(
    r"^(?:jit|pjit|jvp|transpose|vmap|remat|checkpoint|custom_vjp|shard_map)\((.*)\)$"
)
_MAIN = "jit(main)"
"""Scope that versions of JAX before 0.7 put behind the function's own name."""
_DROPPED = frozenset(
    (
        "",
        "while",
        "body",
        "cond",
        "scan",
        "closed_call",
        "eval_jaxpr",
        "core_call",
        "checkpoint",
        "rematted_computation",
        "remat",
        "remat2",
        "shard_map",
        "pallas_call",
        "custom_vjp_call",
        "custom_jvp_call",
        "jvp()",
        "transpose(jvp())",
        "vmap()",
        "branch_0_fun",
        "branch_1_fun",
    )
)


@lru_cache(maxsize=65536)
def layer_of(op_name: str) -> str:
    """``jit(train)/transpose(jvp(attention))/while/body/dot_general`` is ``attention``."""
    first, *others = op_name.split("/")
    parts = [first, *(_bare(part) for part in others if part != _MAIN)]
    named = [part for part in parts[1:-1] if part not in _DROPPED and "->" not in part]
    return "/".join(named)


def phase_of(op_name: str) -> str:
    """forward, backward, recomputed or update: the part of a train step an op belongs to."""
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return "update"


def _bare(part: str) -> str:
    while wrapped := _WRAPPED.match(part):
        part = wrapped[1]
    return part
