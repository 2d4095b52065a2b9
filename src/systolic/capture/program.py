"""The program under capture: its process, its stages and its answer."""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.chips import Slice
from systolic.compiling.environment import QUIET
from systolic.core.errors import NotFoundError, OptionError, RunError
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

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Compiled step of a program."""

    command: str
    """The program as it was started."""
    folder: Path
    """Folder of the texts and of ``answer.json``."""
    answer: Mapping[str, Any]
    """Programs of a step with their texts, device order and calls; the other calls; versions, flags and notes."""

    @property
    def programs(self) -> Sequence[Mapping[str, Any]]:
        """Programs that a step calls, in the order of their first call."""
        return self.answer["programs"]

    @property
    def order(self) -> Sequence[Mapping[str, Any]]:
        """Calls of a step in their order; of a step that was never called, one of its program."""
        return self.answer["order"] or [{"program": 0, "after": []}]


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
        command: The program and its arguments, as a shell would start it. Its output goes to stderr.
        on: A slice of TPUs.
        folder: Existing and empty; for the answer.
        step: Name of the jitted function that is the step; by default what repeats.
        quick: Stop at the compiler's schedule.
        limit_seconds: Seconds after which what has been called is all there is.
        watch: Called with each stage.

    Raises:
        OptionError: the slice is no TPU, or the command is none.
        NotFoundError: there is no such command.
        RunError: the program failed, called nothing, or its environment can't compile for the slice.
    """
    if on.platform != "tpu":
        raise OptionError(
            f"{on.name} is a {on.platform} slice; programs are captured for TPU slices only; give a recipe or a function instead"
        )
    _check(command)
    request = {
        "topology": {
            "topology_name": on.topology_name,
            "chips_per_host_bounds": _host_bounds(on),
            "chip_config_name": None
            if on.chip_config_name in (None, "default")
            else on.chip_config_name,
            "num_slices": on.num_slices if on.num_slices > 1 else None,
        },
        "num_hosts": on.num_hosts,
        "device_bytes": on.program_bytes,
        "libtpu": own_libtpu(),
        "step": step,
        "quick": quick,
        "limit_seconds": limit_seconds,
    }
    events = folder / "events.jsonl"
    try:
        (folder / "request.json").write_text(json.dumps(request))
        events.touch()
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
    path = folder / "answer.json"
    if path.exists():
        return Captured(command=text, folder=folder, answer=json.loads(path.read_text()))
    raise RunError(_reason(_events(events), text, code, on))


def _check(command: Sequence[str]) -> None:
    """Refuses no command, and a Python that is told to leave out what PYTHONPATH names, as the hook would be."""
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


def own_libtpu() -> dict[str, str] | None:
    """Path and version of this environment's libtpu, for programs of environments without one; None without it."""
    try:
        distribution = importlib.metadata.distribution("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file("libtpu/libtpu.so")))
    return {"path": str(path), "version": distribution.version} if path.is_file() else None


def _environment(folder: Path) -> dict[str, str]:
    variables = {**os.environ, **QUIET, VARIABLE: str(folder.resolve())}
    ours = own_libtpu()
    if ours is not None and Path(variables.get("TPU_LIBRARY_PATH", "")) == Path(ours["path"]):
        del variables["TPU_LIBRARY_PATH"]  # libtpu sets it on import, in a process that has jax
    variables["PYTHONUNBUFFERED"] = "1"  # its lines come in their order, beside ours
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def _run(command: Sequence[str], folder: Path, limit_seconds: float, watch: Say) -> int:
    """Runs the program to its end and reports stages; returns its exit code."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
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
            events = _events(folder / "events.jsonl")
            for event in events[shown:]:
                if "stage" in event:
                    watch(event["stage"])
            shown = len(events)
            if not events and not unseen and time.monotonic() > begin + UNSEEN_SECONDS:
                unseen = True
                watch("running, without a Python that reads PYTHONPATH so far")
            time.sleep(POLL_SECONDS)
        return process.poll() or 0
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _events(path: Path) -> list[dict[str, Any]]:
    """Events so far; a line that is being written is left for later."""
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _reason(events: Sequence[Mapping[str, Any]], text: str, code: int, on: Slice) -> str:
    """Why there is no answer, on one line."""
    facts: dict[str, Any] = {}
    for event in events:
        facts.update(event)
    if "refused" in facts:
        step = f"; run {facts['next']}" if facts.get("next") else ""
        return f"{facts['refused']}{step}"
    if "failed" in facts and "No space left on device" in facts["failed"]:
        return f"compiling the step of {text} for {on.name} failed: the disk is full ({facts['failed']}); make room where temporary files or --keep lie"
    if "failed" in facts:
        return f"compiling the step of {text} for {on.name} failed: {facts['failed']}"
    if "program_failed" in facts:
        where = "of the program, above" if not facts.get("ours") else "in the capture, above"
        kind = "" if not facts.get("ours") else " (a fault of the capture, not of the program)"
        return f"{text} failed before its step was known{kind}: {facts['program_failed']}; the traceback is that {where}{_called(facts)}"
    if code > 0 and facts.get("without_calls") == "ended by itself":
        return f"{text} ended with exit code {code} before it called a jitted function on the slice; its own error is above"
    if "without_calls" in facts:
        return f"{text} {facts['without_calls']} and called no jitted function on the slice; give a command that trains, and check that it uses jax.jit"
    if not any("stage" in event for event in events):
        return _before_jax(text, code, hooked=bool(events))
    stage = facts.get("stage", "starting")
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"{text} {how} while {stage}, before its step was known; its own output is above"


def _called(facts: Mapping[str, Any]) -> str:
    """Functions that a failed program had called, any of which may be its step."""
    names = facts.get("called")
    if not names or facts.get("ours"):
        return ""
    return f"; arrays on the slice read as zeros, which it may have refused; of {', '.join(names[:6])}, which it called, --step takes one for the step"


def _before_jax(text: str, code: int, *, hooked: bool) -> str:
    """Why a command came to no jax, on one line; ``hooked`` where a Python that reads PYTHONPATH was started."""
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    if not hooked:
        why = " its own error is above;" if code else ""
        return f"{text} {how} and started no Python that reads PYTHONPATH;{why} start Python without -I or -E, and check the command"
    if code:
        return f"{text} {how} before it imported jax; its own error is above"
    return f"{text} {how} and imported no jax; give a command that trains, and check that it gets as far as importing jax"
