"""Which calls are one program, what lies between them, and what is beside the step; with the real compiler."""

import builtins
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.capture import capture
from systolic.chips import slice
from systolic.core.errors import OptionError, RunError
from systolic.forecasting import Forecast, forecast_text
from systolic.forecasting.captured import forecast_captured
from systolic.forecasting.memory import HELD
from systolic.sim.incomplete import given

pytestmark = pytest.mark.usefixtures("forked_programs")

PROGRAMS = Path(__file__).parent / "programs"
HOOK = Path(__file__).parents[2] / "src/systolic/capture/hook"
HOOKED = "systolic_capture"
MIB, GIB = 1 << 20, 1 << 30


def captured_of(program: str, on: str, folder: Path, *words: str, step: str = ""):
    """A captured program of the tests."""
    made = folder / "answer"
    made.mkdir()
    script = shutil.copy(PROGRAMS / program, folder / program)
    command = [sys.executable, str(script), *words]
    return capture(command, slice(on), made, quick=True, step=step)


def forecast_of(program: str, on: str, folder: Path, *words: str, step: str = "") -> Forecast:
    """The forecast of one."""
    return forecast_captured(captured_of(program, on, folder, *words, step=step), slice(on))


def told(made: Forecast, words: str) -> str:
    """The one line of a forecast's cautions that has some words."""
    (line,) = (line for line in made.cautions if words in line)
    return line


def test_a_method_with_two_lengths_and_arrays_that_are_moved(tmp_path: Path) -> None:
    made = forecast_of("bodies.py", "v5e-8", tmp_path)
    assert made.recipe == "block + block"
    # By hand: one layer and eight, whole on each device; and no matmul runs faster than the peak.
    flops = 9 * 2 * 2048**3
    assert made.hardware_flops == pytest.approx(flops, rel=0.01)
    # float32 moments to each device and back; a device has an eighth of the bfloat16 weights and gets the rest.
    moved = {span.resource.value: span for span in made.timeline.spans if span.name == "device_put"}
    assert moved["host"].bytes == 2 * 16 * MIB
    assert moved["ici"].bytes == 7 * MIB
    assert moved["ici"].seconds == pytest.approx(7 * MIB / (2 * 45e9), rel=0.2)
    in_order = sum(span.seconds for span in moved.values())
    assert made.step_seconds > flops / 197e12 + in_order
    assert sum(made.time_by_resource.values()) == pytest.approx(made.step_seconds)
    line = told(made, "device_put outside of jit")
    assert "3 times a step, 32.0 MiB between device and host, 7.0 MiB between devices" in line
    # 64 arrays of half a MiB that jnp made, and the whole weights that one block has and the other's values.
    assert made.memory.by_kind[HELD] >= 32 * MIB


def test_layers_after_a_buffer_was_filled(tmp_path: Path) -> None:
    captured = captured_of("layers.py", "v5e-1", tmp_path)
    calls = {one.name: one.calls_per_step for one in captured.programs}
    assert calls == {"layer": 48, "head": 1}
    made = forecast_captured(captured, slice("v5e-1"))
    assert made.hardware_flops == pytest.approx((48 + 4) * 2 * 256 * 1024**2, rel=0.01)


def test_loops_and_branches_outside_of_jit(tmp_path: Path) -> None:
    captured = captured_of("loops.py", "v5e-1", tmp_path)
    calls = [one.name for one in captured.programs]
    assert calls == ["train_step", "body", "larger", "part", "checked_fun", "average"]
    made = forecast_captured(captured, slice("v5e-1"))
    # By hand: a hundred steps of two matmuls of 256 rows, three trips of one, and three beside.
    flops = 100 * 2 * 2 * 256 * 512**2 + (3 + 3) * 2 * 512**3
    assert made.hardware_flops == pytest.approx(flops, rel=0.01)
    assert made.step_seconds is not None
    assert made.step_seconds > flops / 197e12


@pytest.mark.parametrize("where", ["device", "mesh"])
def test_arrays_in_the_memory_of_the_host(tmp_path: Path, where: str) -> None:
    captured = captured_of("offloading.py", "v5e-1", tmp_path, where)
    assert [one.calls_per_step for one in captured.programs] == [1, 1]
    made = forecast_captured(captured, slice("v5e-1"))
    assert made.recipe == "step + activation"
    # By hand: the slope, and beside it weights and batch; the kept activations and the moment take none of the device.
    assert made.memory.by_kind["inputs"] == 4 * MIB
    assert made.memory.by_kind[HELD] == 4 * MIB + MIB // 2


def test_results_lie_where_jax_puts_them(tmp_path: Path) -> None:
    real, here = tmp_path / "real.json", tmp_path / "here.json"
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, str(PROGRAMS / "results.py"), str(real)]
    subprocess.run(command, env={**os.environ, **flags}, check=True)
    made = forecast_of("results.py", "v5e-8", tmp_path, str(here))
    expected, captured = (json.loads(path.read_text()) for path in (real, here))
    differ = {name: captured[name] for name in expected if captured[name] != expected[name]}
    assert differ == {}
    # By hand: the first table beside the one that a step takes and the copy that it gives back.
    assert made.memory.by_kind[HELD] == 4 * MIB + MIB // 4
    assert not any("guess" in line for line in made.cautions)


def test_lambdas_have_the_names_of_their_lines(tmp_path: Path) -> None:
    made = forecast_of("lambdas.py", "v5e-8", tmp_path)
    assert made.recipe == "lambda at lambdas.py:9 + lambda at lambdas.py:10"
    # By hand: the product and its slope, of a device's rows.
    assert made.hardware_flops == pytest.approx(2 * 2 * 256 * 1024**2, rel=0.01)


def main_of(module) -> str:
    """Text of a module's main function, which comes first."""
    return str(module).partition("func.func private")[0]


def test_functions_are_put_in_place_of_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for jaxlib 0.5, whose own pass leaves all calls: one function twice, one in another, one in a loop."""
    monkeypatch.syspath_prepend(str(HOOK))
    shardings = importlib.import_module(f"{HOOKED}.shardings")

    @jax.jit
    def positive(x):
        return jnp.where(x > 0, x, 0)

    @jax.jit
    def outer(x):
        return positive(x) + 1

    def function(x, w):
        y = positive(outer(x) @ w)
        return jax.lax.fori_loop(0, 3, lambda _, y: positive(y @ w), y), y

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    module = jax.jit(function).lower(x, x).compiler_ir()
    with module.context:
        copy = module.operation.clone()
        calls, main = (main_of(copy), shardings._inline(copy), main_of(copy))[::2]
        assert copy.verify()
    assert calls.count("call @") >= 3
    assert "call @" not in main
    # By hand: 'positive' in 'outer', after the product and in the loop, each a comparison.
    assert main.count("GT,") == 3


def test_a_donated_array_is_refused_as_jax_does(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        captured_of("deleted.py", "v5e-1", tmp_path)
    text = str(error.value)
    assert "RuntimeError: Array has been deleted with shape=float32[1024,1024]" in text
    assert "fault of the capture" not in text


def test_batches_of_several_lengths(tmp_path: Path) -> None:
    made = forecast_of("lengths.py", "v5e-1", tmp_path)
    line = told(made, "kinds of arguments")
    # By hand: nine calls of 4096 rows and twelve of 256.
    mean = (9 * 4096 + 12 * 256) / 21 / 256
    assert "the step is of one of them, 12 of 21 calls" in line
    assert f"its mean call is {mean:.3g} times this one" in line


def test_a_named_step_after_a_small_first_call(tmp_path: Path) -> None:
    made = forecast_of("lengths.py", "v5e-1", tmp_path, "first", step="step")
    assert made.hardware_flops == pytest.approx(2 * 2 * 4096 * 1024**2, rel=0.01)
    assert not any("kinds of arguments" in line for line in made.cautions)


def test_a_named_step_that_comes_with_some_steps_alone(tmp_path: Path) -> None:
    captured = captured_of("evaluating.py", "v5e-1", tmp_path, step="eval_step")
    made = forecast_captured(captured, slice("v5e-1"))
    (program,) = captured.programs
    assert (program.name, program.calls_per_step) == ("eval_step", 1)
    alone = forecast_text(captured.folder / program.text, slice("v5e-1"))
    # What the steps between two of its calls read is none of it.
    assert made.step_seconds == pytest.approx(alone.step_seconds)
    assert made.hardware_flops == pytest.approx(2 * 2 * 2048 * 1024 * 1024, rel=0.01)
    line = told(made, "the step is one call of eval_step, as --step says")
    assert "2 beside 5 of average, 5 of train_step, 14 % " in line


def test_each_process_on_its_own_devices(tmp_path: Path) -> None:
    made = forecast_of("own_part.py", "v5e-16", tmp_path)
    told(made, "each of the 4 processes runs it on its own")
    assert not any("of the 16 chips" in line for line in made.cautions)
    # By hand: two matmuls forward, three backward, of a quarter of 1024 rows on each of all devices.
    assert made.hardware_flops == pytest.approx(5 * 2 * 256 * 2048**2, rel=0.01)
    # Two weights of 16 MiB in quarters, as the initialization has them, and a quarter of the batch.
    assert made.memory.by_kind["inputs"] == 2 * 4 * MIB + 2 * MIB


def test_weights_that_do_not_fit_where_they_are_made(tmp_path: Path) -> None:
    captured = captured_of("large_initial.py", "v5e-1", tmp_path)
    made = forecast_captured(captured, slice("v5e-1"))
    assert not made.fits
    assert made.need_bytes >= 24 * GIB
    assert "needs 24.00 GiB of a device" in told(made, "beside its step")
    # Loops of two programs of a step, each with a number of its own.
    for names in ({"body": 7}, {"missing.py:1": 7}):
        with pytest.raises(OptionError, match="is no loop of this program"):
            forecast_captured(captured, slice("v5e-1"), given(names))
    made = forecast_captured(captured, slice("v5e-1"), given({"inner/while": 5, "outer/while": 50}))
    assert "while makes 5 trips; while makes 50 trips" in told(made, "given by you")


def test_a_function_that_is_jitted_in_each_step_on_the_second_slice(tmp_path: Path) -> None:
    made = forecast_of("anew.py", "2xv5e-8", tmp_path)
    told(made, "lambda at anew.py:15 was traced anew 10 times in 10 calls")
    told(made, "the step uses 8 of the 16 chips of 2xv5e-8")
    # By hand: two matmuls of a device's rows, on half of the devices.
    assert made.hardware_flops == pytest.approx(2 * 2 * 1024**3 / 2, rel=0.01)


# By hand, without a compiler


@pytest.fixture
def bodies(monkeypatch):
    """The module of the hook that tells bodies apart."""
    monkeypatch.syspath_prepend(str(HOOK))
    return importlib.import_module(f"{HOOKED}.bodies")


def scanned(x, length: int = 2, rate: float = 0.1):
    """A loop of matmuls."""
    return jax.lax.scan(lambda x, _: (rate * jnp.tanh(x @ x), None), x, None, length=length)[0]


def test_bodies_are_told_apart(bodies) -> None:
    x = jnp.zeros((8, 8))

    def of(function, precision: str | None = None):
        with jax.default_matmul_precision(precision):
            return bodies.fingerprint(jax.make_jaxpr(jax.jit(function))(x))

    first = of(scanned)
    assert of(lambda x: scanned(x)) == first  # traced again
    others = [
        of(functools.partial(scanned, length=3)),
        of(functools.partial(scanned, rate=0.2)),
        of(scanned, "highest"),
        of(lambda x: scanned(x) + x),
    ]
    assert len({first, *others}) == 5
    # A rate that is new in each step is one program from the ninth on.
    many = [of(functools.partial(scanned, rate=0.3 + n)) for n in range(20)]
    assert len(set(many)) <= bodies.MOST_NUMBERS + 1
    assert many[-1] == many[-2] != first


def test_the_most_bytes_alive(bodies) -> None:
    def body(x):
        wide = jnp.concatenate([x, x])  # 2 beside 1
        return jnp.sum(wide) + jnp.sum(x)

    mib = jax.ShapeDtypeStruct((1 << 18,), jnp.float32)
    assert bodies.live_bytes(jax.make_jaxpr(body)(mib)) == 3 * MIB + 4  # and the first sum
    inside = jax.make_jaxpr(lambda x: jax.jit(body)(x))(mib)
    assert bodies.live_bytes(inside) == 3 * MIB + 4


def test_a_guess_is_a_note(bodies, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.import_module(f"{HOOKED}.report"), "FOLDER", str(tmp_path))
    shardings = importlib.import_module(f"{HOOKED}.shardings")
    calls = importlib.import_module(f"{HOOKED}.calls")

    def lower():
        raise ValueError("no such kernel")

    body = jax.make_jaxpr(lambda x: x @ x)(jax.ShapeDtypeStruct((1 << 14, 1 << 14), jnp.float32))
    partitions = shardings.Partitions("product", body, lower)
    assert partitions.of_pass(None) is None
    assert partitions.of_compiler([0], body.out_avals, ["of x"]) == ["of x"]
    line = calls.notes.pop()
    assert "1 results of product, 1.00 GiB over all devices, are a guess: 1 are taken" in line
    assert "compiling it failed (no such kernel)" in line


def test_axes_that_the_partitioner_splits(bodies) -> None:
    shardings = importlib.import_module(f"{HOOKED}.shardings")
    devices = np.array([jax.devices()[0]] * 8, object)
    mesh = jax.sharding.Mesh(devices.reshape(4, 2), ("data", "model"))

    def of(dims: str):
        found = shardings._sharding(f"#sdy.sharding<@mesh, [{dims}]>", {"mesh": mesh})
        return dict(found.mesh.shape), tuple(found.spec)

    assert of('{"model"}, {}, {"data"}') == ({"data": 4, "model": 2}, ("model", None, "data"))
    assert of('{"data", "model"}, {}') == ({"data": 4, "model": 2}, (("data", "model"),))
    parts = {"data:1": 2, "data:2": 2, "model": 2}
    assert of('{"data":(1)2}, {"model", "data":(2)2}') == (parts, ("data:1", ("model", "data:2")))


def test_bytes_that_a_device_gets(bodies) -> None:
    moves = importlib.import_module(f"{HOOKED}.moves")

    class Placed:
        """Parts of an array by device, of a kind of memory."""

        def __init__(self, parts, kind="device"):
            self.parts, self.memory_kind = parts, kind

        def devices_indices_map(self, shape):
            return self.parts

    class Device:
        """A device of a slice."""

        def __init__(self, slice_index):
            self.slice_index = slice_index

    a, b, far = Device(0), Device(0), Device(1)
    every, low, high = ((builtins.slice(*ends),) for ends in ((0, 8), (0, 4), (4, 8)))

    def of(source, target):
        parts = moves._parts(source, target, (8,), 4)
        return tuple(max((size for *_, size in own), default=0) for own in parts)

    assert of(Placed({a: low, b: high}), Placed({a: every, b: every})) == (0, 16, 0)
    assert of(Placed({a: every, b: every}), Placed({a: low, b: high})) == (0, 0, 0)
    assert of(Placed({a: low, b: high}), Placed({a: low, b: high}, "pinned_host")) == (16, 0, 0)
    assert of(Placed({a: every}), Placed({far: every})) == (0, 0, 32)
    # Each gets half, and the one that has all gives it away.
    assert of(Placed({a: every}), Placed({a: low, b: high})) == (0, 16, 0)
    c, d = Device(0), Device(0)
    quarters = [(builtins.slice(at, at + 2),) for at in (0, 2, 4, 6)]
    apart = Placed(dict(zip((a, b, c, d), quarters, strict=True)))
    assert of(Placed({a: every}), apart) == (0, 24, 0)
