"""A state as a flat table: path -> array, so that any container restores bit for bit.

Only arrays are stored. Containers (named tuples, dicts, ``None``, empty ones) come back from the
abstract state that a restore is given; the manifest's table says whether the two agree.
"""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from systolic.core.errors import RunError
from systolic.runs.manifest import Leaf

Path = tuple[str, ...]

STORED = {"model_state": "rest", "guard": "watch"}
"""Fields of a state that checkpoints hold under an earlier name, so that runs of earlier versions load."""

LOOSE = "_leaves"
"""The item that holds the arrays which are directly in the state, such as the step."""


def flatten(state: Any) -> dict[Path, Any]:
    """The leaves of a pytree by path, in the pytree's order.

    Raises:
        ValueError: two leaves have the same path, such as keys ``1`` and ``"1"``.
    """
    import jax

    table: dict[Path, Any] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        first, *inner = (
            (jax.tree_util.keystr((key,), simple=True) for key in keys) if keys else ("",)
        )
        path = (STORED.get(first, first), *inner) if keys else ()
        if path in table:
            raise ValueError(f"two leaves of the state have the path {text(path)}")
        table[path] = leaf
    return table


def unflatten(state: Any, table: Mapping[Path, Any]) -> Any:
    """``state`` with the leaves of ``table`` replaced; other leaves stay."""
    import jax

    leaves = [table.get(path, leaf) for path, leaf in flatten(state).items()]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def text(path: Path) -> str:
    """A path as text: ``params/layers/0/kernel``."""
    return "/".join(path) or "(the whole state)"


def item(path: Path) -> str:
    """The folder in a checkpoint that holds the leaf at ``path``: one per top-level container."""
    return quote(path[0], safe=" ") if len(path) > 1 else LOOSE


def nest(table: Mapping[Path, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """One item's leaves as nested dicts, as other readers of the checkpoint see them."""
    tree: dict[str, Any] = {}
    for path, leaf in table.items():
        *folders, name = _inside(path)
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = convert(leaf)
    return tree


def pick(tree: Mapping[str, Any], path: Path) -> Any:
    """The leaf at ``path`` in a result of :func:`nest`."""
    node: Any = tree
    for name in _inside(path):
        node = node[name]
    return node


def describe(leaf: Any) -> Leaf:
    """Shape and dtype of an array or of a ``jax.ShapeDtypeStruct``."""
    impl = _key_impl(leaf)
    if impl is not None:
        return Leaf(dtype="uint32", shape=tuple(leaf.shape), key=impl)
    return Leaf(dtype=leaf.dtype.name, shape=tuple(leaf.shape))


def to_data(leaf: Any) -> Any:
    """The array to store: a typed key's data, otherwise the leaf."""
    import jax

    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def abstract_data(leaf: Any) -> Any:
    """The ``jax.ShapeDtypeStruct`` of :func:`to_data` with a definite sharding."""
    import jax

    data = jax.eval_shape(jax.random.key_data, _plain(leaf)) if _is_key(leaf) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def from_data(data: Any, leaf: Any) -> Any:
    """Inverse of :func:`to_data` for the abstract ``leaf``."""
    import jax

    impl = _key_impl(leaf)
    return data if impl is None else jax.random.wrap_key_data(data, impl=impl)


def _inside(path: Path) -> list[str]:
    names = path[1:] if len(path) > 1 else (path or ("state",))
    return [quote(name, safe=" ") for name in names]


def _is_key(leaf: Any) -> bool:
    import jax

    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _key_impl(leaf: Any) -> str | None:
    import jax

    if not _is_key(leaf):
        return None
    impls: list[str] = []

    def look(key: Any) -> Any:
        impls.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    jax.eval_shape(look, _plain(leaf))
    return impls[0]


def require_same(step: int, held: Mapping[Path, Leaf], wanted: Mapping[Path, Any]) -> None:
    """Checks that a checkpoint holds the leaves of a job.

    Args:
        step: Of the checkpoint.
        held: What it holds.
        wanted: The job's arrays or abstract leaves.

    Raises:
        RunError: it does not; names the first path that differs.
    """
    ours = {path: describe(leaf) for path, leaf in wanted.items()}
    for path in [*ours, *(path for path in held if path not in ours)]:
        there, here = held.get(path), ours.get(path)
        if there != here:
            raise RunError(
                f"checkpoint of step {step} is of another model: {text(path)} is {there or 'absent'} in the checkpoint and {here or 'absent'} in this job; use the job that wrote it"
            )
