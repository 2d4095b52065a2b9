"""What lies between the calls of a step, beside their arguments and outside of them all; with the real compiler."""

import importlib
import itertools
import json
import sys
from pathlib import Path

import jax
import pytest

from systolic.capture import capture
from systolic.chips import slice
from systolic.forecasting import Forecast
from systolic.forecasting.captured import forecast_captured
from systolic.forecasting.memory import HELD
from systolic.sim.timeline import Resource

pytestmark = pytest.mark.usefixtures("forked_programs")

HOOK = Path(__file__).parents[2] / "src/systolic/capture/hook"
HOOKED = "systolic_capture"
MIB, GIB = 1 << 20, 1 << 30

HEAD = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

first = SingleDeviceSharding(jax.devices()[0])
mesh = jax.make_mesh((len(jax.devices()),), ("d",))
split, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
"""


def forecast_of(program: str, on: str, folder: Path, *words: str) -> Forecast:
    """The forecast of a program behind what they share."""
    made = folder / "answer"
    made.mkdir()
    script = folder / "program.py"
    script.write_text(HEAD + program)
    captured = capture([sys.executable, str(script), *words], slice(on), made, quick=True)
    return forecast_captured(captured, slice(on))


def line(made: Forecast, words: str) -> str:
    """The caution or note that has some words; empty without it."""
    return next((line for line in (*made.cautions, *made.notes) if words in line), "")


def moved(made: Forecast, name: str) -> dict[Resource, int]:
    """Bytes of a kind of moves in a step."""
    assert made.timeline is not None
    return {span.resource: span.bytes for span in made.timeline.spans if span.name == name}


UNUSED = """
@jax.jit
def predict(state, x):
    return jax.jit(lambda state: state["weights"] @ x)(state)  # the moments go no further

state = {name: jnp.zeros((32768, 32768)) for name in ("weights", "mean", "variance", "average")}
x = jnp.zeros((32768, 8))
for _ in range(10):
    y = predict(state, x)
"""


def test_arguments_that_jit_drops_are_held(tmp_path: Path) -> None:
    made = forecast_of(UNUSED, "v5e-1", tmp_path)
    # Weights and three arrays as large, 4 GiB each, of which the compiled program has the weights alone; and the last result.
    assert made.memory is not None
    assert made.memory.by_kind[HELD] == 12 * GIB + MIB
    assert (
        made.memory.by_kind["parameters" if "parameters" in made.memory.by_kind else "inputs"]
        >= 4 * GIB
    )
    assert not made.fits


SOME = """
@jax.jit
def step(w, x):
    return w - 1e-3 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

step = jax.jit(step, donate_argnums=0)
w, x = jnp.zeros((1024, 1024)), jnp.zeros((256, 1024))
copy = None
for n in range(int(sys.argv[1])):
    if n % 10 == 0:
        copy = jnp.copy(w)
        kept = jax.device_put(copy, first.with_memory_kind("pinned_host"))
    if n % 10 == 3:
        copy = None
    w = step(w, x)
"""


@pytest.mark.parametrize("steps", ["31", "30"])
def test_what_comes_with_some_steps_alone_is_as_much_wherever_the_program_ends(
    steps: str, tmp_path: Path
) -> None:
    made = forecast_of(SOME, "v5e-1", tmp_path, steps)
    # 4 MiB every ten steps, and as many on the device in three of ten.
    assert moved(made, "device_put") == {Resource.host: round(4 * MIB / 10)}
    text = line(made, "device_put outside of jit")
    assert f"every 10 steps ({int(steps) // 10 if steps == '31' else 2} of {int(steps) - 1}" in text
    assert "4.0 MiB between device and host" in text
    assert made.memory is not None
    assert made.memory.by_kind[HELD] == 4 * MIB
    assert [b.bytes for b in made.memory.buffers if b.kind == HELD] == [4 * MIB]


GATHERED = """
width = int(sys.argv[1])
w = jax.device_put(jnp.zeros((width, width), jnp.bfloat16), split)
x = jax.device_put(jnp.zeros((8, width), jnp.bfloat16), whole)

@jax.jit
def step(w, gathered, x):
    return w + (x @ gathered).sum()

step = jax.jit(step, out_shardings=split)
for _ in range(10):
    gathered = jax.device_put(w, whole)  # the one before is alive
    w = step(w, gathered, x)
"""
INITIAL = """
width = int(sys.argv[1])
w = [jnp.zeros((width, width), jnp.bfloat16) for _ in range(3)]
w = jax.device_put(w, split)
x = jax.device_put(jnp.zeros((8, width), jnp.bfloat16), whole)
step = jax.jit(lambda w, x: [part + (x @ part).sum() for part in w], donate_argnums=0)
for _ in range(10):
    w = step(w, x)
"""


@pytest.mark.parametrize(
    ("program", "width", "fits", "least"),
    [
        # By hand: two whole arrays of 8 GiB and a part of an eighth of one; three of 8 GiB, of which the second is too much.
        pytest.param(GATHERED, 65536, False, 17 * GIB, id="gathered"),
        pytest.param(INITIAL, 65536, False, 16 * GIB, id="initial"),
        pytest.param(GATHERED, 8192, True, 256 * MIB, id="smaller"),
    ],
)
def test_the_most_outside_of_calls(
    program: str, width: int, fits: bool, least: int, tmp_path: Path
) -> None:
    made = forecast_of(program, "v5e-8", tmp_path, str(width))
    text = line(made, "outside of its step the program holds")
    assert "program.py:" in text
    assert made.fits == fits
    if fits:
        # Two of 128 MiB, a part of 16 MiB and a batch of 128 KiB.
        assert "272.1 MiB of arrays" in text
        assert "fails there" not in text
    else:
        assert made.rejected is not None
        assert made.rejected.need_bytes >= least
        assert made.cautions[0] == text
        assert "it does not fit, and the program fails there" in text


LOOSE = """
from functools import partial

width = 4096
columns = NamedSharding(mesh, P(None, "d"))

@partial(jax.jit, in_shardings=(whole, columns, whole), out_shardings=(whole, whole))
def step(rate, base, x):
    loss, slope = jax.value_and_grad(lambda r: ((x @ base).astype(jnp.float32) * r).mean())(rate)
    return rate - slope, loss

base = jnp.zeros((width, width), jnp.bfloat16)  # whole on the first device, committed to none
rate = jax.device_put(jnp.zeros((width,)), whole)
x = jax.device_put(jnp.zeros((64, width), jnp.bfloat16), whole)
for _ in range(10):
    rate, loss = step(rate, base, x)
"""


def test_an_array_on_one_device_that_each_call_spreads(tmp_path: Path) -> None:
    made = forecast_of(LOOSE, "v5e-8", tmp_path)
    # The first device keeps 32 MiB and gives away seven eighths, beside its own eighth that is the argument.
    assert made.memory is not None
    assert made.memory.by_kind[HELD] == 32 * MIB + 4  # and the last loss
    assert moved(made, "arguments on one device") == {Resource.ici: 28 * MIB}
    text = line(made, "jit copies arguments that lie on one device")
    assert "1 time a step, 28.0 MiB between devices" in text
    assert made.step_seconds is not None
    assert made.step_seconds > 28 * MIB / (2 * 45e9 * 1.2)


READ = """
@jax.jit
def step(w, x):
    y = x @ w
    return w + y.mean() * w, y

w, x = jax.device_put((jnp.zeros((2048, 1024)), jnp.zeros((1024, 2048))), whole)
w = jax.device_put(w, split)
for _ in range(10):
    w, y = step(w, x)
    values = np.asarray(y), np.asarray(y), jax.device_get(w)  # y once
    parts = [np.asarray(shard.data) for shard in w.addressable_shards]  # no more of w
    on_cpu = jax.device_put(w, jax.devices("cpu")[0])
"""


def test_values_that_the_program_reads(tmp_path: Path) -> None:
    made = forecast_of(READ, "v5e-8", tmp_path)
    # 4 MiB of y from a device that has it; of the 8 MiB of w an eighth from each, twice.
    assert moved(made, "arrays read") == {Resource.host: 5 * MIB}
    assert moved(made, "device_put") == {Resource.host: MIB}
    assert "2 times a step, 5.0 MiB between device and host" in line(
        made, "the program reads arrays"
    )
    assert made.memory is not None
    assert made.memory.by_kind.get(HELD, 0) < 8 * MIB  # the copy lies on the CPU


AHEAD = """
width = 1024
w, unused = jnp.zeros((width, width)), jnp.zeros((width, width))

def step(w, unused, batch):
    return w - jax.grad(lambda w: ((batch @ w) ** 2).mean())(w)

batch = np.zeros((64, width), np.float32)
compiled = jax.jit(step, donate_argnums=0).lower(w, unused, batch).compile()
donated = []
for _ in range(10):
    donated.append(w)
    w = compiled(w, unused, batch)
moved = jax.device_put(w, jax.devices()[0], donate=True)
"""


def test_donation_of_a_program_that_is_compiled_ahead_beside_a_batch_of_the_host(
    tmp_path: Path,
) -> None:
    made = forecast_of(AHEAD, "v5e-1", tmp_path)
    assert made.memory is not None
    assert (
        made.memory.by_kind[HELD] == 4 * MIB
    )  # what the program drops; what it donates is a result


REPORTING = """
import functools, json

w = jax.device_put(np.zeros((2048, 2048), np.float32), whole)
batch = jax.device_put(np.zeros((4096, 2048), np.float32), split)

@functools.partial(jax.jit, donate_argnums=0)
def step(w, batch):
    return w - jax.grad(lambda w: ((jnp.tanh(batch @ w) @ w.T) ** 2).mean())(w)

compiled = step.lower(w, batch).compile()
memory = compiled.memory_analysis()
kinds = ("argument", "output", "alias", "temp", "generated_code")
print(json.dumps({kind: getattr(memory, f"{kind}_size_in_bytes") for kind in kinds}))
for _ in range(10):
    w = step(w, batch)
"""


def test_memory_that_a_program_asks_for_does_not_wait_for_its_code(tmp_path: Path, capfd) -> None:
    made = forecast_of(REPORTING, "v5e-8", tmp_path)
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("{"))
    memory = json.loads(line)
    # By hand: 16 MiB of weights, which are donated, and an eighth of 32 of a batch; nothing is compiled yet.
    assert memory == {
        "argument": 20 * MIB,
        "output": 16 * MIB,
        "alias": 16 * MIB,
        "temp": 0,
        "generated_code": 0,
    }
    assert "with no temporaries" in next(note for note in made.notes if "the memory of" in note)
    events = map(json.loads, (tmp_path / "answer" / "events.jsonl").read_text().splitlines())
    stages = [event["stage"] for event in events if event.get("stage", "").startswith("compiling")]
    assert stages == ["compiling step"]


AVERAGING = """
w, mean, batch = jnp.zeros((1024, 1024)), jnp.zeros((1024, 1024)), jnp.zeros((1024, 1024))

@jax.jit
def step(w, batch):
    return w - jax.grad(lambda w: ((batch @ w) ** 2).mean())(w)

@jax.jit
def average(mean, w):
    return 0.9 * mean + 0.1 * w

for _ in range(10):
    w = step(w, batch)
    mean = average(mean, w)
"""


def test_small_programs_do_not_wait_for_the_code_of_large_ones(tmp_path: Path) -> None:
    made = forecast_of(AVERAGING, "v5e-1", tmp_path)
    assert made.recipe == "step + average"
    events = map(json.loads, (tmp_path / "answer" / "events.jsonl").read_text().splitlines())
    stages = [event["stage"] for event in events if event.get("stage", "").startswith("compiling")]
    assert stages == ["compiling average", "compiling step"]


# By hand, without a compiler


@pytest.fixture
def moves(monkeypatch):
    monkeypatch.syspath_prepend(str(HOOK))
    return importlib.import_module(f"{HOOKED}.moves")


def per_step(moves, *host: int) -> dict:
    """What is put in a step, from the bytes that each step moves to the host."""
    totals, total = [], [(0, 0, 0, 0)] * len(moves.CAUSES)
    for size in (0, *host):
        put = total[0]
        total = [(put[0] + size, 0, 0, put[3] + bool(size)), *total[1:]]
        totals.append(tuple(total))
    return moves.of_steps(list(itertools.pairwise(totals))).get("put", {})


def test_moves_of_steps_by_hand(moves) -> None:
    assert per_step(moves, 0, 0, 0) == {}
    assert per_step(moves, 8, 8, 8) == {"host": 8, "devices": 0, "slices": 0, "times": 1}
    # One of ten, from the first of them to the last, whatever comes before and behind.
    for behind in (0, 4, 9):
        rare = per_step(moves, *[0] * 5, 8, *[0] * 9, 8, *[0] * behind)
        assert rare["host"] == pytest.approx(0.8)
        assert rare["some"] == pytest.approx(
            {"steps": 2, "of": 16 + behind, "every": 10, "host": 8, "devices": 0, "slices": 0}
            | {"times": 1}
        )
    # Beside what each step moves.
    more = per_step(moves, *([2] * 9 + [10]) * 3)
    assert more["host"] == pytest.approx(2.8)
    assert more["some"]["host"] == pytest.approx(8)
    # Once is once in the recorded steps, and two that follow each other are no more than two and another.
    assert per_step(moves, *[0] * 19, 8)["host"] == pytest.approx(8 / 20)
    assert per_step(moves, *[0] * 18, 8, 8)["host"] == pytest.approx(3 * 8 / 20)
    # Each step another size.
    assert per_step(moves, 1, 2, 3, 4) == {"host": 2.5, "devices": 0, "slices": 0, "times": 1}


LINKS = """
how, devices = sys.argv[1], list(mesh.devices.flat)
w, part = jax.device_put(np.zeros((8192, 1024)), split), np.zeros((1024, 1024), np.float32)
step = jax.jit(lambda w, x: w + x)
for _ in range(10):
    parts, x = [shard.data for shard in w.addressable_shards], w
    if how == "fed":
        x = [jax.device_put(part, device) for device in devices]
        x = jax.make_array_from_single_device_arrays(w.shape, split, x)
    elif how == "next":
        kept = [jax.device_put(*to) for to in zip(parts, devices[1:] + devices[:1])]
    elif how == "chain":
        for device in devices[1:]:
            parts[0] = jax.device_put(parts[0], device)
    elif how == "first":
        kept = [jax.device_put(parts[0], device) for device in devices[1:]]
    elif how == "calls":
        for device in devices[1:]:
            parts[0] = step(jax.device_put(parts[0], device), 1.0)
    elif how == "get":
        kept = jax.device_get(parts)
    else:
        kept = [np.asarray(part) for part in parts]
    w = step(w, x)
"""


@pytest.mark.parametrize(
    ("how", "cause", "link", "size"),
    [
        ("fed", "fed", "host", 4 * MIB),
        ("next", "put", "devices", 4 * MIB),
        ("chain", "put", "devices", 28 * MIB),
        ("first", "put", "devices", 28 * MIB),
        ("calls", "put", "devices", 28 * MIB),
        ("get", "read", "host", 4 * MIB),
        ("one by one", "read", "host", 32 * MIB),
    ],
)
def test_moves_over_links_of_their_own_run_beside_each_other(
    how: str, cause: str, link: str, size: int, tmp_path: Path
) -> None:
    """By hand: 4 MiB of each of eight devices, all at once; one after the other where each waits for the one before, by its
    values, through a call or on the host, and where all come from one device."""
    script = tmp_path / "program.py"
    script.write_text(HEAD + LINKS)
    folder = tmp_path / "answer"
    folder.mkdir()
    captured = capture([sys.executable, str(script), how], slice("v5e-8"), folder, quick=True)
    assert getattr(captured.answer.moves[cause], link) == size


CLOSED = """
from jax.sharding import Mesh

rows, where = int(sys.argv[1]), NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
table = jax.device_put(jnp.zeros((rows, 8192)), where)

@jax.jit
def step(x):
    return x + 1e-3 * jnp.tanh(x @ table) @ table.T

x = jax.device_put(jnp.zeros((1024, rows)), where)
for _ in range(10):
    x = step(x)
"""


@pytest.mark.parametrize(("rows", "argument"), [(512, 0), (4096, 128 * MIB)])
def test_an_array_that_the_step_refers_to_is_a_constant_of_its_program(
    rows: int, argument: int, tmp_path: Path
) -> None:
    """By hand: a part of x on each device, and all of the table in its program as two bfloat16 constants, as it is and turned,
    beside the part of the array itself. A constant that is too large to be compiled here is an argument, whole."""
    made = forecast_of(CLOSED, "v5e-8", tmp_path, str(rows))
    table = rows * 8192 * 4
    assert made.memory is not None
    assert made.memory.by_kind[HELD] == table // 8
    assert made.memory.by_kind["inputs"] == 128 * rows * 4 + argument
    assert made.memory.peak_bytes >= table + table // 8
    text = line(made, "arrays that are not its arguments")
    assert f"step refers to {table // MIB} MiB" in text
    assert ("taken here as arguments" in text) == bool(argument)


FED = """
import pickle

@jax.jit
def step(w, x):
    return w - 1e-3 * jnp.mean(x)

w, batch = jax.device_put(jnp.zeros((1024, 1024)), first), np.ones((1024, 25000), np.float32)
for number in range(50):
    w = step(w, jax.device_put(batch, first) if sys.argv[1] == "put" else batch)
    if number == 1:
        values = jax.device_get(w)
        with open(sys.argv[2], "wb") as file:
            pickle.dump({"weights": values}, file)
"""


@pytest.mark.parametrize("way", ["put", "argument"])
def test_a_batch_from_the_host_is_a_note_and_values_that_are_read_a_warning(
    way: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By hand: 102.4 MB at the 15 GB/s of a v5e's host link are 6.83 ms, beside a step of a fiftieth of that."""
    made = forecast_of(FED, "v5e-1", tmp_path, way, str(tmp_path / "checkpoint"))
    assert made.step_seconds is not None
    assert made.step_seconds < 1e-3
    assert "a step takes 97.7 MiB of arrays from the host, such as batches: 6.83 ms" in line(
        made, "from the host"
    )
    (warning,) = [text for text in capfd.readouterr().err.splitlines() if "systolic:" in text]
    assert "reads large arrays of the slice (program.py:" in warning
    assert "a file that it writes of them has zeros" in warning


def test_keys_of_random_numbers_that_have_no_nbytes_count_by_their_dtype(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(HOOK))
    arrays = importlib.import_module(f"{HOOKED}.arrays")
    keys = jax.random.split(jax.random.key(0), 10_000)
    monkeypatch.delattr(type(keys), "nbytes")  # as in jax 0.5
    # By hand: two uint32 a key; one alone is no large array.
    assert [size for _, size in arrays.serials([keys, keys[0]])] == [10_000 * 8]


def test_origins_have_the_latest_call_of_each_kind_and_the_last_end_of_each_move(
    monkeypatch,
) -> None:
    monkeypatch.syspath_prepend(str(HOOK))
    arrays = importlib.import_module(f"{HOOKED}.arrays")
    origins = arrays.Origins({"step": 3, "loss": 9}, {("put", "host"): 64})
    more = arrays.Origins({"step": 7, "init": 0}, {("put", "host"): 8, ("read", "host"): 32})
    origins.join(more)
    assert origins.calls == {"step": 7, "loss": 9, "init": 0}
    assert origins.moves == {("put", "host"): 64, ("read", "host"): 32}
    assert more.moves == {("put", "host"): 8, ("read", "host"): 32}
