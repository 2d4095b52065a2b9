"""A process with 16 CPU devices: functions with meshes of the first eight, traced for the other eight.

Prints one JSON object: the name of each case to whether its program is that of the function with a mesh of the other eight.
"""

import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.shard_map import shard_map as old_shard_map
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from systolic import Spread
from systolic.chips import slice
from systolic.core.errors import OptionError
from systolic.forecasting.function import function_program

ON = slice("v5e-8")
DEVICES = jax.devices()
NAMES = ("data", "model")
HERE = Mesh(np.array(DEVICES[:8]).reshape(4, 2), NAMES)
THERE = Mesh(np.array(DEVICES[8:]).reshape(4, 2), NAMES)
EXPLICIT = (AxisType.Explicit,) * 2
X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 16), jnp.float32)
XS, WS = P("data", "model"), P("model", None)


def program_text(traced: Any) -> str:
    """The lowered program, its devices checked."""
    lowered = traced.lower()
    shardings = jax.tree.leaves(lowered.compile().input_shardings)
    assert {d.id for one in shardings for d in one.device_set} == set(range(8, 16))
    return unnamed(lowered.as_text())


def unnamed(text: str) -> str:
    """A program without the names of functions."""
    return re.sub(r"@[\w<>.]+", "@f", text)


def forecast_text(function: Any, *args: Any, spread: Any = None) -> str:
    """The program that a forecast compiles."""
    how = spread if isinstance(spread, Spread) else Spread(mesh=spread)
    made = function_program(function, args, {}, ON, how)
    traced = made.trace(ON, DEVICES[8:])
    return program_text(traced.traced)


def whole(leaf: Any, mesh: Mesh = THERE) -> Any:
    """An argument that is whole on every device, unless it is sharded already."""
    where = leaf.sharding or NamedSharding(mesh, P())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def oracle(function: Any, *args: Any) -> str:
    """The program of a function whose mesh is of the slice's devices."""
    jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    return program_text(jitted.trace(*jax.tree.map(whole, args)))


def body(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.psum(a @ b, "model")


def mapped(mesh: Any, by: Any = jax.shard_map) -> Callable[..., Any]:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return by(body, mesh=mesh, in_specs=(XS, WS), out_specs=P("data", None))(x, w)

    return f


def constrained(mesh: Any) -> Callable[..., Any]:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, XS))
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data", None)))

    return f


def put(mesh: Any) -> Callable[..., Any]:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, XS)) @ w

    return f


def by_jit(mesh: Any) -> Any:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    sharded = (NamedSharding(mesh, XS), NamedSharding(mesh, WS))
    out = NamedSharding(mesh, P("data"))
    return jax.jit(f, in_shardings=sharded, out_shardings=out, donate_argnums=0)


class Trainer:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __call__(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return mapped(self.mesh)(x, w)

    def step(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return mapped(self.mesh)(x, w)

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def jitted(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return mapped(self.mesh)(x, w) @ jnp.zeros((16, 32)) + x


class Linen(nn.Module):
    mesh: Mesh

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return mapped(self.mesh)(x, self.param("w", nn.initializers.ones, W.shape))


class Nnx(nnx.Module):
    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.w = mesh, nnx.Param(jnp.ones(W.shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        return mapped(self.mesh)(x, self.w[...])


class Equinox(eqx.Module):
    w: jax.Array
    mesh: Mesh = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return mapped(self.mesh)(x, self.w)


def placed(mesh: Mesh, shape: Any, spec: P, **more: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec, **more))


def explicit(mesh: Mesh) -> tuple[Any, ...]:
    typed = Mesh(mesh.devices, NAMES, axis_types=EXPLICIT)

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("ij,jk->ik", x, w, out_sharding=NamedSharding(typed, P("data", None)))

    return f, placed(typed, X.shape, XS), placed(typed, W.shape, WS)


def inside(x: jax.Array, w: jax.Array) -> jax.Array:
    assert jax.device_count() == len(jax.devices()) == 8
    types = (AxisType.Auto,) * 2
    return mapped(jax.make_mesh((4, 2), NAMES, axis_types=types))(x, w)


def beside(x: jax.Array, w: jax.Array) -> jax.Array:
    return mapped(Mesh(np.array(jax.devices()).reshape(4, 2), NAMES))(x, w)


def bare(x: jax.Array, w: jax.Array) -> jax.Array:
    x = jax.lax.with_sharding_constraint(x, XS)
    return jax.lax.with_sharding_constraint(x @ w, P("data", None))


def abstract(sizes: tuple[int, ...] = (4, 2), names: tuple[str, ...] = NAMES) -> AbstractMesh:
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def abstract_inside(x: jax.Array, w: jax.Array) -> jax.Array:
    return mapped(abstract())(x, w)


def both_orders(one: Any, other: Any) -> Callable[..., Any]:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return mapped(one)(x, w) + mapped(other)(x, w)

    return f


def by_spec(mesh: Mesh) -> tuple[Any, ...]:
    """Explicit axes and a PartitionSpec, which JAX takes in the context of a mesh alone."""
    typed = Mesh(mesh.devices, NAMES, axis_types=EXPLICIT)

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("ij,jk->ik", x, w, out_sharding=P("data", None))

    return f, placed(typed, X.shape, XS), placed(typed, W.shape, WS)


def in_context(mesh: Mesh) -> str:
    typed = Mesh(mesh.devices, NAMES, axis_types=EXPLICIT)
    with jax.set_mesh(typed):
        return oracle(*by_spec(mesh))


def two(mesh: Mesh) -> Callable[..., Any]:
    flat = Mesh(mesh.devices.reshape(8), ("all",))

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(flat, P("all")))
        return mapped(mesh)(x, w)

    return f


def constant(mesh: Mesh, array: Any) -> Callable[..., Any]:
    def f(x: jax.Array) -> jax.Array:
        return mapped(mesh)(x, array)

    return f


def on_one_axis(*args: Any) -> list[Any]:
    """Arguments that are whole on the devices of a mesh with one axis."""
    flat = Mesh(np.array(DEVICES[8:]), ("devices",))
    return [placed(flat, arg.shape, P()) for arg in args]


def replicated(x: jax.Array, scale: int, w: jax.Array) -> jax.Array:
    return jax.lax.pmean(x @ w, "i") * scale


def pmapped(devices: Any) -> Any:
    return jax.pmap(
        replicated,
        axis_name="i",
        in_axes=(0, None, None),
        static_broadcasted_argnums=1,
        donate_argnums=2,
        devices=devices,
    )


def outer(devices: Any) -> Callable[..., Any]:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return pmapped(devices)(x, 3, w)

    return f


def of_module(folder: Path) -> tuple[Any, Any]:
    """A function of a module that can be imported and has a mesh among its globals, here and there."""
    text = (
        "import jax\nimport jax.numpy as jnp\nfrom jax.sharding import NamedSharding\n"
        "from tests.forecasting.mesh_child import {0} as mesh\nfrom tests.forecasting.mesh_child import XS\n"
        "def f(x, w):\n    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, XS)) @ w\n"
    )
    sys.path.insert(0, str(folder))
    for name, mesh in (("of_here", "HERE"), ("of_there", "THERE")):
        (folder / f"{name}.py").write_text(text.format(mesh))
    here, there = (importlib.import_module(name) for name in ("of_here", "of_there"))
    return here.f, there.f


Cases = dict[str, tuple[str, str]]
"""The programs of a forecast and of the oracle, by case."""


def of_functions(folder: Path) -> Cases:
    """Functions that refer to a mesh, wherever they hold it."""
    same = AbstractMesh((4, 2), NAMES, axis_types=(AxisType.Auto,) * 2)
    plain = oracle(mapped(THERE), X, W)
    here, there = of_module(folder)
    mine, theirs = Nnx(HERE), Nnx(THERE)
    equinox, his = Equinox(jnp.ones(W.shape), HERE), Equinox(jnp.ones(W.shape), THERE)
    state = jax.eval_shape(Linen(HERE).init, jax.random.key(0), jnp.zeros(X.shape))
    jitted = oracle(by_jit(THERE), placed(THERE, X.shape, XS), placed(THERE, W.shape, WS))
    method = Trainer.jitted.trace(Trainer(THERE), whole(X), whole(W))
    return {
        "shard_map": (forecast_text(mapped(HERE), X, W), plain),
        "old shard_map": (
            forecast_text(mapped(HERE, old_shard_map), X, W),
            oracle(mapped(THERE, old_shard_map), X, W),
        ),
        "abstract mesh": (forecast_text(mapped(same), X, W), plain),
        "constraint": (forecast_text(constrained(HERE), X, W), oracle(constrained(THERE), X, W)),
        "abstract constraint": (
            forecast_text(constrained(same), X, W),
            oracle(constrained(THERE), X, W),
        ),
        "device_put": (forecast_text(put(HERE), X, W), oracle(put(THERE), X, W)),
        "shardings of jit": (forecast_text(by_jit(HERE), X, W), jitted),
        "partial": (
            forecast_text(partial(lambda m, x, w: mapped(m)(x, w), HERE), X, W),
            oracle(partial(lambda m, x, w: mapped(m)(x, w), THERE), X, W),
        ),
        "instance": (forecast_text(Trainer(HERE), X, W), oracle(Trainer(THERE), X, W)),
        "method": (forecast_text(Trainer(HERE).step, X, W), oracle(Trainer(THERE).step, X, W)),
        "jitted method": (forecast_text(Trainer(HERE).jitted, X, W), program_text(method)),
        "module": (forecast_text(here, X, W), oracle(there, X, W)),
        "linen": (forecast_text(Linen(HERE).apply, state, X), oracle(Linen(THERE).apply, state, X)),
        "nnx": (forecast_text(mine, X), oracle(theirs, X)),
        "equinox": (forecast_text(equinox, X), oracle(lambda x: his(x), X)),
    }


def of_calls() -> Cases:
    """Arguments, meshes that are made inside, several of them, and ``jax.pmap``."""
    plain = oracle(mapped(THERE), X, W)
    rows = jax.ShapeDtypeStruct((8, 4, 32), jnp.float32)
    few = Mesh(np.array(DEVICES[:1]).reshape(1, 1), NAMES)
    sharded = jax.device_put(np.ones(W.shape, np.float32), NamedSharding(HERE, WS))
    return {
        "arguments": (
            forecast_text(jnp.matmul, placed(HERE, X.shape, XS), placed(HERE, W.shape, WS)),
            oracle(jnp.matmul, placed(THERE, X.shape, XS), placed(THERE, W.shape, WS)),
        ),
        "memory of arguments": (
            forecast_text(jnp.sin, placed(HERE, X.shape, XS, memory_kind="pinned_host")),
            oracle(jnp.sin, placed(THERE, X.shape, XS, memory_kind="pinned_host")),
        ),
        "explicit axes": (forecast_text(*explicit(HERE)), oracle(*explicit(THERE))),
        "made inside": (forecast_text(inside, X, W), plain),
        "of jax.devices": (
            forecast_text(beside, X, W),
            oracle(mapped(THERE), *on_one_axis(X, W)),
        ),
        "two meshes": (forecast_text(two(HERE), X, W), oracle(two(THERE), X, W)),
        "closed-over array": (
            forecast_text(constant(HERE, sharded), X),
            oracle(constant(THERE, np.ones(W.shape, np.float32)), X),
        ),
        "mesh as spread": (
            forecast_text(bare, X, W, spread=HERE),
            oracle(constrained(THERE), X, W),
        ),
        "sizes of spread": (
            forecast_text(mapped(few), X, W, spread={"data": 4, "model": 2}),
            plain,
        ),
        "pmap": (
            forecast_text(pmapped(None), rows, 3, W),
            program_text_of_pmap(pmapped(DEVICES[8:]), rows, 3, W),
        ),
        "pmap inside": (
            forecast_text(outer(None), rows, W),
            oracle(outer(DEVICES[8:]), *on_one_axis(rows, W)),
        ),
    }


def of_axes() -> Cases:
    """Meshes whose axes are the program's in another place, order or type."""
    plain = oracle(mapped(THERE), X, W)
    one = Mesh(np.array(DEVICES[:1]), ("data",))
    return {
        "abstract, made inside": (forecast_text(abstract_inside, X, W), plain),
        "abstract, made inside, with sizes": (
            forecast_text(abstract_inside, X, W, spread={"data": 4, "model": 2}),
            plain,
        ),
        "axes of spread in another order": (
            forecast_text(mapped(abstract()), X, W, spread={"model": 2, "data": 4}),
            plain,
        ),
        "axes in two orders": (
            forecast_text(both_orders(abstract(), abstract((2, 4), NAMES[::-1])), X, W),
            oracle(both_orders(THERE, Mesh(THERE.devices.reshape(2, 4), NAMES[::-1])), X, W),
        ),
        "one axis of two": (
            forecast_text(
                partial(lambda m, x, w: constrained(m)(x, w), one),
                X,
                W,
                spread={"data": 4, "model": 2},
            ),
            oracle(constrained(THERE), X, W),
        ),
        "explicit axes out of context": (forecast_text(*by_spec(HERE)), in_context(THERE)),
    }


def of_orders() -> dict[str, tuple[Any, Any]]:
    """Numbers of the devices of meshes that their users arranged, and whether a note says so."""
    found: dict[str, tuple[Any, Any]] = {}
    ranks = np.array([0, 7, 3, 4, 1, 6, 2, 5]).reshape(4, 2)
    own = Mesh(HERE.devices.ravel()[ranks], NAMES)
    swapped = Mesh(HERE.devices.reshape(2, 4).T, NAMES)
    for name, function, spread, wanted in (
        ("own order", mapped(own), None, ranks),
        ("own order as spread", bare, own, ranks),
        ("swapped axes", mapped(swapped), None, np.arange(8).reshape(2, 4).T),
        ("ascending", mapped(HERE), None, np.arange(8).reshape(4, 2)),
    ):
        made = function_program(function, (X, W), {}, ON, Spread(mesh=spread))
        traced = made.trace(ON, DEVICES[8:])
        numbers = [device.id - 8 for device in traced.mesh.devices.flat]
        notes = [note for note in traced.facts.notes if "0, 7, 3, 4, 1, 6, 2, 5" in note]
        found[name] = ((numbers, len(notes)), (wanted.ravel().tolist(), wanted is ranks))
    return found


def refusals() -> dict[str, tuple[Any, Any]]:
    """Reasons of meshes that are not the slice's, where only the trace shows them."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return mapped(abstract((2, 2)))(x, w)

    def g(x: jax.Array, w: jax.Array) -> jax.Array:
        return mapped(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), NAMES))(x, w)

    told = "uses a mesh of 4 devices (data 2 x model 2) and v5e-8 has 8; make it of 8, or forecast it for a slice of 4"
    no_axis = "bare has P('data', 'model') and no mesh with an axis data; give the sizes of its axes, such as spread={\"data\": 8}"
    return {
        "abstract of four inside": (refusal(f), f"f {told}"),
        "four devices inside": (refusal(g), f"g {told}"),
        "no mesh": (refusal(bare), no_axis),
    }


def refusal(function: Any) -> str:
    try:
        forecast_text(function, X, W)
    except OptionError as error:
        return str(error)
    return "none"


def of_contexts() -> Cases:
    """A mesh that JAX has set."""
    found: Cases = {}
    with jax.set_mesh(HERE):
        forecast = forecast_text(bare, X, W)
    with jax.set_mesh(THERE):
        found["jax.set_mesh"] = (forecast, oracle(bare, X, W))
    with warnings.catch_warnings(action="ignore"):
        with HERE:
            forecast = forecast_text(bare, X, W)
        with THERE:
            found["with mesh"] = (forecast, oracle(bare, X, W))
    return found


def program_text_of_pmap(function: Any, *args: Any) -> str:
    """The program of ``jax.pmap`` as JAX lowers it."""
    return unnamed(function.lower(*args).as_text())


def main(folder: Path) -> None:
    found = {
        **of_functions(folder),
        **of_calls(),
        **of_axes(),
        **of_contexts(),
        **of_orders(),
        **refusals(),
    }
    print(json.dumps({name: made == wanted for name, (made, wanted) in found.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
