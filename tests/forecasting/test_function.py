"""``systolic.forecast`` of anyone's function: arguments as they come, mistakes in one line."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import systolic
from systolic import Spread
from systolic.chips import slice
from systolic.core.errors import OptionError
from systolic.forecasting.costs import by_op
from systolic.forecasting.function import _flags, function_program

ON = slice("v5e-4")


def apply(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w"])


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"w": array(32, 16), "frozen": None}
X = array(64, 32)


def specs(in_specs: Any, *args: Any) -> tuple[Any, ...]:
    how = Spread(mesh={"data": 4}, in_specs=in_specs)
    return function_program(apply, args or (PARAMS, X), {}, ON, how).specs


def test_a_spec_reaches_the_leaves_of_its_argument() -> None:
    assert specs((None, P("data"))) == (None, P("data"))
    assert specs((P(), P("data"))) == (P(), P("data"))
    assert specs(({"w": P("data"), "frozen": None}, P())) == (P("data"), P())
    assert specs(P("data")) == (P("data"), P("data"))
    # None in an argument is no leaf, whatever stands in its place in the specs.
    deep = {"a": None, "b": [X, None, X]}
    assert specs(({"a": P(), "b": P("data")}, None), deep, X) == (P("data"), P("data"), None)


MISTAKES = [
    ((P(),), "in_specs has 1 entries and the function 2 positional arguments; give one for each"),
    ((P(), P(), P()), "in_specs has 3 entries and the function 2 positional"),
    (({"v": P()}, P()), "in_specs[0] is not of the form of argument 0 ("),
    ((P("rows"), P()), "names the axis rows; the mesh has data: choose one of these"),
    ((P(), "data"), "in_specs holds 'data'; give a PartitionSpec or None"),
]


@pytest.mark.parametrize(("given", "told"), MISTAKES)
def test_mistakes_in_specs_are_one_line(given: Any, told: str) -> None:
    with pytest.raises(OptionError) as raised:
        specs(given)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_flags_are_a_list_or_one_text() -> None:
    assert _flags("--xla_a=1 --xla_b='2 3'") == ("--xla_a=1", "--xla_b=2 3")
    assert _flags(["--xla_a=1"]) == ("--xla_a=1",)
    assert _flags("") == ()
    with pytest.raises(OptionError, match="'xla_a=1' is no flag of the compiler; write --name="):
        _flags("xla_a=1")


def test_what_jit_alone_can_say_is_refused_of_a_jitted_function() -> None:
    for how in (Spread(out_specs=P()), Spread(donate_argnums=(0,))):
        with pytest.raises(OptionError, match="apply is jitted already, so Spread"):
            function_program(jax.jit(apply), (PARAMS, X), {}, ON, how)


def put(cache: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    return jax.jit(lambda c, times: c * times, static_argnums=1)(cache, 1).at[rows].set(new)


def test_a_jitted_function_reaches_the_child_with_what_jit_was_told(cache: Path) -> None:
    pytest.importorskip("libtpu")
    arguments = (
        jax.ShapeDtypeStruct((131072, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
        jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16),
    )
    seconds = [
        systolic.forecast(
            jax.jit(put, donate_argnums=d), *arguments, on="v5e-1", quick=True
        ).step_seconds
        for d in ((0,), ())
    ]
    assert seconds[0] < 5e-6  # eight rows
    assert seconds[1] > 2 * 2**30 / 819e9  # and here the whole cache, read and written


def test_shardings_of_this_machine_are_refused(cache: Path) -> None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(OptionError, match="apply is jitted with shardings"):
        systolic.forecast(jax.jit(apply, in_shardings=here), PARAMS, X, on=ON, quick=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SYSTOLIC_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("given", [3, None, [3], ["--xla_a=1", None], b"--xla_a=1", {"a": 1}])
def test_flags_of_another_type_are_one_line(given: Any) -> None:
    with pytest.raises(OptionError) as raised:
        systolic.forecast(apply, PARAMS, X, on=ON, spread={"data": 4}, flags=given)
    assert str(raised.value) == (
        f"flags is {given!r}; it takes --name=value, a list of them or one text with spaces between"
    )


def test_flags_and_quick_reach_the_compiler(cache: Path) -> None:
    pytest.importorskip("libtpu")
    flag = "--xla_tpu_scoped_vmem_limit_kib=8192"
    made = systolic.forecast(apply, PARAMS, X, on=ON, spread={"data": 4}, flags=flag, quick=True)
    assert made.compiler["flags"] == [flag]
    assert made.answer is not None
    assert "schedule_only" in made.answer.report["options"]
    assert made.fits
    # Python has all that the command line prints.
    record = made.to_json()
    assert made.timeline is not None
    assert [op["op"] for op in record["top_ops"]] == [cost.name for cost in by_op(made.timeline)]
    assert sum(record["time_by_layer"].values()) <= made.timeline.seconds * (1 + 1e-9)


def test_a_filter_jit_object_is_a_function_as_any_other(cache: Path) -> None:
    @eqx.filter_jit(donate="all-except-first")
    def step(x: jax.Array, model: Any, name: str, scale: float = 2.0) -> tuple[Any, jax.Array]:
        assert name == "static"
        made = jax.vmap(model)(x) * scale
        grown = jax.tree.map(lambda w: w + 1 if eqx.is_array(w) else w, model)
        return grown, made

    model = eqx.filter_eval_shape(eqx.nn.MLP, 32, 16, 64, 1, key=jax.random.key(0))
    made = systolic.forecast(
        step, X, model, "static", on="cpu", spread=Spread(in_specs=(P("devices"), None, None))
    )
    assert made.recipe == "step"
    assert made.answer is not None
    # The weights are arguments, not constants, and their memory is taken by the result.
    weights = 4 * (32 * 64 + 64 + 64 * 16 + 16)
    memory = made.answer.report["memory"]
    assert memory["argument_size_in_bytes"] == weights + 4 * 64 * 32
    assert memory["alias_size_in_bytes"] == weights


def test_what_partition_leaves_is_an_argument(cache: Path) -> None:
    model = eqx.filter_eval_shape(eqx.nn.MLP, 32, 16, 64, 1, key=jax.random.key(0))
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def call(arrays: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(arrays, static))(x)

    program = function_program(
        call, (arrays, X), {}, ON, Spread(mesh={"data": 4}, in_specs=(P(), P("data")))
    )
    assert program.specs == (P(), P(), P(), P(), P("data"))
