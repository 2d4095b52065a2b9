"""What is in a step and what is beside it: arrays, devices, evaluations, blocks of attention; with the real compiler."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from systolic.capture import capture
from systolic.chips import slice
from systolic.cli.main import main
from systolic.forecasting import Forecast, forecast_text
from systolic.forecasting.captured import forecast_captured
from systolic.forecasting.memory import HELD
from systolic.sim.calls import DeviceCall, schedule

pytestmark = pytest.mark.usefixtures("forked_programs")

PROGRAMS = Path(__file__).parent / "programs"
HOOK = Path(__file__).parents[2] / "src/systolic/capture/hook/systolic_capture"
GIB = 1 << 30


def forecast_of(program: str, on: str, folder: Path, *words: str) -> tuple[Forecast, Path]:
    """The forecast of a program of the tests, and the folder of what it was made from."""
    made = folder / "answer"
    made.mkdir()
    script = shutil.copy(PROGRAMS / program, folder / program)
    captured = capture([sys.executable, str(script), *words], slice(on), made, quick=True)
    return forecast_captured(captured, slice(on)), made


def test_arrays_beside_the_step_are_in_its_memory(tmp_path: Path, capsys) -> None:
    made, _ = forecast_of("holding.py", "v5e-8", tmp_path)
    # Sixteen of 1 GiB, a quarter of another and one more on the first device; no view, and nothing deleted or donated.
    held = 17 * GIB + GIB // 4
    assert made.memory is not None
    assert made.memory.by_kind[HELD] == pytest.approx(held, abs=1 << 16)
    assert made.memory.peak_bytes == sum(made.memory.by_kind.values())
    weights, batch = 4 << 20, 4 << 20
    assert made.memory.by_kind["inputs"] == weights + batch
    named = [buffer for buffer in made.memory.buffers if buffer.kind == HELD]
    assert len(named) == 12
    assert {buffer.bytes for buffer in named} == {GIB}
    assert any("holds 1.00 GiB of arrays in the memory of a host" in note for note in made.notes)
    assert not made.fits
    assert made.rejected is not None
    assert made.rejected.need_bytes == made.memory.peak_bytes > made.capacity_bytes
    assert f"17.25 GiB {HELD}" in made.rejected.remedies[0]
    assert made.to_json()["hbm"]["by_kind"][HELD] == made.memory.by_kind[HELD]
    assert made.cautions[0].startswith(
        "the step uses 4 of the 8 chips of v5e-8, and MFU, HFU and the bill are of all"
    )


def test_the_command_refuses_what_does_not_fit_beside_the_step(tmp_path: Path, capsys) -> None:
    text = (PROGRAMS / "holding.py").read_text()
    script = tmp_path / "holding.py"
    # On a device that the step does not use there is more than it has.
    script.write_text(
        text.replace("elsewhere = ", "elsewhere = [")
        .replace(
            "SingleDeviceSharding(jax.devices()[7]))",
            "SingleDeviceSharding(jax.devices()[7])) for _ in range(18)]",
        )
        .replace("range(16)", "range(2)")
    )
    words = ["forecast", "--on", "v5e-8", "--quick", "--", sys.executable, str(script)]
    assert main(words) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not fit" in shown
    assert "Needs 18.00 GiB, 15.75 GiB available" in shown
    assert "a device which the step does not use" in shown


@pytest.mark.parametrize("how", ["apart", pytest.param("in turn", marks=pytest.mark.slow)])
def test_calls_on_different_devices(tmp_path: Path, how: str) -> None:
    made, folder = forecast_of("two_devices.py", "v5e-8", tmp_path, how)
    alone = [forecast_text(folder / f"program{n}.txt", slice("v5e-1")).step_seconds for n in (0, 1)]
    first, second = (seconds or 0.0 for seconds in alone)
    told = [note for note in made.cautions if "wait for each other" in note]
    if how == "apart":
        assert made.step_seconds == pytest.approx(max(first, second))
        assert not told
    else:
        # By hand: 4 MiB of weights to the other device and back, over two of v5e's links of 45 GB/s at the least.
        moved = made.time_by_resource["ici"]
        assert 2 * 2**22 / (2 * 45e9) <= moved <= 2 * 2**22 / 45e9
        assert made.step_seconds == pytest.approx(first + second + moved)
        assert len(told) == 1
        assert made.time_by_resource["idle"] == pytest.approx(min(first, second), rel=0.02)
    assert sum(made.time_by_resource.values()) == pytest.approx(made.step_seconds)
    # By hand: two matmuls of each program, on two devices of eight.
    flops = 2 * 2 * 2 * 4096 * 1024 * 1024 / 8
    assert made.hardware_flops == pytest.approx(flops, rel=0.01)
    assert made.cautions[0].startswith("the step uses 2 of the 8 chips")


@pytest.mark.parametrize("how", ["put", "host", "apart"])
def test_calls_that_pass_tokens_to_each_other(tmp_path: Path, how: str) -> None:
    """By hand: who takes another's tokens waits for it, whatever way they go; a counter that both take keeps nobody waiting."""
    made, folder = forecast_of("tokens.py", "v5e-8", tmp_path, how)
    alone = [forecast_text(folder / f"program{n}.txt", slice("v5e-1")).step_seconds for n in (0, 1)]
    draft, check = (seconds or 0.0 for seconds in alone)
    expected = max(draft, check) if how == "apart" else draft + check
    # 16 KiB of tokens to the other device and back take less than a thousandth of that.
    assert made.step_seconds == pytest.approx(expected, rel=1e-3)


def test_an_evaluation_each_five_steps_is_beside_the_step(tmp_path: Path, capsys) -> None:
    made, folder = forecast_of("evaluating.py", "v5e-1", tmp_path)
    assert made.recipe == "train_step + average"
    (found,) = made.to_json()["periodic"]
    assert (found["name"], found["every_steps"], found["calls"]) == ("eval_step", 5, 2)
    alone = forecast_text(folder / "program2.txt", slice("v5e-1")).step_seconds or 0.0
    assert found["seconds"] == pytest.approx(2 * alone)
    parts = [forecast_text(folder / f"program{n}.txt", slice("v5e-1")) for n in (0, 1)]
    assert made.step_seconds == pytest.approx(sum(part.step_seconds or 0.0 for part in parts))
    assert made.cautions[0].startswith("eval_step: 2 calls every 5 steps, ")
    # By hand: two matmuls in the evaluation, which is large beside a step's five.
    assert alone > 2 * 2 * 2048 * 1024 * 1024 / 197e12


def test_attention_without_a_causal_mask_costs_all_of_its_blocks(tmp_path: Path) -> None:
    made, _ = forecast_of("attention.py", "v5p-8", tmp_path)
    assert not any("taken as causal" in note for note in made.notes)
    # By hand: two matmuls forward, four and three backward, of 8,192 x 8,192 x 128 for each of 8 heads; without a mask all
    # of them, and with one what the diagonal leaves of 8 x 8 or of 8 x 16 blocks: 36 / 64, or 72 / 128.
    flops = (2 + 4 + 3) * 2 * 8 * 8192 * 8192 * 128
    executed = made.hardware_flops * slice("v5p-8").num_devices
    assert executed == pytest.approx((1 + 9 / 16) * flops, rel=0.02)
    assert (made.step_seconds or 0.0) > executed / 459e12


def test_a_program_that_repeats_nothing(tmp_path: Path) -> None:
    made, _ = forecast_of("nothing_repeated.py", "v5e-1", tmp_path, "once")
    told = "the program repeated no jitted call, and no step is known: train_step, the call with the most FLOPs of train_step, make, is taken for it"
    assert made.cautions[0].startswith(told)
    many = tmp_path / "many"
    many.mkdir()
    made, _ = forecast_of("nothing_repeated.py", "v5e-1", many, "never")
    assert made.recipe == "make"
    told = "no step is known: no call takes what an earlier call of its kind made or took; make, called 3 times, is taken for it"
    assert made.cautions[0].startswith(told)


def test_a_program_that_reads_analyses_and_saves_early(tmp_path: Path, capfd) -> None:
    made, _ = forecast_of("ahead.py", "v5e-8", tmp_path, str(tmp_path))
    assert made.recipe == "jit(step)"
    costs, memory = json.loads((tmp_path / "analyses.json").read_text())
    # By hand: two matmuls of a device's rows; the weights are donated, and as large as its part of the batch.
    matmuls = 2 * 2 * 1024 * 1024 * 1024
    assert costs["flops"] == pytest.approx(matmuls, rel=0.01)
    assert costs["bytes accessed"] > 3 * (4 << 20)
    assert memory["argument_size_in_bytes"] == 8 << 20
    assert memory["output_size_in_bytes"] == memory["alias_size_in_bytes"] == 4 << 20
    assert memory["temp_size_in_bytes"] >= 0
    assert memory["generated_code_size_in_bytes"] > 1 << 16
    assert made.step_seconds is not None
    assert made.step_seconds > matmuls / 197e12
    # Three ways of saving, and one line of it; the norm that is read before is no save.
    lines = [line for line in capfd.readouterr().err.splitlines() if "saves or sends" in line]
    assert lines == [
        "systolic: the program saves or sends arrays of the slice (ahead.py:36): they stand for values that nobody has computed, and zeros are written"
    ]
    assert any("zeros are written" in note for note in made.notes)
    saved = [tmp_path / name for name in ("weights.npy", "weights.pickle", "checkpoint")]
    assert all(path.exists() for path in saved)


@pytest.mark.parametrize("microbatches", [320, 1200])
def test_a_step_of_many_microbatches(tmp_path: Path, microbatches: int) -> None:
    made, folder = forecast_of(
        "repeating.py", "v5e-1", tmp_path, "microbatches", f"{microbatches}", "4"
    )
    assert made.recipe == "gather + update"
    gather, update = (alone(folder, number) for number in (0, 1))
    assert made.step_seconds == pytest.approx(microbatches * gather + update)
    assert not made.cautions


def test_evaluations_hundreds_of_steps_apart(tmp_path: Path) -> None:
    made, _ = forecast_of("repeating.py", "v5e-1", tmp_path, "evaluations", "350", "1200")
    assert made.recipe == "train"
    (evaluation,) = made.to_json()["periodic"]
    assert (evaluation["name"], evaluation["every_steps"]) == ("evaluate", 350)
    # By hand: a batch of 1 GiB, and as much to sort.
    assert made.memory is not None
    assert made.memory.peak_bytes == evaluation["peak_bytes"] > 2 * GIB


def test_a_short_run_that_ends_with_equal_calls(tmp_path: Path) -> None:
    made, folder = forecast_of("repeating.py", "v5e-1", tmp_path, "critics", "4")
    assert made.recipe == "generator + critic"
    assert made.step_seconds == pytest.approx(alone(folder, 0) + 5 * alone(folder, 1))


def test_a_phase_that_the_step_leaves_out(tmp_path: Path, capsys) -> None:
    """By hand: each of both phases has half the calls and of the FLOPs; before the step bytes may be those of an initialization."""
    made, _ = forecast_of("repeating.py", "v5e-1", tmp_path, "phases")
    assert made.recipe == "gather"
    flops, mib = 2 * 2 * 512 * 1024 * 1024, 100.0 * (1 << 20)
    share = flops / (2 * flops + 10 * mib)  # weights twice, and a batch of 2 MiB
    line = f"the step leaves out train (20): {100 * share:.2g} % of the FLOPs and bytes of all recorded calls"
    assert made.cautions[0].startswith(line)
    program = [sys.executable, str(tmp_path / "repeating.py"), "phases"]
    assert main(["plan", "--on", "v5e-1", "--", *program]) == 0
    assert line in " ".join(capsys.readouterr().out.split())


def test_a_step_of_integers(tmp_path: Path) -> None:
    made, _ = forecast_of("repeating.py", "v5e-1", tmp_path, "integers")
    assert made.recipe == "embed + layer + head"
    assert not any("no step is known" in line for line in made.cautions)
    assert made.hardware_flops == pytest.approx(2 * 256 * 1024 * (4 * 1024 + 4096), rel=0.01)


def test_threads_on_devices_of_their_own(tmp_path: Path) -> None:
    made, folder = forecast_of("repeating.py", "v5e-4", tmp_path, "threads", "30")
    assert set(made.recipe.split(" + ")) == {"evaluate", "train"}
    slowest = max(alone(folder, number) for number in (0, 1))
    moved = made.time_by_resource["ici"]
    assert made.step_seconds == pytest.approx(slowest + moved, rel=1e-3)
    assert made.to_json().get("periodic") is None
    assert "the step uses 2 of the 4 chips" in made.cautions[0]
    assert any("2 threads run on devices of their own" in note for note in made.notes)


def alone(folder: Path, number: int) -> float:
    """Seconds of a program of a step on one chip."""
    return forecast_text(folder / f"program{number}.txt", slice("v5e-1")).step_seconds or 0.0


# By hand, without a compiler


def hook(name: str) -> ModuleType:
    """A module of the hook that needs no jax."""
    spec = importlib.util.spec_from_file_location(name, HOOK / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Kind(SimpleNamespace):
    """A kind of calls."""

    __hash__ = object.__hash__


class Recorder:
    """A sequence of calls, each of which takes what named ones made last."""

    def __init__(self) -> None:
        self.steps = hook("step_search")
        self.sequence, self.last, self.kinds = [], {}, {}

    def call(
        self, name: str, *takes: str, into: str = "", flops: float = 1.0, size: int = 0
    ) -> None:
        """Calls a function; ``into``: the name of what it makes, its own by default; ``size``: bytes of its arguments."""
        kind = self.kinds.setdefault(name, Kind(key=(name,), name=name, source="", flops=flops))
        born = frozenset(self.last.get(one, -1) for one in takes)
        ids = [(len(self.sequence), size)] if size else []
        after = born - {-1}
        now = SimpleNamespace(ids=ids, links=(frozenset(), born), after=after, held={}, taken=set())
        self.last[into or name] = len(self.sequence)
        self.sequence.append(self.steps.RecordedCall(kind, 0.0, 0, now))

    def step(self):
        """The step, as the names of its calls; and what comes with some steps: name, calls, steps."""
        length = self.steps.period(self.sequence)
        found = self.steps.within(self.sequence, length)
        names = [self.sequence[n].call.name for n in found.numbers]
        rare = [(self.sequence[n].call.name, *more) for n, *more in found.periodic]
        return names, sorted(rare)


def test_calls_that_come_with_some_steps_alone() -> None:
    made = Recorder()
    for step in range(24):
        made.call("batch")
        made.call("train", "train", "batch")
        made.call("metrics", "train")
        if step % 2:
            made.call("log", "train")
        if step % 6 == 5:
            for _ in range(3):
                made.call("evaluate", "train", "evaluate")
    rare = [("evaluate", 3, 6), ("log", 1, 2)]
    assert made.step() == (["batch", "train", "metrics"], rare)


def test_an_evaluation_after_some_steps_is_no_step() -> None:
    made = Recorder()
    for _ in range(2):
        made.call("train", "train")
        made.call("move", "train", into="train")
    for _ in range(50):
        made.call("evaluate", "train", "evaluate")
    assert made.step() == (["train", "move"], [])


def test_episodes_that_a_step_takes_are_a_part_of_it() -> None:
    made = Recorder()
    for _ in range(3):
        for _ in range(6):
            made.call("act", "train", "act")
        made.call("train", "train", "act")
    assert made.step() == (["act"] * 6 + ["train"], [])


def test_a_generator_after_five_critics_is_one_step() -> None:
    made = Recorder()
    for _ in range(3):
        for _ in range(5):
            made.call("critic", "critic", "generator")
        made.call("generator", "generator", "critic")
    assert made.step() == (["critic"] * 5 + ["generator"], [])


def test_layers_that_are_called_one_by_one_are_one_step() -> None:
    made = Recorder()
    for _ in range(3):
        made.last.pop("x", None)  # a new batch
        for _ in range(4):
            made.call("layer", "x", into="x")
        made.call("head", "x", flops=10.0)
    assert made.step() == (["layer"] * 4 + ["head"], [])


def test_many_layers_with_a_small_head_are_one_step() -> None:
    made = Recorder()
    for _ in range(3):
        made.last.pop("x", None)
        for _ in range(24):
            made.call("layer", "x", into="x")
        made.call("head", "x", flops=0.5)
    assert made.step() == (["layer"] * 24 + ["head"], [])


def test_what_fills_a_buffer_is_no_step() -> None:
    made = Recorder()
    for _ in range(40):
        made.call("fill", "fill", flops=0.0)
    for _ in range(40):
        made.call("train", "train", "fill")
    assert made.step() == (["train"], [])


def test_gradients_of_several_batches_are_one_step() -> None:
    made = Recorder()
    for _ in range(3):
        for _ in range(4):
            made.call("gather", "update", "gather")
        made.call("update", "update", "gather")
        made.last.pop("gather")
    assert made.step() == (["gather"] * 4 + ["update"], [])


def test_what_the_calls_of_a_step_wait_for() -> None:
    made = Recorder()
    for step in range(20):
        made.call("first", "first", *["second"] * (step % 10 == 9))  # the host reads now and then
        for _ in range(2):
            made.call("second", "first", "second")
        if step == 2:
            made.last["initial"] = made.last["first"]
        made.call("last", "second", "initial")
    waits = made.steps.waits(made.sequence, range(76, 80))
    assert list(map(sorted, waits)) == [[(0, 1)], [(0, 0), (2, 1)], [(0, 0), (1, 0)], [(2, 0)]]
    # What is taken two steps later, as where the host reads a loss behind the next call.
    late = Recorder()
    for step in range(20):
        late.call("train", "train", *["read"] * (step > 1))
        late.last["read"] = len(late.sequence) - 2
    assert made.steps.waits(late.sequence, [19]) == [{(0, 1), (0, 2)}]


def call(program: int, seconds: float, devices: str, *after: tuple[int, int]) -> DeviceCall:
    """A call on devices that letters name."""
    on = frozenset((ord(letter),) for letter in devices)
    return DeviceCall(program=program, seconds=seconds, devices=on, after=after)


@pytest.mark.parametrize(
    ("calls", "seconds", "busy"),
    [
        ([call(0, 1, "ab"), call(1, 2, "ab", (0, 0))], 3, 3),
        ([call(0, 1, "a", (0, 1)), call(1, 2, "b", (1, 1))], 2, 2),
        ([call(0, 1, "a", (1, 1)), call(1, 2, "b", (0, 0))], 3, 2),
        # A pipeline: each step's second stage runs beside the next one's first.
        ([call(0, 1, "a"), call(1, 2, "b", (0, 0))], 2, 2),
        # What spans both waits for both.
        ([call(0, 1, "a"), call(1, 2, "b"), call(2, 1, "ab", (0, 0), (1, 0))], 3, 3),
        ([call(0, 1, "a"), call(1, 2, "a"), call(2, 2.5, "b")], 3, 3),
    ],
)
def test_a_schedule_by_hand(calls: list[DeviceCall], seconds: float, busy: float) -> None:
    made = schedule(calls)
    assert made.seconds == pytest.approx(seconds)
    assert made.busy == pytest.approx(busy)


@pytest.mark.parametrize(("size", "listed"), [(10**9, True), (10**6, False)])
def test_a_rare_call_without_flops_is_listed_by_its_bytes(size: int, listed: bool) -> None:
    """An average of weights every fourth step: 1e9 bytes count as 1e11 FLOPs, a quarter of the four steps'."""
    made = Recorder()
    for step in range(24):
        made.call("train", "train", flops=1e11)
        if step % 4 == 3:
            made.call("average", "average", "train", flops=0.0, size=size)
    assert made.step() == (["train"], [("average", 1.0, 4.0)] if listed else [])


@given(
    st.lists(st.sampled_from("abcd"), min_size=2, max_size=8),
    st.integers(0, 4),
    st.integers(2, 4),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_step_is_sought_among_calls(
    word: list[str], prefix: int, every: int, more: int, evaluates: bool
) -> None:
    """What is repeated three times or more, whatever its end repeats, what was called before, and what comes with some."""
    size = len(word)
    assume(len(set(word)) > 1)
    assume(not any(word == word[:part] * (size // part) for part in range(1, size)))
    made = Recorder()
    for _ in range(prefix):
        made.call("initialize")
    for step in range(1, 3 * every + more + 1):
        for name in word:
            made.call(name, "state", into="state")
        if evaluates and step % every == 0:
            made.call("evaluate", "state", flops=9.0)
    names, rare = made.step()
    assert names in [word[turn:] + word[:turn] for turn in range(size)]
    assert rare == ([("evaluate", 1, every)] if evaluates else [])


@given(st.lists(st.sampled_from("ab"), max_size=40), st.integers(1, 9))
def test_what_the_last_calls_repeat_by_comparing_all(names: list[str], least: int) -> None:
    """Where nothing is handed on it is the shortest square at the end, as all of them compared have it."""
    made = Recorder()
    for name in names:
        made.call(name)
    squares = [
        length
        for length in range(least, len(names) // 2 + 1)
        if names[-length:] == names[-2 * length : -length] and len(names) > 2
    ]
    assert made.steps.period(made.sequence, least) == min(squares, default=None)


def test_a_step_of_thousands_of_calls() -> None:
    made = Recorder()
    for _ in range(3):
        for _ in range(3000):
            made.call("gather", "update", "gather")
        made.call("update", "update", "gather", flops=3000.0)
    assert made.steps.period(made.sequence) == 3001
    names, _ = made.step()
    assert names == ["gather"] * 3000 + ["update"]
    share, others = made.steps.left_out(
        made.sequence, made.steps.CalledStep([len(made.sequence) - 2])
    )
    assert (share, others) == (0.5, {"update": 3})


def test_runs_that_begin_anew_are_no_step() -> None:
    """Three runs of a loop, each from weights of its own: nothing is handed on from one to the next."""
    made = Recorder()
    for _ in range(3):
        made.call("initialize", into="train")
        for _ in range(20):
            made.call("train", "train")
    assert made.step() == (["train"], [])


def test_threads_are_sequences_of_their_own() -> None:
    made = Recorder()
    for step in range(40):
        for name in ["act", "act", "learn"] if step % 3 else ["learn", "act", "act"]:
            made.call(name, name, *["act"] * (name == "learn"))
            made.sequence[-1].thread = name
            made.sequence[-1].call.devices = frozenset([name])
    threads = made.steps.of_threads(made.sequence)
    assert [thread.length for thread in threads] == [1, 1]
    step = made.steps.beside_each_other(threads)
    assert sorted(made.sequence[n].call.name for n in step.numbers) == ["act", "act", "learn"]
    made.kinds["act"].devices = made.kinds["learn"].devices
    assert not made.steps.of_threads(made.sequence)
