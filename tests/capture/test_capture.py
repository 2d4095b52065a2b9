"""Programs that know nothing of Systolic, each in a process of its own, with the real compiler."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from systolic.capture import capture
from systolic.chips import slice
from systolic.cli.main import main
from systolic.compiling.gpu_compiler import compiler
from systolic.core.errors import NotFoundError, OptionError, RunError
from systolic.core.units import Origin
from systolic.forecasting import forecast_text
from systolic.forecasting.captured import forecast_captured
from systolic.forecasting.display.trace import trace
from systolic.sim.network import default_places
from systolic.sim.timeline import Resource

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "answer"
    made.mkdir()
    return made


EXAMPLE = ROOT / "examples/plain_trainer.py"


def command_of(program: str, tmp_path: Path) -> list[str]:
    """A program outside of the tests: those inside are forked from a process that has jax already.

    Those of ``forked_program`` are too, from one in which the hook has seen its import.
    """
    return [sys.executable, str(shutil.copy(PROGRAMS / program, tmp_path / program))]


def told(capsys, monkeypatch, *words: str) -> dict:
    """JSON of ``systolic forecast``."""
    monkeypatch.chdir(ROOT)
    assert main(["forecast", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_of_the_page_and_the_example(capsys, monkeypatch, tmp_path: Path) -> None:
    page = (ROOT / "docs/your-own-program.md").read_text()
    (line,) = re.findall(r"^systolic (forecast .*plain_trainer.*)$", page, re.MULTILINE)
    assert line in (ROOT / "examples/plain_trainer.py").read_text()
    words = [sys.executable if word == "python" else word for word in shlex.split(line)[1:]]
    kept = tmp_path / "kept"
    began = time.perf_counter()
    made = told(capsys, monkeypatch, "--json", "--quick", "--keep", str(kept), *words)
    assert time.perf_counter() - began < 120
    assert made["recipe"] == "train_step"
    assert made["hbm"]["origin"] == "compiled"
    assert made["compiler"]["libtpu"]
    # Weights in float32 on every device, twelve matrices of width x width a layer and an embedding of bytes.
    weights = 4 * 512 * (4 * 12 * 512 + 256)
    assert made["hbm"]["by_kind"]["inputs"] == pytest.approx(weights, rel=0.01)
    assert made["hbm"]["peak_bytes"] > weights
    # By hand: six FLOPs a weight and token, and attention's two matmuls, forward and twice backward.
    matmuls = 6 * weights / 4 * 32 * 512 + 3 * 4 * 4 * 32 * 512 * 512 * 512
    flops = 197e12 * made["hfu"] * made["step_seconds"] * 8
    assert flops == pytest.approx(matmuls, rel=0.35)
    assert made["step_seconds"] > flops / (8 * 197e12)
    # The kept text says the same when it is forecast as any dump, whose device order is JAX's: as this mesh has it.
    again = forecast_text(kept / "program0.txt", slice("v5e-8")).to_json()
    assert again["step_seconds"] == pytest.approx(made["step_seconds"])
    assert again["hbm"]["peak_bytes"] == made["hbm"]["peak_bytes"]


@pytest.mark.usefixtures("forked_program")
def test_a_batch_of_a_mesh_with_explicit_axes_stays_split(tmp_path: Path, folder: Path) -> None:
    on = slice("v5e-8")
    captured = capture(command_of("explicit_mesh.py", tmp_path), on, folder, quick=True)
    forecast = forecast_captured(captured, on)
    assert forecast.memory is not None
    assert forecast.memory.peak_bytes < 8 * 4096 * 1024 * 4  # no device has the whole batch
    # Three matmuls of its own rows at the peak, and an all-reduce of the gradient.
    matmuls = 3 * 2 * 4096 * 1024 * 1024 / 197e12
    assert matmuls < (forecast.step_seconds or 0) < 3 * matmuls


@pytest.mark.usefixtures("forked_program")
@pytest.mark.parametrize(
    ("program", "calls"),
    [
        ("many_batches.py", {"gradient": 24, "add": 23, "update": 1}),
        ("logging_norms.py", {"train_step": 1}),
    ],
)
def test_a_step_is_what_changes_the_weights(
    tmp_path: Path, folder: Path, program: str, calls: dict[str, int]
) -> None:
    captured = capture(command_of(program, tmp_path), slice("v5e-1"), folder, quick=True)
    assert {one.name: one.calls_per_step for one in captured.programs} == calls


@pytest.mark.usefixtures("forked_program")
def test_gradients_that_are_gathered_outside_of_jit(tmp_path: Path, folder: Path) -> None:
    on = slice("v5e-8")
    captured = capture(command_of("accumulating.py", tmp_path), on, folder, quick=True)
    assert [(one.name, one.calls_per_step) for one in captured.programs] == [
        ("gradient", 4),
        ("jit(move)", 1),
    ]
    made = forecast_captured(captured, on)
    one, other = (forecast_text(folder / f"program{n}.txt", on) for n in (0, 1))
    # jax.make_mesh walks the torus in a ring, and the program's device order is not JAX's default.
    places = captured.programs[0].places
    assert sorted(places) == sorted(default_places(on))
    assert places != default_places(on)
    assert made.step_seconds is not None
    assert one.step_seconds is not None
    assert other.step_seconds is not None
    assert 0.5 * (4 * one.step_seconds) < made.step_seconds < 2 * (4 * one.step_seconds)
    assert made.step_seconds > other.step_seconds
    assert sum(made.time_by_resource.values()) == pytest.approx(made.step_seconds)
    assert made.hardware_flops == pytest.approx(4 * 2 * 2 * 64 * 1024 * 1024, rel=0.01)
    # Three additions for each four batches, and the mean of every tenth step.
    assert 3 <= captured.answer.operations_per_step <= 6


def test_a_program_on_one_device_that_catches_all_errors(tmp_path: Path, folder: Path) -> None:
    on = slice("v5e-8")
    captured = capture(command_of("single.py", tmp_path), on, folder, quick=True)
    made = forecast_captured(captured, on)
    assert made.recipe == "step"
    assert "runs on one of the 8 devices" in made.cautions[0]
    # Eight weight matmuls less the first one's gradient of its input, of which one device does all.
    by_hand = (3 * 4 - 1) * 2 * 256 * 2048 * 2048
    assert 8 * made.hardware_flops == pytest.approx(by_hand, rel=0.01)
    assert captured.answer.ended == "stopped when its step had repeated"


@pytest.mark.usefixtures("forked_program")
def test_a_ring_over_slices_and_a_flag_that_came_late(tmp_path: Path, folder: Path) -> None:
    on = slice("2xv5e-8")
    captured = capture(command_of("ring_of_slices.py", tmp_path), on, folder, quick=True)
    forecast = forecast_captured(captured, on)
    # One device of each slice sends its 16 MiB to the other slice, as fast as its chip's PCIe goes.
    assert forecast.timeline is not None
    sent = [s.seconds for s in forecast.timeline.spans if s.lane == "dcn" and s.bytes]
    assert sent == pytest.approx([512 * 8192 * 4 / 15e9] * 2)
    # libtpu read its variable when it was loaded, and compiled without the flag.
    assert forecast.compiler.flags == []
    (late,) = [line for line in forecast.cautions if "LIBTPU_INIT_ARGS" in line]
    assert "was compiled with no flags" in late


@pytest.mark.usefixtures("forked_program")
@pytest.mark.parametrize(
    ("name", "processes", "slices"),
    [
        pytest.param("v5e-8", 1, 1, marks=pytest.mark.slow),
        pytest.param("v5e-16", 4, 1, marks=pytest.mark.slow),
        ("2xv5e-8", 2, 2),
    ],
)
def test_a_program_of_several_processes(
    name: str, processes: int, slices: int, tmp_path: Path, folder: Path, capfd
) -> None:
    on = slice(name)
    captured = capture(command_of("processes.py", tmp_path), on, folder, quick=True)
    made = forecast_captured(captured, on)
    assert f"{processes} processes, batch ({32 * on.num_devices}, 2048)" in capfd.readouterr().err
    (program,) = captured.programs
    assert program.mesh == {"slice": slices, "data": on.num_devices // slices}
    assert len({place[4] for place in program.places}) == slices
    # By hand: a matmul forward and one for the weights' gradient, of 32 examples on each device.
    assert made.hardware_flops == pytest.approx(2 * 2 * 32 * 2048 * 2048, rel=0.01)
    assert (made.time_by_resource["dcn"] > 0) == (slices > 1)
    assert any(f"first of {processes} processes" in note for note in made.notes) == (processes > 1)


@pytest.mark.usefixtures("forked_program")
@pytest.mark.parametrize("name", ["v5e-8", pytest.param("2xv5e-16", marks=pytest.mark.slow)])
def test_a_program_of_pmap(name: str, tmp_path: Path, folder: Path, capfd) -> None:
    on = slice(name)
    captured = capture(command_of("pmapped.py", tmp_path), on, folder, quick=True)
    made = forecast_captured(captured, on)
    own = on.num_devices // on.num_hosts
    assert f"process 0 of {on.num_hosts}, {own} of {on.num_devices}" in capfd.readouterr().err
    (program,) = captured.programs
    assert (program.name, program.mesh) == ("train_step", {"batch": on.num_devices})
    # By hand: two matmuls, forward and twice backward less the gradient of the batch, of 32 examples on each device.
    assert made.hardware_flops == pytest.approx((3 * 2 - 1) * 2 * 32 * 1024 * 1024, rel=0.01)
    assert made.memory is not None
    weights = 2 * 4 * 1024 * 1024
    assert weights < made.memory.by_kind["inputs"] < 1.05 * weights
    # The gradients are summed over all devices: each takes in all but its own part of them.
    assert made.exposed_collective_seconds > weights / 200e9


@pytest.mark.usefixtures("forked_program")
def test_functions_that_initialize_one_array_after_the_other_are_no_step(
    tmp_path: Path, folder: Path
) -> None:
    captured = capture(command_of("initializing.py", tmp_path), slice("v5e-8"), folder, quick=True)
    assert [one.name for one in captured.programs] == ["gradient"]
    assert {one.name: one.calls for one in captured.answer.others} == {
        "make": 60,
        "cast": 60,
    }
    assert not captured.answer.lent_compiler


@pytest.mark.usefixtures("forked_program")
def test_a_step_that_is_named_and_one_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/plain_trainer.py"), "--steps", "2"]
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    found = capture(command, slice("v5e-8"), first, step="init", quick=True)
    assert [one.name for one in found.programs] == ["init"]
    assert [one.name for one in found.answer.others] == ["train_step"]
    with pytest.raises(RunError, match="no jitted function fit; it calls init, train_step"):
        capture(command, slice("v5e-8"), second, step="fit")


@pytest.mark.usefixtures("forked_program")
@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("failing.py", "failed before its step was known: KeyError: 'no such data set'"),
        ("eager.py", "called no jitted function on the slice"),
    ],
)
def test_programs_without_a_step(
    program: str, says: str, capfd, tmp_path: Path, folder: Path
) -> None:
    with pytest.raises(RunError, match=says):
        capture(command_of(program, tmp_path), slice("v5e-8"), folder)
    if program == "failing.py":
        shown = capfd.readouterr().err
        assert "8 tpu" in shown  # the slice's devices, on a machine without a TPU
        assert "Traceback" in shown


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([sys.executable, "-c", "pass"], "ended with exit code 0 and imported no jax"),
        (["env", sys.executable, "-I", "-c", "pass"], "no Python that reads PYTHONPATH; start Py"),
        ([sys.executable, "no-such.py"], "exit code 2 before it imported jax; its own error is ab"),
        ([sys.executable, str(EXAMPLE), "--layerz", "3"], "exit code 2 before it called a jitted"),
        (["false"], "exit code 1 and started no Python .* its own error is above"),
    ],
)
def test_programs_that_never_come_to_jax(command: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=says):
        capture(command, slice("v5e-8"), tmp_path)


def test_lines_that_ask_for_the_impossible(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"8xl4 has no description for its compiler; .*8xh100"):
        capture(["python", "x.py"], slice("8xl4"), tmp_path)
    with pytest.raises(OptionError, match="cpu is a CPU; programs are captured for slices of"):
        capture(["python", "x.py"], slice("cpu"), tmp_path)
    with pytest.raises(OptionError, match="no command after --"):
        capture([], slice("v5e-8"), tmp_path)
    with pytest.raises(NotFoundError, match="there is no command 'no-such-python'"):
        capture(["no-such-python", "x.py"], slice("v5e-8"), tmp_path)


HIDDEN = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "libtpu" else find(name, *rest)
sys.modules["libtpu"] = None
"""
"""Hides an environment's libtpu from the program that follows."""


def test_an_environment_without_libtpu_is_lent_ours(tmp_path: Path, folder: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(HIDDEN + (PROGRAMS / "single.py").read_text())
    on = slice("v5e-8")
    captured = capture([sys.executable, str(program)], on, folder, quick=True)
    made = forecast_captured(captured, on)
    assert captured.answer.lent_compiler
    assert "has no libtpu, and libtpu 0." in made.notes[0]
    assert made.memory_origin is Origin.compiled
    assert 8 * made.hardware_flops == pytest.approx(11 * 2 * 256 * 2048 * 2048, rel=0.01)


WITHOUT_PLUGIN = (
    HIDDEN.replace('name == "libtpu"', 'name.startswith("jax_plugins.")')
    + "sys.modules.pop('libtpu')\n"
)
"""Hides an environment's CUDA plugin."""


@pytest.mark.skipif(compiler() is None, reason="needs the extra gpu-forecast, of 174 MB")
@pytest.mark.parametrize("hidden", ["", WITHOUT_PLUGIN])
def test_a_trainer_is_captured_for_gpus_of_two_hosts(
    hidden: str, tmp_path: Path, folder: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(hidden + (PROGRAMS / "gpus.py").read_text())
    on = slice("16xh100")
    captured = capture([sys.executable, str(program)], on, folder)
    made = forecast_captured(captured, on)
    assert captured.answer.lent_compiler == bool(hidden)
    (step,) = captured.programs
    assert (step.places, step.mesh) == ([(n,) for n in range(16)], {"data": 2, "fsdp": 8})
    text = (folder / step.text).read_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text  # attention is the kernel that a GPU has
    assert "all-reduce-start" in text
    # By hand: the weight in float32, and 4 of the 64 sequences of 2,048 tokens in bfloat16.
    assert made.memory.by_kind["inputs"] == 4 * 1024**2 + 2 * 4 * 2048 * 1024
    assert made.memory_origin is Origin.compiled
    # Two matmuls with the weight; of attention two forward and five backward, under the diagonal.
    flops = 2 * 2 * 8192 * 1024**2 + 7 * 2 * 4 * 16 * 64 * 2048**2 / 2
    assert made.hardware_flops == pytest.approx(flops, rel=0.1)
    assert made.step_seconds > flops / 989.4e12
    events = trace(made, made.timeline)["traceEvents"]
    bounds = {event["args"]["bound by"] for event in events if "bound by" in event.get("args", {})}
    assert (
        {"tensor", "memory", "network"} <= bounds <= {"tensor", "f32", "memory", "network", "idle"}
    )
    network = [
        span for span, _ in made.timeline.leaves() if span.resource is Resource.dcn and span.seconds
    ]
    assert max(span.bytes for span in network) == pytest.approx(2 * 15 / 16 * 2 * 1024**2, rel=0.01)


@pytest.mark.skipif(compiler() is None, reason="needs the extra gpu-forecast, of 174 MB")
def test_what_a_launcher_and_a_pool_would_change_is_told(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "16")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.0005")
    program = tmp_path / "train.py"
    program.write_text((PROGRAMS / "gpus.py").read_text())
    on = slice("16xh100")
    made = forecast_captured(capture([sys.executable, str(program)], on, folder), on)
    launched, pool = made.cautions[:2]
    assert launched.startswith(
        "SLURM_NTASKS says 16 processes, and the program ran as the first of 2"
    )
    assert "XLA takes 0% of a GPU's memory, 40.5 MiB, less than this needs" in pool
    assert "set XLA_PYTHON_CLIENT_MEM_FRACTION=0.0" in pool


def test_a_program_that_names_other_processes_is_told_of_them(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train.py"
    start = "import jax\njax.distributed.initialize('localhost:1', num_processes=8, process_id=0)\n"
    program.write_text(start + (PROGRAMS / "single.py").read_text())
    monkeypatch.setenv("SLURM_NTASKS", "1")  # a shell's, which launches nothing
    captured = capture([sys.executable, str(program)], slice("v5e-16"), folder, quick=True)
    (caution, *others) = captured.answer.cautions
    assert not any("SLURM" in other for other in others)
    assert "says 8 processes, and the program ran as the first of 4" in caution


@pytest.mark.skipif(compiler() is not None, reason="the extra gpu-forecast is here")
def test_without_a_compiler_for_gpus_the_program_is_told_what_to_install(tmp_path: Path) -> None:
    says = r"has no CUDA plugin of jax .*-m pip install 'jax\[cuda12-local\]=="
    with pytest.raises(RunError, match=says):
        capture([sys.executable, "-c", "import jax"], slice("8xh100"), tmp_path)


def test_without_any_libtpu_the_program_is_told_what_to_install(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("systolic.capture.program.own_libtpu", lambda: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)  # which libtpu sets on import
    with pytest.raises(RunError, match=r"has no libtpu.*-m pip install 'jax\[tpu\]=="):
        capture([sys.executable, "-c", HIDDEN + "import jax"], slice("v5e-8"), tmp_path)


def test_another_sitecustomize_still_runs(tmp_path: Path, monkeypatch, capfd) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the own one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = tmp_path / "answer"
    folder.mkdir()
    with pytest.raises(RunError):
        capture([sys.executable, "-c", "pass"], slice("v5e-8"), folder)
    assert "the own one" in capfd.readouterr().err


def test_a_program_ends_with_a_killed_parent(tmp_path: Path) -> None:
    marker = tmp_path / "running"
    program = f"import jax, pathlib, time; pathlib.Path({str(marker)!r}).touch(); time.sleep(60)"
    words = ["forecast", "--on", "v5e-8", "--", sys.executable, "-c", program]
    process = subprocess.Popen(
        [sys.executable, "-m", "systolic", *words],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    began = time.monotonic()
    while not marker.exists():
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    process.kill()
    process.wait()
    while is_running(str(marker)):
        assert time.monotonic() - began < 60
        time.sleep(0.05)


def is_running(word: str) -> bool:
    """Whether a process has a word in its command line."""
    listed = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    return word in listed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_program_with_or_without_the_hook(
    number: int, code: int, tmp_path: Path
) -> None:
    marker = tmp_path / "running"
    program = f"import pathlib, time; pathlib.Path({str(marker)!r}).touch(); time.sleep(60)"
    unhooked = ["env", "-u", "PYTHONPATH"] if number == signal.SIGTERM else []
    kept = tmp_path / "kept"
    if number == signal.SIGTERM:
        kept.mkdir()
    options = ["--on", "v5e-8", "--keep", str(kept)]
    words = ["forecast", *options, "--", *unhooked, sys.executable, "-c", program]
    process = subprocess.Popen(
        [sys.executable, "-m", "systolic", *words],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    began = time.monotonic()
    while not marker.exists():
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    assert not is_running(str(marker))
    # The next run takes the folder again.
    assert kept.exists() == (number == signal.SIGTERM)
    assert not kept.exists() or not list(kept.iterdir())


def test_a_program_that_python_reads_from_its_input(tmp_path: Path) -> None:
    program = "import jax\nw = jax.numpy.ones((256, 256))\nf = jax.jit(lambda w: w @ w)\nfor _ in range(5): w = f(w)\n"
    words = ["forecast", "--on", "v5e-1", "--quick", "--json", "--", sys.executable, "-", "a b"]
    process = subprocess.run(
        [sys.executable, "-m", "systolic", *words], input=program, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["recipe"] == "lambda at <stdin>:3"
    assert f"{sys.executable} - 'a b' for v5e-1: starting" in process.stderr


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    keep = tmp_path / "file" / "keep"
    words = ["forecast", "--on", "v5e-8", "--keep", str(keep), "--", sys.executable, "-c", "1"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--keep {keep} can't be written (Not a directory); give a folder" in line


def test_a_program_that_calls_nothing_is_stopped_at_its_limit(tmp_path: Path, folder: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import time\nimport jax\ntime.sleep(600)\n")
    with pytest.raises(RunError, match=r"was stopped after 0\.0167 minutes and called no jitted"):
        capture([sys.executable, str(script)], slice("v5e-1"), folder, limit_seconds=1)


def test_a_program_that_is_ended_at_its_limit_has_no_exit_code(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("systolic.capture.program.GRACE_SECONDS", 0)
    with pytest.raises(RunError, match=r"was ended at its time limit and had imported no jax"):
        capture(["sleep", "60"], slice("v5e-1"), folder, limit_seconds=1)


@pytest.mark.parametrize("flag", ["-I", "-OE", "-S"])
def test_a_python_without_the_hook_is_refused(folder: Path, flag: str) -> None:
    with pytest.raises(OptionError, match=f"leave out {flag}"):
        capture(["python3", "-X", "dev", flag, "train.py"], slice("v5e-1"), folder)


def test_a_program_that_fails_after_its_step_says_so(tmp_path: Path) -> None:
    program = "import jax, sys; w = jax.numpy.ones((256, 256)); f = jax.jit(lambda w: w @ w)\nfor _ in range(5): w = f(w)\nraise ValueError(3)"
    captured = capture([sys.executable, "-c", program], slice("v5e-1"), tmp_path, quick=True)
    assert captured.answer.ended == "failed"
