"""Arrays of a captured program beside those of real JAX on eight devices: what they hold, where results lie, what jax refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from systolic.capture import capture
from systolic.capture.program import Captured
from systolic.chips import slice
from systolic.core.errors import RunError
from systolic.forecasting.captured import forecast_captured

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
ON = slice("v5e-8")
HEAD = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
split, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())


def say(*words):
    with open(sys.argv[1], "a") as file:
        print(*words, file=file)

"""
STEP = """
@jax.jit
def update(w):
    return 2 * w

w = jnp.zeros((512, 512), device=split)
for _ in range(20):
    w = update(w)
"""


def captured_of(program: str, folder: Path) -> Captured:
    answer = folder / "answer"
    answer.mkdir()
    (folder / "program.py").write_text(HEAD + program)
    command = [sys.executable, str(folder / "program.py"), str(folder / "said")]
    return capture(command, ON, answer, quick=True)


def said_by_jax(program: str, folder: Path) -> str:
    """What the program says on eight devices of the CPU."""
    (folder / "real.py").write_text(HEAD + program)
    flags = "--xla_force_host_platform_device_count=8"
    variables = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    words = [str(folder / "real.py"), str(folder / "said_by_jax")]
    command = [sys.executable, "-m", "tests.capture.plain", *words]
    subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True, timeout=100)
    return (folder / "said_by_jax").read_text()


FILLED = """
w = jnp.zeros((2**21, 4096), device=split)
m = jnp.full(w.shape, 1.0, device=split)
table = jnp.ones((2**29,), jnp.bfloat16, device=whole)

@jax.jit
def step(w, m, table):
    return w + m * table[0]

step = jax.jit(step, donate_argnums=0)
for _ in range(20):
    w = step(w, m, table)
"""


def test_arrays_that_are_filled_on_several_devices_count_once(tmp_path: Path) -> None:
    captured = captured_of(FILLED, tmp_path)
    # An eighth of 32 GiB twice, and 1 GiB that is whole on each device.
    assert captured.answer.outside.bytes == 9 * GIB
    assert "fed" not in captured.answer.moves
    assert forecast_captured(captured, ON).fits


NUMPY = """
w, x, c = jnp.ones((512, 1024), device=split), np.ones((512, 1024), np.float32), np.float32(0.5)

def in_place(left, right):
    left += right
    return left

for value in (
    x + w, w + x, c * w, c**w, np.float64(2) * w, np.array(2.0) * w, x < w, x == w, c <= w, c // w, x.T @ w,
    in_place(x.copy(), w), in_place(w, x), in_place(c, w), np.bool_(True) | (w > 0), divmod(x, w)[1],
    np.add(x, w), np.exp(w), np.where(w > 0, x, w), np.sum(w), np.dot(x.T, w), np.stack([w, w]), np.asarray(w),
):
    say(isinstance(value, jax.Array), value.shape, value.dtype)
"""


def test_operations_with_numpy_are_of_the_kind_that_jax_has(tmp_path: Path) -> None:
    captured_of(NUMPY + STEP, tmp_path)
    said = (tmp_path / "said").read_text()
    assert said == said_by_jax(NUMPY, tmp_path)
    assert said.startswith("True (512, 1024) float32\n")


DECAYED = """
@jax.jit
def step(w, x):
    return w - jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

w, x = jnp.zeros((1024, 1024), device=split), jnp.ones((1024, 1024), device=split)
for _ in range(20):
    w = np.float32(0.999) * step(w, x)
"""


def test_a_number_of_numpy_at_the_left_leaves_the_weights_on_the_slice(tmp_path: Path) -> None:
    assert captured_of(DECAYED, tmp_path).answer.moves == {}


COMPILED = """
def start(key, scale):
    state = {"w": jax.random.normal(key, (1024, 1024)), "m": jnp.zeros((1024, 1024)), "n": scale}
    state["w"] = jax.lax.with_sharding_constraint(state["w"], split)
    return {**state, "half": state["w"][:512]}

key = jax.device_put(jax.random.key(0), whole)
for compiled in (
    jax.jit(start).lower(key, 2.0).compile(),
    jax.jit(lambda x: (x.T, x + 1)).lower(jax.ShapeDtypeStruct((1024, 512), "float32", sharding=split)).compile(),
):
    for place in jax.tree.leaves(compiled.output_shardings):
        say(place.shard_shape((1024, 1024)), len(place.device_set))
"""


def test_a_compiled_function_says_where_its_results_lie(tmp_path: Path) -> None:
    captured_of(COMPILED + STEP, tmp_path)
    said = (tmp_path / "said").read_text()
    assert said == said_by_jax(COMPILED, tmp_path)
    assert "(128, 1024) 8" in said


REFERENCES = """
from functools import partial

ref = getattr(jax, "new_ref", None) or jax.array_ref
size = 4096 if jax.devices()[0].platform == "tpu" else 64
w = ref(jnp.zeros((size, size), device=whole))
losses = ref(jnp.zeros((64,), device=whole))
x = jnp.ones((2 * size, size), device=split)

def change(w, losses, x):
    loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w[...])
    w[...] = w[...] - 0.1 * gradient
    losses[1] = loss
    return loss

STEP
for n in range(20):
    loss = step(x)
    losses[n] = loss
    loss = losses[n - 1]
say(w.ndim, losses[...].shape, loss.dtype, w[...].sharding.spec)
"""


@pytest.mark.parametrize(
    "step", ["jax.jit(lambda x: change(w, losses, x))", "partial(jax.jit(change), w, losses)"]
)
def test_mutable_references_are_state(step: str, tmp_path: Path) -> None:
    program = REFERENCES.replace("STEP", f"step = {step}")
    captured = captured_of(program, tmp_path)
    assert (tmp_path / "said").read_text() == said_by_jax(program, tmp_path)
    (step,) = captured.programs
    assert step.calls_per_step == 1
    # The product and its gradient by the weights.
    assert step.flops == 2 * 2 * 8192 * 4096 * 4096
    memory = forecast_captured(captured, ON).memory
    assert memory is not None
    # Weights and an eighth of the batch go in, and the weights come out where they were.
    inputs = 4 * (4096 * 4096 + 8192 * 4096 // 8)
    assert inputs <= memory.by_kind["inputs"] < 1.01 * inputs
    assert memory.peak_bytes < inputs + 2.5 * 4 * 4096 * 4096


APART = """
w = jax.device_put(jnp.zeros((512, 512)), jax.devices()[0])
x = jnp.ones((512, 512), device=split)

@jax.jit
def step(w, x):
    return w - x @ w

try:
    WHAT
except ValueError as error:
    say(str(error).replace("TPU", "CPU").replace("0, 1, 2, 3, 7, 6, 5, 4", "0, 1, 2, 3, 4, 5, 6, 7"))
    raise
"""


@pytest.mark.parametrize("what", ["step(w, x)", "w + x", "w @ x"])
def test_arrays_on_incompatible_devices_are_refused_as_by_jax(what: str, tmp_path: Path) -> None:
    program = APART.replace("WHAT", what)
    with pytest.raises(RunError, match="Received incompatible devices for jitted computation"):
        captured_of(program, tmp_path)
    refused = (tmp_path / "said").read_text()
    assert refused == said_by_jax(program.replace("    raise\n", ""), tmp_path)
    assert "device ids [0]" in refused


BETWEEN_HALVES = """
from jax.sharding import Mesh

halves = [
    NamedSharding(Mesh(np.array([d for d in jax.devices() if d.coords[1] // 2 == n]), ("d",)), P("d")) for n in (0, 1)
]
x, w = jnp.zeros((16384, 4096), jnp.bfloat16, device=halves[1]), jnp.zeros((16384, 4096), jnp.bfloat16, device=halves[0])

@jax.jit
def teach(x):
    return x * 2

@jax.jit
def learn(w, x):
    return w + x

for _ in range(20):
    x = teach(x)
    w = learn(w, MOVED)
"""
PARTS = """jax.make_array_from_single_device_arrays(x.shape, halves[0], [
        jax.device_put(part.data, device)
        for part, device in zip(x.addressable_shards, halves[0].mesh.devices.flat)
    ])"""


@pytest.mark.parametrize("moved", ["jax.device_put(x, halves[0])", PARTS])
def test_what_crosses_the_slice_shares_the_links_that_do(moved: str, tmp_path: Path) -> None:
    forecast = forecast_captured(captured_of(BETWEEN_HALVES.replace("MOVED", moved), tmp_path), ON)
    assert forecast.timeline is not None
    (copy,) = (span for span in forecast.timeline.spans if span.name == "device_put")
    # Two links lead from one half of the 2x4 to the other; by the published rate of each, 50 GB/s one way.
    assert copy.seconds >= 2 * 16384 * 4096 / (2 * 50e9)
    assert copy.seconds < 1.3 * 2 * 16384 * 4096 / (2 * 50e9)


@pytest.mark.parametrize("name", ["step", "jit(step)"])
def test_a_step_that_is_compiled_ahead_has_both_names(name: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def step(w): return w @ w\n"
        "w = jnp.zeros((512, 512))\n"
        "call = jax.jit(step).lower(w).compile()\n"
        "for _ in range(9): w = call(w)\n"
    )
    answer = tmp_path / "answer"
    answer.mkdir()
    command = [sys.executable, str(tmp_path / "program.py")]
    captured = capture(command, slice("v5e-1"), answer, step=name, quick=True)
    assert [program.name for program in captured.programs] == [name]
