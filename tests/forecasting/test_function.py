"""``systolic.forecast`` of anyone's function: arguments as they come, mistakes in one line."""

import dataclasses
import enum
import functools
import inspect
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compute_on import compute_on
from jax.sharding import PartitionSpec as P

import systolic
from systolic import Spread
from systolic.chips import slice
from systolic.compiling.child import _told
from systolic.core.errors import OptionError
from systolic.core.reporter import Reporter, reporting
from systolic.forecasting import function as forecasting_function
from systolic.forecasting.costs import by_op
from systolic.forecasting.function import _flags, function_program
from systolic.sim.timeline import PricedBy
from tests.devices import virtual_devices

ON = slice("v5e-4")
ROOT = Path(__file__).parents[2]


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
    assert _flags("") == _flags("none") == _flags(["none"]) == ()
    assert _flags("none --xla_a=1") == ("--xla_a=1",)
    with pytest.raises(OptionError, match="'xla_a=1' is no flag of the compiler; write --name="):
        _flags("xla_a=1")


def test_what_jit_alone_can_say_is_refused_of_a_jitted_function() -> None:
    for how in (Spread(out_specs=P()), Spread(donate_argnums=(0,))):
        with pytest.raises(OptionError, match="apply is jitted already, so Spread"):
            function_program(jax.jit(apply), (PARAMS, X), {}, ON, how)


def test_keywords_that_the_function_lacks_are_refused_with_the_option_that_is_meant() -> None:
    with pytest.raises(
        OptionError, match=r"apply takes no argument mesh; .* spread=systolic.Spread\(mesh=…\)"
    ):
        systolic.forecast(apply, PARAMS, X, on=ON, mesh={"data": 4})
    with pytest.raises(OptionError, match=r"spread=systolic.Spread\(in_specs=…\)"):
        systolic.forecast(jax.jit(apply), PARAMS, X, on=ON, in_specs=(P(), P("data")))
    with pytest.raises(OptionError, match="takes no argument qick; did you mean quick"):
        systolic.forecast(apply, PARAMS, X, on=ON, qick=True)


def put(cache: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    return jax.jit(lambda c, times: c * times, static_argnums=1)(cache, 1).at[rows].set(new)


@pytest.mark.slow
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


def test_a_jit_for_one_device_is_refused_on_several(cache: Path) -> None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    told = "apply is jitted for a single device and v5e-4 has 4; give in_shardings over a mesh of 4"
    with pytest.raises(OptionError, match=told):
        systolic.forecast(jax.jit(apply, in_shardings=here), PARAMS, X, on=ON, quick=True)


def run_child(name: str, devices: int, *args: str) -> Any:
    """What a script of this folder prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.forecasting.{name}", *args],
        cwd=ROOT,
        env=virtual_devices(devices),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_meshes_of_this_machine_stand_for_the_slices(tmp_path: Path) -> None:
    found = run_child("mesh_child", 16, str(tmp_path))
    assert len(found) == 41
    assert [name for name, same in found.items() if not same] == []


def test_a_script_with_its_mesh_is_forecast_as_with_the_slices(cache: Path) -> None:
    pytest.importorskip("libtpu")
    mine, slices = run_child("script_child", 4)
    assert mine == slices
    layout, seconds, memory = mine
    assert layout == {"data": 2, "model": 2}
    # Weights and both moments of Adam, f32, once and whole on every device: 256 x 512 twice.
    assert memory["peak_bytes"] > 3 * 2 * 4 * 256 * 512
    assert seconds > 3 * 2 * 2 * 4 * 256 * 512 / 819e9  # read and written


def small_mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def test_a_mesh_of_another_size_says_which_is_needed() -> None:
    mesh = small_mesh()

    def f(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, P("data")))

    with pytest.raises(OptionError) as raised:
        function_program(f, (X,), {}, ON, Spread())
    assert str(raised.value) == (
        "f has a mesh of 1 device (data 1 x model 1) but v5e-4 has 4; make it of 4 virtual devices"
        " (jax.config.update('jax_num_cpu_devices', 4) before JAX starts), or give its sizes there"
        ' as spread={"data": …, "model": …}'
    )
    spread = Spread(mesh={"data": 2, "model": 2})
    assert function_program(f, (X,), {}, ON, spread).mesh == {"data": 2, "model": 2}
    with pytest.raises(OptionError, match="spread is 4; it takes axis names with sizes"):
        function_program(f, (X,), {}, ON, Spread(mesh=4))


def test_what_cannot_travel_and_large_constants_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, weights = threading.Lock(), np.zeros((2048, 4096), np.float32)

    def locked(x: jax.Array) -> jax.Array:
        with lock:
            return x

    def constant(x: jax.Array) -> jax.Array:
        return x @ weights

    told = "locked refers to something that cannot be sent to the process that compiles"
    with pytest.raises(OptionError, match=told):
        function_program(locked, (X,), {}, ON, Spread())
    (note,) = function_program(constant, (array(64, 2048),), {}, ON, Spread()).notes
    assert "constant refers to 32.0 MiB of arrays" in note
    monkeypatch.setattr(forecasting_function, "MOST_CONSTANT_BYTES", 2**24)
    with pytest.raises(OptionError, match=r"and the limit is 16\.0 MiB; pass them as arguments"):
        function_program(constant, (array(64, 2048),), {}, ON, Spread())


def test_a_pmap_over_fewer_rows_than_devices_is_refused() -> None:
    program = function_program(jax.pmap(jnp.sin), (array(3, 8),), {}, slice("v5e-1"), Spread())
    with pytest.raises(
        OptionError, match=r"sin is a jax\.pmap over 3 rows and the slice has 1 dev"
    ):
        program.trace(slice("v5e-1"), jax.devices()[:1])


ONE = slice("v5e-1")


def traced(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function as the child traces it, for a slice of one device."""
    program = function_program(function, args, kwargs, ONE, Spread())
    return program.trace(ONE, jax.devices()[:1])


class Mode(enum.Enum):
    double = "double"


def scaled(x: jax.Array, mode: Any, act: Any = None, *, times: int = 1) -> jax.Array:
    x = x.reshape(times, -1) * (2 if mode is Mode.double else 1)
    return x if act is None else act(x)


def test_what_no_array_holds_is_a_constant_of_a_plain_function() -> None:
    made = traced(scaled, array(8), Mode.double, jnp.tanh, times=1)
    (argument,) = made.traced.jaxpr.in_avals
    assert argument.shape == (8,)
    assert {"mul", "tanh"} <= {one.primitive.name for one in made.traced.jaxpr.jaxpr.eqns}
    # A number is an argument, until the function decides by it.
    assert len(traced(lambda x, n: x * n, array(8), 3).traced.jaxpr.in_avals) == 2
    assert "numbers of Python among the arguments are constants" in made.facts.notes[0]
    shape = traced(lambda x, n: x.reshape(n, -1), array(8), 2).traced.jaxpr.out_avals[0].shape
    assert shape == (2, 4)


def test_the_memory_of_an_argument_reaches_the_program() -> None:
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    there = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=host)
    (info,) = jax.tree.leaves(traced(jnp.sin, there).traced.in_avals)
    assert str(info.memory_space) == "MemorySpace.Host"


@functools.lru_cache
def doubled(n: int) -> int:
    return 2 * n


def on_the_host(computed: Any) -> Any:
    """As JAX has it: a context manager up to 0.11, then a function that also says where its results lie."""
    if "out_memory_spaces" not in inspect.signature(compute_on).parameters:
        return compute_on("device_host")(computed)
    space = jax.memory.Space.Device
    return compute_on(computed, compute_type="device_host", out_memory_spaces=space)


def test_caches_managers_and_exported_programs_travel() -> None:
    @functools.lru_cache(maxsize=2)
    def cached(n: int) -> int:
        return doubled(n)

    @jax.named_scope("mine")
    def named(x: jax.Array) -> jax.Array:
        return x * cached(3)

    @on_the_host
    @jax.jit
    def on_host(x: jax.Array) -> jax.Array:
        return x + 1

    exported = jax.export.export(jax.jit(jnp.sin), platforms=["cpu"])(array(8))
    found = traced(lambda x: on_host(named(x)), array(8)).traced.lower().as_text()
    assert '_xla_compute_type = "host"' in found
    assert "call_exported" in str(traced(exported.call, array(8)).traced.jaxpr)


def test_a_module_of_nnx_under_its_own_jit_is_traced() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    made = traced(nnx.jit(lambda model, x: model(x)), model, array(2, 8))
    assert made.traced.lower().as_text().count("dot_general") == 1


@dataclasses.dataclass
class Unregistered:
    w: Any


REFUSED = [
    ((apply, Unregistered(X), X), "an argument is a Unregistered, which holds arrays and is no py"),
    (
        (jnp.sin, jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32)),
        "an argument has the shape (b, 4), with a size that is no number; give the number",
    ),
    (
        (jax.jit(jnp.sin).lower(X), X),
        "a jax.stages.Lowered is given, which is made for the devices",
    ),
    ((jax.jit(jnp.sin).trace(X), X), "a jax.stages.Traced is given, which is made for the devices"),
    (
        (
            jnp.sin,
            jax.ShapeDtypeStruct(
                (8,),
                jnp.float32,
                sharding=jax.sharding.NamedSharding(
                    jax.make_mesh((1,), ("x",)), P(), memory_kind="unpinned_host"
                ),
            ),
        ),
        "an argument is in unpinned_host memory, and programs of a TPU take device or pinned_host",
    ),
]


@pytest.mark.parametrize(("given", "told"), REFUSED)
def test_what_no_program_can_be_made_of_is_one_line(given: Any, told: str) -> None:
    function, *args = given
    with pytest.raises(OptionError) as raised:
        systolic.forecast(function, *args, on=ONE, quick=True)
    assert str(raised.value).startswith(told)
    assert "\n" not in str(raised.value)


def test_errors_of_jax_are_told_without_addresses_and_never_empty() -> None:
    with pytest.raises(TypeError, match=" at 0x") as raised:
        traced(jax.jit(lambda x: x), "text")
    assert " at 0x" not in _told(raised.value)
    with pytest.raises(AssertionError) as empty:
        raise AssertionError
    assert _told(empty.value).startswith("AssertionError: raised without a text in ")
    unknown = "MLIR translation rule for primitive 'eig' not found for platform tpu"
    told = _told(NotImplementedError(unknown))
    assert told == f"JAX has no implementation of eig for tpu ({unknown})"


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
    assert made.compiler.flags == [flag]
    assert made.answer is not None
    assert "schedule_only" in made.answer.report.options
    assert made.fits
    # Python has all that the command line prints.
    record = made.to_json()
    assert made.timeline is not None
    assert [op["op"] for op in record["top_ops"]] == [cost.name for cost in by_op(made.timeline)]
    assert sum(record["time_by_layer"].values()) <= made.timeline.seconds * (1 + 1e-9)


@pytest.mark.slow
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
    memory = made.answer.report.memory
    assert memory.argument_size_in_bytes == weights + 4 * 64 * 32
    assert memory.alias_size_in_bytes == weights


class Stages(Reporter):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.stages: list[str] = []

    def begin(self, title: str) -> None:
        self.titles.append(title)

    def stage(self, text: str) -> None:
        self.stages.append(text)


def test_python_is_silent_and_reports_stages_to_a_reporter(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    systolic.forecast(jnp.sin, X, on="cpu")
    with reporting(Stages()) as told:
        systolic.forecast(jnp.cos, X, on="cpu")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert isinstance(told, Stages)
    assert told.titles == ["cos for cpu"]
    assert "compiling" in told.stages or "found" in told.stages


def test_a_function_keeps_arguments_with_the_names_of_options(cache: Path) -> None:
    def scaled(x: jax.Array, *, step: jax.Array, save: jax.Array) -> jax.Array:
        return x * step + save

    made = systolic.forecast(scaled, X, step=jnp.float32(2), save=jnp.float32(1), on="cpu")
    assert made.recipe == "scaled"
    assert made.request.to_json() == {}


def test_what_partition_leaves_is_an_argument(cache: Path) -> None:
    model = eqx.filter_eval_shape(eqx.nn.MLP, 32, 16, 64, 1, key=jax.random.key(0))
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def call(arrays: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(arrays, static))(x)

    program = function_program(
        call, (arrays, X), {}, ON, Spread(mesh={"data": 4}, in_specs=(P(), P("data")))
    )
    assert program.specs == (P(), P(), P(), P(), P("data"))


def test_a_module_that_forecasts_when_it_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import jax, systolic\n\n\n"
        "def double(x):\n    return x * 2\n\n\n"
        "systolic.forecast(double, jax.ShapeDtypeStruct((8, 128), 'float32'), on='v5e-1', quick=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import mine"],
        cwd=tmp_path,
        env={**os.environ, "SYSTOLIC_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode
    assert "forecasts when it is imported; put those lines below if __name__ ==" in done.stderr


def test_gathers_on_one_sparse_core_go_at_its_rate() -> None:
    """Of 8 x 12.6 MB of weights 88.1 MB come from others: at 88 GB/s on v6e, where TensorCores have two directions of links."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 4096), (4096, 12288)))
    whole = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
    offload = "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true"
    seconds = {}
    for flags in ((whole,), (whole, offload)):
        made = systolic.forecast(
            lambda x, w: x @ w,
            x,
            w,
            on="v6e:2x4",
            spread=Spread(mesh={"fsdp": 8}, in_specs=(P("fsdp"), P("fsdp"))),
            flags=flags,
            quick=True,
        )
        assert made.timeline is not None
        (gather,) = [s for s, _ in made.timeline.leaves() if s.opcode == "all-gather"]
        assert gather.bytes == 7 / 8 * 4096 * 12288 * 2
        seconds[flags] = gather.seconds
    on_core, beside = seconds.values()
    assert on_core == pytest.approx(88_080_384 / (2 * 86.8e9), rel=0.05)
    assert beside == pytest.approx(88_080_384 / 88e9)


def test_a_gather_that_the_compiler_calls_on_sparse_cores_has_the_range_of_its_rule() -> None:
    """TPU7x's compiler begins a call there, whose computation holds the gather."""
    made = systolic.forecast(
        lambda table, rows: table[rows],
        array(1 << 20),
        jax.ShapeDtypeStruct((16384,), jnp.int32),
        on="tpu7x-8",
        quick=True,
    )
    (span,) = (span for span in made.timeline.spans if span.lane == "sparse")
    (wait,) = (span for span in made.timeline.spans if span.opcode == "wait async-start")
    # 16,384 granules of 32 bytes and as many f32 that come out, at 3.69 TB/s of a core; copies reach 1 / 1.1 of it.
    least = 16384 * (32 + 4) / 3.69e12
    assert span.priced_by is PricedBy.gather
    assert (span.low, span.high) == pytest.approx((least, 2 * 1.1 * least))
    assert (wait.low, wait.high) == pytest.approx((span.low, span.high))
    assert span.seconds == pytest.approx(1.1 * least)
    assert made.timeline.by_rule[0] == pytest.approx(span.seconds)
    assert any("the compiler has no cycles for them: gather" in note for note in made.notes)
