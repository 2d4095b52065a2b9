"""The program under capture: its process, its stages and its answer.

Its events and its answer are what the hook writes, plain Python of any version; files that an earlier one wrote may
lack fields that have a default here.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from systolic.chips import Slice
from systolic.chips.flags import compile_options
from systolic.compiling import gpu_compiler
from systolic.compiling.settings import QUIET
from systolic.core.errors import NotFoundError, OptionError, RunError
from systolic.core.machine import flags_of_user
from systolic.core.shutdown import ends_cleanly

HOOK = Path(__file__).parent / "hook"
"""Folder that Python finds its ``sitecustomize`` in."""
VARIABLE = "SYSTOLIC_CAPTURE"
PARENT = "parent.lock"
"""File in the folder that is locked while this process lives."""
LIMIT_SECONDS = 1200.0
"""Seconds that a program may take to its step by default."""
GRACE_SECONDS = 3600.0
"""Seconds for the compiler beside it."""
POLL_SECONDS = 0.1
UNSEEN_SECONDS = 60.0
"""Seconds after which a program that has started no Python with the hook is said to run without it."""
STDERR = 2
"""Descriptor, which is there where ``sys.stderr`` is replaced, as in a notebook."""

ANSWER, EVENTS = "answer.json", "events.jsonl"
"""Files in the folder of a capture."""

Say = Callable[[str], None]


class CaptureEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Event of a program under capture; None for what it does not tell."""

    stage: str | None = None
    refused: str | None = None
    """Why its environment can't compile for the slice."""
    next: str | None = None
    """Command that cures that."""
    failed: str | None = None
    """Error of the compiler."""
    program_failed: str | None = None
    """Error of the program, before its step was known."""
    ours: bool | None = None
    """Whether that is a fault of the capture."""
    called: list[str] | None = None
    """Jitted functions that it had called."""
    without_calls: str | None = None
    """How a program ended that called no jitted function on the slice."""


class OpenLoop(msgspec.Struct, frozen=True):
    """Loop of unknown length in a program as it is written."""

    source: str
    """``file.py:12``; empty where it is not known."""
    times: float
    """Runs of the loop."""
    flops: float
    """FLOPs of one trip, without those of inner loops."""
    loops: list["OpenLoop"]


class HeldBytes(msgspec.Struct, frozen=True):
    """Most bytes that a program holds beside the arguments of a call."""

    bytes: int
    """On a device of the call."""
    other_bytes: int
    """On another device of the slice."""
    host_bytes: int
    """In the memory of a host."""


class HeldArray(msgspec.Struct, frozen=True):
    """Array that a program holds beside its step."""

    bytes: int
    memory: str
    """``device``, or a kind of a host's memory."""
    shape: list[int] = []
    dtype: str = ""
    made_by: str = ""
    """Function that made it."""


class CapturedProgram(msgspec.Struct, frozen=True, kw_only=True):
    """Jitted function that a program calls, compiled for the slice."""

    name: str
    text: str
    """File of its scheduled module."""
    refused: str
    """The compiler's words where it does not fit."""
    flops: float
    """FLOPs of its matmuls as written, with one trip of each loop of unknown length."""
    flops_are_least: bool
    needed_flops: float = 0.0
    """FLOPs that its results need."""
    open_loops: list[OpenLoop] = []
    places: list[tuple[int, ...]]
    """(x, y, z, core, slice) of each device."""
    copies: int = 1
    """Processes that each run it on devices of their own."""
    mesh: dict[str, int] = {}
    """Axis to size of its mesh, outermost first; empty where its device order is another."""
    seconds: dict[str, float]
    """Seconds by stage of its compile."""
    held: HeldBytes
    calls_per_step: int = 0
    """0 of a program that is no part of each step."""
    calls: int | float = 0
    """Calls with some steps, every so many."""
    every: int | float = 0


class CapturedCall(msgspec.Struct, frozen=True):
    """Call of a step."""

    program: int
    """Its index among the programs of the step."""
    after: list[tuple[int, int]]
    """Calls that it waits for: the place in the step, and how many steps back."""


class OtherFunction(msgspec.Struct, frozen=True):
    """Jitted function beside the step."""

    name: str
    calls: int


class MovedBytes(msgspec.Struct, frozen=True):
    """Bytes of a device that are moved outside of jit from one step to the next, by way, and how often."""

    host: float = 0.0
    devices: float = 0.0
    slices: float = 0.0
    times: float = 0.0


class RareMoves(MovedBytes, frozen=True, kw_only=True):
    """Moves that come with some steps alone: those of one of these steps."""

    steps: int
    of: int
    """Steps that were recorded, of which ``steps`` have them."""
    every: float
    """Steps from one to the next."""


class ArrayMoves(MovedBytes, frozen=True, kw_only=True):
    """Moves of one cause, in the mean over the recorded steps."""

    some: RareMoves | None = None

    def without(self, some: RareMoves) -> MovedBytes:
        """Moves that come with each step."""
        names = MovedBytes.__struct_fields__
        return MovedBytes(
            **{name: getattr(self, name) - getattr(some, name) / some.every for name in names}
        )


class OutsidePeak(msgspec.Struct, frozen=True):
    """The most that a device holds outside of the recorded calls."""

    bytes: int = 0
    line: str = ""
    """Line of the program."""
    arrays: list[HeldArray] = []
    """The largest, where it is more than a device has."""


class CaptureAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Programs of a step, what lies between and beside them, and the environment that compiled them."""

    programs: list[CapturedProgram]
    """In the order of their first call."""
    order: list[CapturedCall]
    """Empty of a step that was never called."""
    periodic: list[CapturedProgram]
    """Programs that come with some steps alone."""
    beside: list[CapturedProgram] = []
    """Programs beside the step that may not fit."""
    held: list[HeldArray]
    """The largest arrays beside the step's."""
    others: list[OtherFunction]
    operations_per_step: float
    """Operations on the slice's arrays outside of jit."""
    moves: dict[str, ArrayMoves] = {}
    """By cause; empty where one step alone is known."""
    outside: OutsidePeak = OutsidePeak()
    ended: str
    """How the program ended."""
    notes: list[str]
    cautions: list[str]
    versions: dict[str, str | None]
    lent_compiler: bool = False
    """Whether the compiler is Systolic's, as the environment has none."""
    flags: str


def read_answer(folder: Path) -> CaptureAnswer:
    """Answer in the folder of a capture.

    Raises:
        RunError: it is damaged.
    """
    path = folder / ANSWER
    try:
        return msgspec.convert(json.loads(path.read_text()), CaptureAnswer)
    except (ValueError, msgspec.ValidationError) as error:
        raise _damaged(path, error) from error


def read_events(folder: Path) -> list[CaptureEvent]:
    """Events so far in the folder of a capture; a line that is being written is left for later.

    Raises:
        RunError: a line is damaged.
    """
    path = folder / EVENTS
    lines = path.read_text().split("\n")[:-1]
    try:
        return [msgspec.convert(json.loads(line), CaptureEvent) for line in lines]
    except (ValueError, msgspec.ValidationError) as error:
        raise _damaged(path, error) from error


def joined(events: Sequence[CaptureEvent]) -> CaptureEvent:
    """The last word of events on each of their fields."""
    fields: dict[str, Any] = {}
    for event in events:
        fields |= msgspec.to_builtins(event)
    return CaptureEvent(**fields)


def _damaged(path: Path, error: Exception) -> RunError:
    return RunError(f"{path} is damaged ({error}); run the command again")


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Compiled step of a program."""

    command: str
    """The program as it was started."""
    folder: Path
    """Folder of the texts and of ``answer.json``."""
    answer: CaptureAnswer

    @property
    def programs(self) -> Sequence[CapturedProgram]:
        """Programs that a step calls, in the order of their first call."""
        return self.answer.programs

    @property
    def order(self) -> Sequence[CapturedCall]:
        """Calls of a step in their order; of a step that was never called, one of its program."""
        return self.answer.order or [CapturedCall(program=0, after=[])]


def capture(
    command: Sequence[str],
    on: Slice,
    folder: Path,
    *,
    step: str = "",
    quick: bool = False,
    limit_seconds: float = LIMIT_SECONDS,
    watch: Say = lambda _: None,
) -> Captured:
    """Runs a program until its step is known, and compiles that for a slice.

    Args:
        command: The program and its arguments, as a shell would start it. Its input is this process's, its output goes to stderr.
        on: A slice of TPUs, or of GPUs that the catalogue describes to their compiler.
        folder: Existing and empty; for the answer.
        step: Name of the jitted function that is the step; by default what repeats.
        quick: Stop at the compiler's schedule, as always for GPUs.
        limit_seconds: Seconds after which what has been called is all there is.
        watch: Called with each stage.

    Raises:
        OptionError: no program is captured for the slice, or the command is none.
        NotFoundError: there is no such command.
        RunError: the program failed, called nothing, or its environment can't compile for the slice.
    """
    _check(command, on)
    gpu = on.platform == "gpu"
    request = CaptureRequest(
        slice=on.name,
        topology=gpu_compiler.topology(on) if gpu else _topology(on),
        gpu=_gpu(on) if gpu else None,
        num_hosts=on.num_hosts,
        device_bytes=on.program_bytes,
        compiler=own_plugin() if gpu else own_libtpu(),
        step=step,
        quick=quick or gpu,
        limit_seconds=limit_seconds,
        torus=list(zip(on.topology, on.wrap, strict=True)),
    )
    try:
        (folder / "request.json").write_bytes(msgspec.json.encode(request))
        (folder / EVENTS).touch()
    except OSError as error:
        raise RunError(
            f"{folder} can't be written ({error.strerror}); make room, or give another --keep"
        ) from error
    text = shlex.join(command)
    with (folder / PARENT).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the program ends when it is free
        with ends_cleanly():  # SIGTERM ends the program, too
            code = _run(command, folder, limit_seconds, watch)
    (folder / PARENT).unlink()
    if (folder / ANSWER).exists():
        return Captured(command=text, folder=folder, answer=read_answer(folder))
    raise RunError(_reason(read_events(folder), text, code, on))


def short_name(command: Sequence[str]) -> str:
    """A command without the program's own options: ``python train.py``, ``python -m package.train``."""
    end = next((n for n, word in enumerate(command) if n and not word.startswith("-")), 0)
    return shlex.join(command[: end + 1])


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """A slice as the compiler is asked for it."""

    topology_name: str | None
    chips_per_host_bounds: tuple[int, ...]
    chip_config_name: str | None
    num_slices: int | None


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that JAX tells of a GPU that is there."""

    compute_capability: str
    core_count: int
    cudnn_version: int
    pool_bytes: int
    """Bytes that XLA's allocator takes of its memory."""
    devices_per_host: int
    hosts_per_domain: int
    """Hosts that one NVLink network joins."""
    options: dict[str, str]
    """Options of a compile without the GPU."""


class CaptureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to the hook, in request.json, which the hook reads by these names."""

    slice: str
    topology: Topology | dict[str, str]
    """Description of the slice for the compiler, by its own names."""
    gpu: GpuFacts | None
    """None of a TPU."""
    num_hosts: int
    device_bytes: int
    compiler: "OwnCompiler | None"
    step: str | None
    quick: bool
    limit_seconds: float
    torus: list[tuple[int, bool]]


def _topology(on: Slice) -> Topology:
    config = on.chip_config_name
    return Topology(
        topology_name=on.topology_name,
        chips_per_host_bounds=_host_bounds(on),
        chip_config_name=None if config in (None, "default") else config,
        num_slices=on.num_slices if on.num_slices > 1 else None,
    )


def _gpu(on: Slice) -> GpuFacts:
    per_host = on.num_devices // on.num_hosts
    chip = on.chip
    assert chip.compute_capability is not None
    assert chip.num_sms is not None
    return GpuFacts(
        compute_capability=chip.compute_capability,
        core_count=chip.num_sms,
        cudnn_version=gpu_compiler.CUDNN_VERSION,
        pool_bytes=round(gpu_compiler.pool_bytes(chip)),
        devices_per_host=per_host,
        hosts_per_domain=max((chip.max_pod_chips or per_host) // per_host, 1),
        options=compile_options(gpu_compiler.FLAGS, "gpu"),
    )


def _check(command: Sequence[str], on: Slice) -> None:
    """Refuses a slice without a compiler, an empty command, and a Python that is told to leave out what PYTHONPATH names, as the hook would be."""
    if on.platform == "cpu" or (on.platform == "gpu" and not gpu_compiler.is_described(on.chip)):
        why = "has no description for its compiler" if on.platform == "gpu" else "is a CPU"
        raise OptionError(
            f"{on.name} {why}; programs are captured for slices of TPUs and of GPUs such as 8xh100; give a recipe or a function instead"
        )
    if not command:
        raise OptionError("there is no command after --; add one, such as -- python train.py")
    name, *words = command
    if not Path(name).name.startswith("python"):
        return
    rest = iter(words)
    for word in rest:
        if word in ("-X", "-W"):
            next(rest, "")  # what they take
            continue
        if not word.startswith("-") or word.startswith(("--", "-m", "-c")):
            return
        if set("IES") & set(word[1:]) and not word.startswith(("-X", "-W")):
            raise OptionError(
                f"{name} {word} leaves out the modules by which a program is captured; leave out {word}"
            )


def _host_bounds(on: Slice) -> tuple[int, ...]:
    """Chips of a host along each axis, by which libtpu numbers processes; a machine of eight chips is one of them."""
    if on.num_hosts == on.num_slices:
        return (*on.topology, 1, 1, 1)[:3]
    assert on.chips_per_host_bounds is not None
    return on.chips_per_host_bounds


class OwnCompiler(msgspec.Struct, frozen=True):
    """The compiler of this environment."""

    path: str
    version: str
    name: str = "libtpu"


def own_plugin() -> OwnCompiler | None:
    """JAX's CUDA plugin of this environment, by the folder of ``jax_plugins`` that has it; None without it."""
    if (installed := gpu_compiler.compiler()) is None:
        return None
    name, version = installed.split()
    distribution = importlib.metadata.distribution(name)
    return OwnCompiler(str(distribution.locate_file("jax_plugins")), version, name)


def own_libtpu() -> OwnCompiler | None:
    """Path and version of this environment's libtpu, for programs of environments without one; None without it."""
    try:
        distribution = importlib.metadata.distribution("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file("libtpu/libtpu.so")))
    return OwnCompiler(str(path), distribution.version) if path.is_file() else None


def _environment(folder: Path) -> dict[str, str]:
    variables = {**os.environ, **QUIET, VARIABLE: str(folder.resolve())}
    ours = own_libtpu()
    if ours is not None and Path(variables.get("TPU_LIBRARY_PATH", "")) == Path(ours.path):
        del variables["TPU_LIBRARY_PATH"]  # libtpu sets it on import, in a process that has jax
    if "XLA_FLAGS" in variables:
        variables["XLA_FLAGS"] = flags_of_user(variables["XLA_FLAGS"])
    variables["PYTHONUNBUFFERED"] = "1"  # its lines come in their order, beside ours
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def _run(command: Sequence[str], folder: Path, limit_seconds: float, watch: Say) -> int | None:
    """Runs the program to its end and reports stages; returns its exit code, None where it was ended at the limit."""
    try:
        process = subprocess.Popen(
            command,
            stdout=STDERR,
            env=_environment(folder),
            start_new_session=True,  # its own children end with it
        )
    except FileNotFoundError as error:
        raise NotFoundError(
            f"there is no command {command[0]!r}; give the program as the shell would start it, such as -- python train.py"
        ) from error
    except OSError as error:
        raise OptionError(
            f"{command[0]!r} could not be started ({error.strerror}); give the program as the shell would start it, such as -- python train.py"
        ) from error
    watch("starting the program")
    begin = time.monotonic()
    last = begin + limit_seconds + GRACE_SECONDS
    shown, unseen = 0, False
    try:
        while process.poll() is None and time.monotonic() < last:
            events = read_events(folder)
            for event in events[shown:]:
                if event.stage is not None:
                    watch(event.stage)
            shown = len(events)
            if not events and not unseen and time.monotonic() > begin + UNSEEN_SECONDS:
                unseen = True
                watch("running, without a Python that reads PYTHONPATH so far")
            time.sleep(POLL_SECONDS)
        return process.poll()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(events: Sequence[CaptureEvent], text: str, code: int | None, on: Slice) -> str:
    """Why there is no answer, on one line."""
    last = joined(events)
    if last.refused is not None:
        step = f"; run {last.next}" if last.next else ""
        return f"{last.refused}{step}"
    if last.failed is not None and "No space left on device" in last.failed:
        return f"compiling the step of {text} for {on.name} failed: the disk is full ({last.failed}); make room where temporary files or --keep lie"
    if last.failed is not None:
        return f"compiling the step of {text} for {on.name} failed: {last.failed}"
    if last.program_failed is not None:
        where = "of the program, above" if not last.ours else "in the capture, above"
        kind = "" if not last.ours else " (a fault of the capture, not of the program)"
        return f"{text} failed before its step was known{kind}: {last.program_failed}; the traceback is that {where}{_called(last)}"
    if code is None:
        stage = f"while {last.stage}" if last.stage else "and had imported no jax"
        return f"{text} was ended at its time limit {stage}, before its step was known; give a command that comes to its step sooner, such as with less data"
    if code > 0 and last.without_calls == "ended by itself":
        return f"{text} ended with exit code {code} before it called a jitted function on the slice; its own error is above"
    if last.without_calls is not None:
        return f"{text} {last.without_calls} and called no jitted function on the slice; give a command that trains, and check that it uses jax.jit"
    if last.stage is None:
        return _before_jax(text, code, hooked=bool(events))
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"{text} {how} while {last.stage}, before its step was known; its own output is above"


def _called(last: CaptureEvent) -> str:
    """Functions that a failed program had called, any of which may be its step."""
    if not last.called or last.ours:
        return ""
    return f"; arrays on the slice read as zeros, which it may have refused; of {', '.join(last.called[:6])}, which it called, --step takes one for the step"


def _before_jax(text: str, code: int, *, hooked: bool) -> str:
    """Why a command came to no jax, on one line; ``hooked`` where a Python that reads PYTHONPATH was started."""
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    if not hooked:
        why = " its own error is above;" if code else ""
        return f"{text} {how} and started no Python that reads PYTHONPATH;{why} start Python without -I or -E, and check the command"
    if code:
        return f"{text} {how} before it imported jax; its own error is above"
    return f"{text} {how} and imported no jax; give a command that trains, and check that it gets as far as importing jax"
