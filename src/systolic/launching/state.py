"""State of a launch as this machine knows it: its phase, the cost so far, its logs."""

import datetime
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import UnsetType

from systolic.core.errors import DataError, OptionError, RunError
from systolic.core.units import plural
from systolic.launching.platforms import call, check_client, streamed
from systolic.launching.record import (
    ENDED,
    LOCAL,
    OUTPUT,
    POLL_SECONDS,
    PROCESS,
    RECORD,
    TIMES,
    Launched,
)
from systolic.launching.supervisor import CURE, LOGS, STATE, SupervisorState, read_typed

ELSEWHERE = "elsewhere"
"""Phase of a launch whose process is on another host, so that it is not visible whether it is running."""
WRITTEN = "written"
"""Phase of a launch whose files are written, and that was not submitted."""
SUBMIT_FAILED = "submit failed"
"""Phase of a launch that could not be submitted; what was created before that is still there."""
HOUR = 3600.0
LIBRARY = re.compile(
    r"\[Gloo\]|[IWEF]\d{4} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWEF] "
    r"|WARNING: All log messages before absl"
)
"""Start of a line that Gloo or XLA has printed."""
RECENT_LINES = 200
"""Number of last lines among which the training's own is looked for."""


class ShownState(SupervisorState, frozen=True, kw_only=True):
    """State that a supervisor has written, with all of its fields."""

    record: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LaunchPhase:
    """Phase of a launch as this machine knows it."""

    name: str
    host: str = ""
    """Host of the process that is not visible from this one."""
    code: int | None = None
    """Exit code of a script or container that failed."""
    why: str = ""
    """Why the phase is what it is, where that is known."""
    attempt: int = 0
    """Number of restarts of a local launch."""
    codes: Sequence[int] = ()
    """Exit codes of the processes of a local launch that has ended."""
    left_out: Sequence[int] = ()
    """Indices of the slices that a local launch has dropped."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """JSON object that a local launch's supervisor has written."""

    def to_json(self) -> dict[str, Any]:
        """JSON object."""
        facts = {"host": self.host, "code": self.code, "why": self.why}
        return {**self.record, "phase": self.name, **{n: v for n, v in facts.items() if v}}


def phase(launched: Launched) -> LaunchPhase:
    """Phase of a launch as this machine knows it.

    Raises:
        DataError: a file of its process is damaged.
    """
    if launched.stopped:
        return LaunchPhase(name="stopped")
    if launched.trouble:
        return LaunchPhase(name="unknown")
    if launched.submitted is None:
        return LaunchPhase(name=WRITTEN)
    if launched.failed:
        return LaunchPhase(name=SUBMIT_FAILED, why=launched.failed)
    if launched.commands.state:
        return _told(launched.commands.state)
    if not launched.detached:
        return LaunchPhase(name="submitted")
    alive, host = launched.alive(), launched.host
    lost = LaunchPhase(name=ELSEWHERE if host else "lost", host=host)
    if launched.via != LOCAL:
        return LaunchPhase(name="running") if alive else _ended(launched) or lost
    state, process = read_typed(launched.path / STATE, ShownState, CURE), launched.process
    if state is None or process is None or state.pid != process.pid:
        # This supervisor has written nothing yet; the file, if any, is from the one before.
        return LaunchPhase(name="starting") if alive else lost
    current = lost if not alive and state.phase == "running" else LaunchPhase(name=state.phase)
    return replace(
        current,
        attempt=state.attempt,
        codes=() if isinstance(state.codes, UnsetType) else state.codes,
        left_out=state.left_out,
        record=state.record,
    )


def check_here(launched: Launched) -> None:
    """Checks that the process of a launch that has not ended is not on another host.

    Raises:
        RunError: it is on another host.
        DataError: a file of the process is damaged.
    """
    if phase(launched).name == ELSEWHERE:
        raise RunError(
            f"{launched.name} runs on {launched.host} and is not visible from here; run systolic stop {launched.name} on {launched.host}, or if that host is gone: rm {shlex.quote(str(launched.path / PROCESS))}"
        )


def _ended(launched: Launched) -> LaunchPhase | None:
    """Phase of a script that ran as long as the training and has ended; None if it left no exit code."""
    path = launched.path / ENDED
    text = path.read_text().strip() if path.exists() else ""
    return _after(int(text)) if text.isdigit() else None


def _after(code: int) -> LaunchPhase:
    return LaunchPhase(name="failed", code=code) if code else LaunchPhase(name="done")


def _told(words: Sequence[str]) -> LaunchPhase:
    """Phase of a container by the client on this machine; submitted if the client does not answer."""
    if shutil.which(words[0]) is None:
        return LaunchPhase(name="submitted")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return LaunchPhase(name="submitted")
    state, _, text = done.stdout.strip().partition(" ")
    if not state:
        return LaunchPhase(name="lost")
    if state == "created":
        why = "its container was created but could not be started"
        return LaunchPhase(name="failed", why=why)
    code = re.search(r"\((\d+)\)", text)
    if state in ("exited", "dead"):
        return LaunchPhase(name="failed") if code is None else _after(int(code[1]))
    return LaunchPhase(name="running")


@dataclass(frozen=True, kw_only=True)
class LaunchCost:
    """Cost of a launch so far."""

    hours: float
    usd_per_hour: float
    """Price per hour; of a server for the minimum number of pods."""
    since: str
    """How the hours are counted."""
    at_most: bool = False
    """Whether the cost is an upper bound: the launch, or its machines, may have ended, which this machine does not see."""
    usd_per_hour_most: float | None = None
    """Price per hour of a server for the maximum number of pods; this machine does not see how many run."""

    earlier: Sequence["LaunchCost"] = ()
    """Costs of earlier submissions."""

    @property
    def usd(self) -> float:
        """Cost of all submissions in US dollars."""
        return self.hours * self.usd_per_hour + sum(submission.usd for submission in self.earlier)

    @property
    def usd_most(self) -> float | None:
        """Like :attr:`usd`, for the maximum number of pods."""
        most = self.usd_per_hour_most
        if most is None:
            return None
        return self.hours * most + sum(
            submission.usd_most or submission.usd for submission in self.earlier
        )

    @property
    def is_bound(self) -> bool:
        """Whether the cost of any submission is an upper bound."""
        return self.at_most or any(submission.at_most for submission in self.earlier)

    @property
    def hours_in_all(self) -> float:
        """Hours of all submissions."""
        return self.hours + sum(submission.hours for submission in self.earlier)

    def to_json(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "used_hours": self.hours_in_all,
            "used_usd": self.usd,
            "used_usd_most": self.usd_most,
            "used_since": self.since,
            "used_at_most": self.is_bound,
            "used_submissions": 1 + len(self.earlier),
        }

    def text(self) -> str:
        """One line."""
        used, price = f"${self.usd:,.2f}", f"${self.usd_per_hour:,.2f}"
        if self.usd_most is not None:
            used += f" to ${self.usd_most:,.2f}"
            price += f" to ${self.usd_per_hour_most:,.2f} an hour, by the number of pods"
        before = ""
        if self.earlier:
            hours = self.hours_in_all - self.hours
            before = f", and {hours:,.2f} h in {plural(len(self.earlier), 'earlier submission')}"
        return f"{used} used: {self.hours:,.2f} h {self.since} at {price}{before}; an estimate, the invoice decides"


def cost(launched: Launched, now: float) -> LaunchCost | None:
    """Cost of all submissions of a launch so far.

    None if it rents nothing, the catalogue has no price, or the folder is missing.

    Args:
        launched: The launch.
        now: Seconds since 1970.

    Raises:
        DataError: the file of its process is damaged.
    """
    if launched.trouble or launched.via == LOCAL or launched.submitted is None:
        return None
    watched = launched.detached and (launched.alive() or (launched.path / ENDED).exists())
    current = _of_one(launched, now, watched=watched)
    if current is None:
        return None
    before = []
    for each in launched.earlier:
        if not each.slice or each.bill is None or not each.submitted or not each.until:
            continue  # of another version
        submission = replace(
            launched,
            slice=each.slice,
            bill=each.bill,
            submitted=each.submitted,
            stopped=each.stopped,
            untouched=bool(each.untouched),
        )
        before.append(_of_one(submission, _seconds(each.until), watched=False))
    return replace(current, earlier=[each for each in before if each is not None])


def _of_one(launched: Launched, now: float, *, watched: bool) -> LaunchCost | None:
    """Cost of one submission until ``now``.

    Args:
        launched: The launch, with the fields of the submission.
        now: Seconds since 1970.
        watched: Whether its script is running or has recorded its end; otherwise it may have missed the end of machines.
    """
    price = launched.bill.usd_per_hour
    if price is None or launched.submitted is None:
        return None
    if launched.untouched:
        since = "since submitting failed before anything was created,"
        return LaunchCost(hours=0.0, usd_per_hour=price, since=since)
    begun = _seconds(launched.submitted)
    times = launched.path / TIMES
    if launched.detached:
        text = times.read_text() if times.exists() else ""
        seconds, up = _up(text, begun, now, _slices(launched.slice))
        unseen = up and not watched
        since = "of machine time" + (", if the machines still exist," if unseen else "")
        return LaunchCost(hours=seconds / HOUR, usd_per_hour=price, since=since, at_most=unseen)
    end = now if launched.stopped is None else _seconds(launched.stopped)
    since = "from submit to stop" if launched.stopped else "since submission, if still running"
    hours = max(0.0, end - begun) / HOUR
    return LaunchCost(
        hours=hours,
        usd_per_hour=price,
        since=since,
        at_most=launched.stopped is None,
        usd_per_hour_most=launched.bill.usd_per_hour_most,
    )


def _seconds(time: str) -> float:
    """Converts a time in UTC to seconds since 1970."""
    return datetime.datetime.fromisoformat(time).timestamp()


def _slices(name: str) -> int:
    count, times, _ = name.partition("x")
    return int(count) if times and count.isdigit() else 1


def _up(text: str, begun: float, now: float, slices: int) -> tuple[float, bool]:
    """Seconds from each ``up`` to the next ``down`` between ``begun`` and ``now``, weighted by the share of slices.

    Also returns whether no ``down`` followed the last ``up``.
    """
    total, up, share = 0.0, None, 1.0
    for line in text.splitlines():
        what, seconds, *there = (*line.split(" "), "")[:3]
        if not seconds.isdigit() or not begun - 1 <= float(seconds) <= now:
            continue
        if what == "up" and up is None:
            up = float(seconds)
            share = int(there[0]) / slices if there[0].isdigit() else 1.0
        elif what == "down" and up is not None:
            total, up = total + share * (float(seconds) - up), None
    return (total, False) if up is None else (total + share * (now - up), up < now)


def log_of(launched: Launched, process: int = 0) -> Path | None:
    """Log file of a launch on this machine; None if the platform has the logs."""
    if launched.via == LOCAL:
        return launched.path / LOGS / f"{process}.log"
    return launched.path / OUTPUT if launched.detached else None


def last_line(path: Path) -> str:
    """Last line of a log that is from the training and not from a library; empty if there is none."""
    recent = [line.strip() for line in lines(path, RECENT_LINES, None)]
    own = [line for line in recent if line and not LIBRARY.match(line)]
    return own[-1] if own else ""


def lines(path: Path, last: int, alive: Callable[[], bool] | None) -> Iterator[str]:
    """Yields the last lines of a log, then new ones while ``alive`` returns true.

    Args:
        path: Log file, which need not exist yet.
        last: Number of existing lines to yield.
        alive: Whether more may be written; None stops after the existing lines.
    """
    while not path.exists():
        if alive is None or not alive():
            return
        time.sleep(POLL_SECONDS)
    with path.open(errors="replace") as file:
        yield from file.readlines()[-last:]
        while alive is not None:
            going = alive()
            if new := file.read():
                yield new
            elif not going:
                return
            else:
                time.sleep(POLL_SECONDS)


@dataclass(frozen=True, kw_only=True)
class LaunchState:
    """A launch and what this machine knows of it now."""

    launched: Launched
    now: LaunchPhase
    cost: LaunchCost | None
    """Cost so far; None if it rents nothing, or the catalogue has no price."""

    @property
    def name(self) -> str:
        """Name of the launch."""
        return self.launched.name

    @property
    def phase(self) -> str:
        """Phase of the launch: ``written``, ``submitted``, ``starting``, ``running``, ``done``, ``failed``, ``stopped``, ``lost``, and others where that is not known."""
        return self.now.name

    @property
    def log(self) -> Path | None:
        """Log file of the first process, if it is on this machine."""
        return log_of(self.launched)

    def ask_client(self) -> None:
        """Runs the client's own command for the state, if the platform has one, with its output on stderr.

        Raises:
            RunError: the client is missing or fails.
        """
        if words := self.launched.commands.status:
            call(self.launched.path, words)

    def to_json(self) -> dict[str, Any]:
        """JSON object."""
        used = {} if self.cost is None else self.cost.to_json()
        return {**self.launched.to_json(), **self.now.to_json(), **used}


def state_of(launched: Launched) -> LaunchState:
    """State of a launch now; unknown where a file of its process is damaged."""
    try:
        return LaunchState(launched=launched, now=phase(launched), cost=cost(launched, time.time()))
    except DataError as error:
        launched = replace(launched, trouble=str(error))
        return LaunchState(launched=launched, now=phase(launched), cost=None)


def output_of(
    launched: Launched, named: str, *, follow: bool, last: int, process: int
) -> Iterator[str]:
    """Output of a launch: its log on this machine, or what the platform's client prints.

    Args:
        launched: The launch.
        named: Its name or folder, as the user gave it.
        follow: Whether to go on until the training ends.
        last: Number of last lines of a log on this machine.
        process: Index of a local launch's process.

    Raises:
        OptionError: the launch has no such process.
        RunError: it has no log yet, or the client is missing; the iterator raises it where the client fails.
    """
    count = launched.commands.hosts if launched.via == LOCAL else 1
    if process >= count:
        raise OptionError(
            f"process is {process}, but {launched.name} has {count} here, numbered from 0"
        )
    path = log_of(launched, process)
    if path is None:
        words = launched.commands.follow if follow else launched.commands.logs
        if not words:
            raise DataError(
                f"{launched.path / RECORD} is damaged (it has no command for logs); launch it again"
            )
        check_client(words[0])
        return streamed(launched.path, words)
    if not path.exists() and not (follow and launched.alive()):
        raise RunError(
            f"{launched.name} has no log {path}: it is {phase(launched).name}; systolic status {shlex.quote(named)} shows more"
        )
    # The log of a process on another host grows on a shared disk.
    alive = (lambda: launched.alive() or bool(launched.host)) if follow else None
    return lines(path, last, alive)
