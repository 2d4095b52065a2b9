"""Part of a step that an op belongs to, by the transformations in its path of JAX names."""

import re
from collections.abc import Iterable

_GRADIENT = re.compile(r"jvp\(|transpose\(")
_INSIDE = re.compile(r"jvp|transpose\(|while/body")


def differentiates(op_names: Iterable[str]) -> bool:
    """Whether a program computes a gradient; one that doesn't has no optimizer update."""
    return any(_GRADIENT.search(name) for name in op_names)


def is_outside_gradient(op_name: str) -> bool:
    """Whether an op of a differentiating program is outside of loss and gradient, so in the update."""
    return "jit(" in op_name and not _INSIDE.search(op_name)
