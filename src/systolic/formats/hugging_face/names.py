"""Names of a folder's tensors as its family has them: without a wrapper's parts, with the prefix of the whole model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from systolic.formats.source import COPIES
from systolic.models.mapping import Conversion, Rule, Tensor

One = TypeVar("One", bound=Tensor)
WRAPPERS = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
)
"""Parts of names of modules that DataParallel, torch.compile, FSDP, activation checkpoints and Lightning wrap others in."""
ANCHORS = 3
"""Tensors by whose names a prefix is looked for."""


def as_expected(tensors: Mapping[str, One], conversion: Conversion) -> dict[str, One]:
    """Tensors under the names that a conversion reads, where files have them with a wrapper's parts or another prefix.

    transformers opens such folders: saved by AutoModel (``layers.0…`` for ``model.layers.0…``), as a part of a
    larger model (``model.language_model.…``), or with the embedding under the name of the last matrix that it is
    tied to. Unknown names stay as they are, for the conversion's check to name.
    """
    wanted = _wanted(conversion.rules)
    if wanted <= set(tensors):
        return dict(tensors)
    found = {_unwrapped(name): tensor for name, tensor in tensors.items()}
    if len(found) < len(tensors):
        found = dict(tensors)
    best = max(
        (_renamed(found, old, new, wanted) for old, new in {("", ""), *_prefixes(found, wanted)}),
        key=lambda made: len(wanted & set(made)),
    )
    return _with_embedding(best, conversion, wanted)


def _wanted(rules: Sequence[Rule]) -> set[str]:
    return {name for rule in rules for place in rule.places() for name in rule.names(place)}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _prefixes(given: Mapping[str, One], wanted: set[str]) -> Iterator[tuple[str, str]]:
    """Prefixes in files, and what stands in their place in wanted names: those of some missing tensors' longest common ends."""
    for name in sorted(wanted - set(given), key=lambda one: (-one.count("."), one))[:ANCHORS]:
        parts = name.split(".")
        for cut in range(len(parts)):
            end = ".".join(parts[cut:])
            matches = [one for one in given if one == end or one.endswith(f".{end}")]
            if matches:
                yield from ((one.removesuffix(end), name.removesuffix(end)) for one in matches)
                break


def _renamed(given: Mapping[str, One], old: str, new: str, wanted: set[str]) -> dict[str, One]:
    made: dict[str, One] = {}
    for name, tensor in given.items():
        other = new + name.removeprefix(old)
        moved = name not in wanted and name.startswith(old) and other in wanted
        made[other if moved and other not in given else name] = tensor
    return made


def _with_embedding(
    given: dict[str, One], conversion: Conversion, wanted: set[str]
) -> dict[str, One]:
    """The embedding of tied weights that a file has as the last matrix alone."""
    rule = next((rule for rule in conversion.rules if "embedding" in rule.ours), None)
    if rule is None or len(rule.theirs) != 1 or rule.theirs[0] in given:
        return given
    copies = (
        name
        for name in given
        if name not in wanted and any(name == one or name.endswith(f".{one}") for one in COPIES)
    )
    if (copy := next(copies, None)) is None:
        return given
    made = dict(given)
    made[rule.theirs[0]] = made.pop(copy)
    return made
