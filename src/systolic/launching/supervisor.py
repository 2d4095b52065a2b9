"""``python -m systolic.launching.supervisor FOLDER``: runs and restarts the processes of ``--via local``.

A process that dies leaves the others waiting in a collective, so all are ended and restarted; the run continues from
its last checkpoint. A slice whose process is killed at every start is dropped, if that is allowed.
``FOLDER/state.json`` has the current state, ``FOLDER/logs/`` the output of each process.
"""

import enum
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, TypeVar

import msgspec
import psutil
from msgspec import UNSET, Meta, Struct, UnsetType

from systolic.core.errors import DataError, NotFoundError, SystolicError
from systolic.core.files import write_atomically
from systolic.launching.local import SETTINGS, RemainingSettings, SupervisorSettings

STATE = "state.json"
LOGS = "logs"
CURE = "remove it if its launch is not running"
POLL_SECONDS = 0.1
LEFT_SECONDS = 15.0
"""Time for the other processes to end by themselves after one has failed."""
SAVE_SECONDS = 120.0
"""Time for all processes to save and end after a stop."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
SAVED = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes after a stop: of a training that has saved, and of one that had not begun when the signal came."""
WRONG = 2
"""Exit code of a rejected command line, which a restart would repeat."""
_Record = TypeVar("_Record")


class ProcessIdentity(Struct, frozen=True, kw_only=True):
    """Process by its ID, its start time, since IDs are reused, and its host: the content of ``process.json``."""

    pid: Annotated[int, Meta(ge=0)]
    started: float = 0.0
    """Seconds since 1970."""
    host: str = ""
    """Name of the host; empty in records without one, which are of this host."""
    boot: str | None = None
    """ID of the host's boot; None in records without a host."""


class SupervisorState(ProcessIdentity, frozen=True, kw_only=True):
    """Supervisor and its processes: the content of ``state.json``."""

    processes: int = 1
    """Number of processes."""
    left_out: Sequence[int] = ()
    """Indices of the slices that were dropped."""
    phase: str
    attempt: int = 0
    """Number of attempts before this one."""
    running: Sequence[ProcessIdentity] = ()
    codes: Sequence[int] | UnsetType = UNSET
    """Exit codes of the processes; absent before the end."""


class Next(enum.Enum):
    """Action after the death of a process."""

    restart = "restart"
    """Restart all processes; counts as a restart."""
    wait = "wait"
    """Restart all processes, in case the slice is back."""
    without = "without"
    """Continue with the other slices."""


@dataclass(kw_only=True)
class Remaining:
    """Slices that have not been dropped.

    Args:
        slices: Number of slices at the start.
        min_slices: Number of slices to continue with at least; None never drops one.
        rejoin_seconds: Time from the loss of a slice until it is dropped, unless it has run for that long again.
    """

    slices: int = 1
    min_slices: int | None = None
    rejoin_seconds: float = 0.0
    left_out: list[int] = field(default_factory=list, init=False)
    _since: dict[int, float] = field(default_factory=dict, init=False)
    """Time at which each lost slice was lost; it stays lost over starts in which another one fails first."""

    @property
    def present(self) -> list[int]:
        """Indices of the slices that are left."""
        return [number for number in range(self.slices) if number not in self.left_out]

    def killed(self, place: int, now: float, lived_seconds: float) -> Next:
        """Decides what to do after a process of a slice was killed first.

        Args:
            place: Position of the slice among those present.
            now: Time of any clock in seconds.
            lived_seconds: Time for which the process ran.
        """
        number = self.present[place]
        if self.min_slices is None or len(self.present) <= self.min_slices:
            return Next.restart
        if lived_seconds > self.rejoin_seconds:
            # All others ran for as long, so they are back, too.
            self._since.clear()
        again = number in self._since
        since = self._since.setdefault(number, now)
        if now - since < self.rejoin_seconds:
            return Next.wait if again else Next.restart
        del self._since[number]
        self.left_out.append(number)
        return Next.without


@dataclass(kw_only=True)
class Supervisor:
    """Supervisor of the processes of a launch.

    Args:
        folder: Folder of the launch.
        command: Command of every process.
        directory: Working directory.
        processes: Number of processes.
        devices: Number of virtual CPU devices per process.
        restarts: Maximum number of restarts; those that wait for a slice do not count.
        remaining: Slices, each with the same number of processes.
    """

    folder: Path
    command: Sequence[str]
    directory: str
    processes: int
    devices: int
    restarts: int
    remaining: Remaining = field(default_factory=Remaining)
    _stopped: bool = field(default=False, init=False)
    _first_to_fail: str = field(default="", init=False)
    _killed: tuple[int, float] | None = field(default=None, init=False)
    """Index of the process that was killed before others failed, and the time."""
    _restarted: int = field(default=0, init=False)
    """Number of attempts before the current one."""

    def run(self) -> int:
        """Runs until the training has ended, is stopped, or has no restarts left; returns an exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        self._end_leftovers()
        counted = 0
        while True:
            began = time.monotonic()
            codes = self._attempt()
            if self._first_to_fail:
                self._log(f"systolic: {self._first_to_fail}\n")
            if self._stopped:
                return self._end("stopped", codes, 1 if unsaved(codes) else 0)
            if not any(codes):
                return self._end("done", codes, 0)
            follows = self._follows(began)
            if WRONG in codes or (follows is Next.restart and counted == self.restarts):
                return self._end("failed", codes, 1)
            self._restarted += 1
            if follows is Next.restart:
                counted += 1
                self._log(f"systolic: restart {counted} of {self.restarts}\n")
            elif follows is Next.without:
                self._leave_out()

    def _follows(self, began: float) -> Next:
        """Decides what to do after a failed attempt."""
        if self._killed is None:
            return Next.restart
        process, when = self._killed
        slice_of = process * len(self.remaining.present) // self.processes
        return self.remaining.killed(slice_of, when, when - began)

    def _leave_out(self) -> None:
        """Removes the processes of a dropped slice."""
        there = self.remaining
        after = f"{there.rejoin_seconds:g} s"
        left = f"{len(there.present)} of {there.slices} slices"
        self._log(
            f"systolic: slice {there.left_out[-1]} has not come back in {after}; the run continues with {left}\n"
        )
        self.processes -= self.processes // (len(there.present) + 1)

    def _attempt(self) -> list[int]:
        """Starts all processes and waits until all have ended; returns their exit codes."""
        (self.folder / LOGS).mkdir(exist_ok=True)
        port, self._first_to_fail, self._killed = _free_port(), "", None
        running: list[subprocess.Popen[bytes]] = []
        for number in range(self.processes):
            with self._log_of(number).open("ab") as log:
                running.append(self._start(number, port, log))
        self._write("running", running=[identity(process.pid) for process in running])
        try:
            self._watch(running)
        finally:
            _kill(running)
        return [each.returncode for each in running]

    def _log_of(self, number: int) -> Path:
        return self.folder / LOGS / f"{number}.log"

    def _log(self, line: str) -> None:
        """Writes a line to the logs of all processes."""
        for number in range(self.processes):
            with self._log_of(number).open("a") as log:
                log.write(line)

    def _start(self, number: int, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
        environ = dict(os.environ) | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={self.devices}",
            "PYTHONUNBUFFERED": "1",
        }
        if self.processes > 1:
            environ |= {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(self.processes),
                "JAX_PROCESS_ID": str(number),
                "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            }
        return subprocess.Popen(
            _here(self.command), cwd=self.directory, env=environ, stdout=log, stderr=log
        )

    def _watch(self, running: Sequence[subprocess.Popen[bytes]]) -> None:
        """Waits until all have ended; after a failure or a stop, at most for the time allowed."""
        deadline, signalled = None, False
        while None in [each.poll() for each in running]:
            if self._stopped and not signalled:
                signalled, deadline = True, time.monotonic() + SAVE_SECONDS
                for each in running:
                    each.terminate()
            failed = [n for n, each in enumerate(running) if each.returncode not in (None, 0)]
            if failed and not self._first_to_fail and not self._stopped:
                code = running[failed[0]].returncode
                self._first_to_fail = _ended(failed[0], code)
                if code is not None and code < 0:
                    self._killed = (failed[0], time.monotonic())
            if failed and deadline is None:
                deadline = time.monotonic() + LEFT_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)

    def _end_leftovers(self) -> None:
        """Ends processes that a killed supervisor left behind, which would continue to write the run."""
        before = read_typed(self.folder / STATE, SupervisorState, CURE)
        for leftover in () if before is None else before.running:
            if lives(leftover):
                os.kill(leftover.pid, signal.SIGKILL)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._stopped = True

    def _end(self, phase: str, codes: Sequence[int], code: int) -> int:
        self._write(phase, codes=codes)
        return code

    def _write(
        self,
        phase: str,
        *,
        running: Sequence[ProcessIdentity] = (),
        codes: Sequence[int] | UnsetType = UNSET,
    ) -> None:
        state = SupervisorState(
            **msgspec.structs.asdict(identity(os.getpid())),
            processes=self.processes,
            left_out=self.remaining.left_out,
            phase=phase,
            attempt=self._restarted,
            running=running,
            codes=codes,
        )
        write_line(self.folder / STATE, state)


def read_typed(path: Path, kind: type[_Record], cure: str) -> _Record | None:
    """Reads a record in a JSON file; None if there is no file.

    Args:
        path: The file.
        kind: Type of the record; its field ``record``, if it has one, gets the whole JSON object.
        cure: What to do about a damaged file, for the message.

    Raises:
        DataError: it is empty, cut short or damaged.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {cure}") from error
    try:
        fields = msgspec.convert(json.loads(content), dict)
        return msgspec.convert({**fields, "record": fields}, kind)
    except msgspec.ValidationError as error:
        why = f"damaged ({error})"
    except ValueError:
        why = "cut short" if content.strip() else "empty"
    raise DataError(f"{path} is {why}; {cure}")


def write_line(path: Path, record: Struct) -> None:
    """Writes a record as a line of JSON."""
    write_atomically(path, json.dumps(msgspec.to_builtins(record)) + "\n")


def identity(pid: int) -> ProcessIdentity:
    """Identifies a process."""
    try:
        started = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        started = 0.0
    return ProcessIdentity(pid=pid, started=started, host=socket.gethostname(), boot=_boot())


def lives(process: ProcessIdentity) -> bool:
    """Whether a process is still running on this host."""
    if process.boot not in (None, _boot()):
        return False
    try:
        now = psutil.Process(process.pid)
        same = abs(now.create_time() - process.started) < 1
        return same and now.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def elsewhere(process: ProcessIdentity) -> str:
    """Name of the host of a process that is not visible from this one; empty for this host and for records without a host."""
    host = process.host
    return "" if host == socket.gethostname() or lives(process) else host


def _boot() -> str:
    """ID of this boot, which differs between hosts of one name; empty where the system has none."""
    return BOOT.read_text().strip() if BOOT.exists() else ""


def unsaved(codes: Sequence[int]) -> str:
    """Text on the processes of a stopped launch that ended before they had saved; empty if there are none."""
    killed = codes.count(-signal.SIGKILL)
    failed = sorted({code for code in codes if code not in (*SAVED, -signal.SIGKILL)})
    texts = []
    if killed:
        texts.append(f"{killed} of {len(codes)} processes were killed before they had saved")
    if failed:
        count = sum(code in failed for code in codes)
        texts.append(
            f"{count} of {len(codes)} processes failed (exit code {', '.join(map(str, failed))})"
        )
    return "; ".join(texts)


def _ended(number: int, code: int | None) -> str:
    """Line on how a process ended; the other processes may name it only by its address."""
    if code is not None and code < 0:
        return f"process {number} was killed by {signal.Signals(-code).name}"
    return f"process {number} ended with exit code {code}"


def _here(command: Sequence[str]) -> list[str]:
    """Command with this Python interpreter, so that no other installation is used."""
    if command[0] == "systolic":
        return [sys.executable, "-m", "systolic", *command[1:]]
    return list(command)


def _kill(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for each in running:
        if each.poll() is None:
            each.kill()
    for each in running:
        each.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main(folder: Path) -> int:
    """Supervises the launch in a folder; an error is one line on stderr."""
    try:
        settings = read_typed(folder / SETTINGS, SupervisorSettings, "launch it again")
        if settings is None:
            raise NotFoundError(f"{folder / SETTINGS} is missing; launch it again")
        remaining = settings.remaining or RemainingSettings()
        supervisor = Supervisor(
            folder=folder,
            command=settings.command,
            directory=settings.directory,
            processes=settings.processes,
            devices=settings.devices,
            restarts=settings.restarts,
            remaining=Remaining(**msgspec.structs.asdict(remaining)),
        )
        return supervisor.run()
    except SystolicError as error:
        print(f"systolic: {error.line}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
