"""Submits and stops a launch through the platform's own client."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.core.errors import RunError, TakenError
from systolic.launching.docker import KILLED
from systolic.launching.launch import GONE, ClientDefault, Launch
from systolic.launching.platforms import NEEDS, call, check_client, code_of, failed, here
from systolic.launching.record import (
    ENDED,
    LOCAL,
    OUTPUT,
    POLL_SECONDS,
    PROCESS,
    RECORD,
    TIMES,
    Launched,
    SubmissionRecord,
    at_place,
    keep,
    last_record,
    launches,
    utc_now,
    where_of,
)
from systolic.launching.state import check_here, phase
from systolic.launching.supervisor import (
    CURE,
    SAVE_SECONDS,
    STATE,
    SupervisorState,
    identity,
    lives,
    read_typed,
    unsaved,
    write_line,
)
from systolic.runs import manifest
from systolic.runs.access import is_held

NOTHING = (
    "Error from server (NotFound): ",
    "No resources found",
    "error: the server doesn't have a resource type",
)
"""Messages of kubectl when there is nothing to delete."""
NOT_SUBMITTED = "written, not submitted; nothing to stop"


def check_free(launch: Launch, folder: Path, via: str) -> None:
    """Checks that no launch of the same name is running, and that the folder is free or from the same launch.

    Raises:
        RunError: a launch of that name is running here or on another host, was submitted to another place, or has another folder.
        TakenError: the folder has files that are not from a launch of that name and platform.
    """
    name = launch.name
    if folder.is_dir() and any(folder.iterdir()):
        before = last_record(folder, name)
        if before is None and (folder / RECORD).is_file():
            raise TakenError(
                f"{folder / RECORD} is empty, cut short or damaged, and the list has no copy; choose a new folder with --out, or remove {folder} if its launch is not running"
            )
        if before is None:
            raise TakenError(
                f"{folder} has files that are not from a launch; choose a new folder with --out"
            )
        if (before.name, before.via) != (name, via):
            raise TakenError(
                f"{folder} holds the launch {before.name} via {before.via}; choose another --name or --out, or remove the folder if that launch is not running"
            )
        there = before.submitted and not before.stopped and not _given_back(folder)
        if there and before.where != where_of(launch):
            raise RunError(
                f"{name} was submitted with {before.where or 'no zone, project or namespace'}; run systolic stop {name} first, or choose another --name"
            )
        check_here(before)
    other = {launched.name: launched for launched in launches()}.get(name)
    if other is None:
        return
    check_here(other)
    if other.detached and other.alive():
        raise RunError(f"{name} is running; run systolic stop {name}, or choose another --name")
    if other.path != folder.absolute() and other.path.is_dir():
        raise RunError(
            f"the launch {name} is in {other.folder}; choose another --name, or launch it again with --out {other.folder}"
        )


def _given_back(folder: Path) -> bool:
    """Whether a script on this machine has ended and released the machines."""
    times = folder / TIMES
    return (
        (folder / ENDED).exists()
        and times.exists()
        and times.read_text().rstrip().rpartition("\n")[2].startswith("down")
    )


def submit(launched: Launched) -> Launched:
    """Runs the platform's commands; the training does not depend on this process afterwards.

    Raises:
        RunError: a client is missing or fails, or another process uses the run.
    """
    first = (*launched.commands.submit, *launched.commands.checks)
    for client in (*(each[0] for each in first), *NEEDS.get(launched.via, ())):
        check_client(client)
    placed = _placed(launched)
    words = placed.commands.submit
    for each in placed.commands.checks:
        call(placed.path, each)
    _check_run(placed)
    before = last_record(placed.path, placed.name)
    now = utc_now()
    placed = replace(placed, submitted=now, earlier=_earlier(placed, before, now))
    # Recorded before it starts: a launch that started only in part must be listed so that it can be stopped.
    keep(placed)
    untouched = True
    try:
        for each in words[:-1]:
            call(placed.path, each)
        if placed.detached:
            _start(placed, words[-1])
        else:
            untouched = False
            call(placed.path, words[-1])
    except (RunError, KeyboardInterrupt) as error:
        why = str(error).removesuffix("; its output is above") or "interrupted"
        keep(replace(placed, failed=why, untouched=untouched))
        raise
    return placed


def _check_run(launched: Launched) -> None:
    """Checks that no other process here trains the run: it would cost restarts, and the launch would take it over later.

    Raises:
        RunError: another launch or another process uses the run.
    """
    run = launched.run
    for other in launches():
        if (
            run
            and other.run == run
            and other.path != launched.path
            and other.detached
            and other.alive()
        ):
            raise RunError(
                f"{run} is in use by the launch {other.name}; run systolic stop {other.name}, or choose another --run"
            )
    state = read_typed(launched.path / STATE, SupervisorState, CURE)
    left = () if state is None else state.running
    # Processes that a killed supervisor of this launch left behind are ended by the next.
    if run and Path(run).is_dir() and is_held(Path(run)) and not any(map(lives, left)):
        raise RunError(
            f"{run} is in use by another process; wait for it, stop it, or choose another --run"
        )


def _earlier(launched: Launched, before: Launched | None, now: str) -> list[SubmissionRecord]:
    """Submissions before this one, each at its own price; objects updated in place had theirs until ``now``."""
    if before is None or not before.submitted:
        return [] if before is None else list(before.earlier)
    last = SubmissionRecord(
        slice=before.slice,
        bill=before.bill,
        submitted=before.submitted,
        stopped=before.stopped or (now if launched.commands.in_place else None),
        untouched=before.untouched,
        until=now,
    )
    return [*before.earlier, last]


def _placed(launched: Launched) -> Launched:
    """Adds the client's current defaults, such as the context, to all commands of a launch.

    Raises:
        RunError: the client has no default, or another one than at submit.
    """
    defaults: list[str] = []
    for default in launched.commands.asked:
        defaults.append(f"--{default.what}={_answer(default, defaults)}")
    place = shlex.join(defaults)
    if launched.place not in ("", place):
        raise RunError(
            f"{launched.name} was submitted with {launched.place}, but the defaults are now {place}; run systolic stop {launched.name} first"
        )
    return launched if launched.place or not place else at_place(launched, place)


def _answer(default: ClientDefault, fixed: Sequence[str]) -> str:
    """Asks a client for a default, given the options that are fixed already.

    Raises:
        RunError: the client fails, or prints nothing where it must.
    """
    words = [*default.words, *fixed]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    answer = done.stdout.strip() or ("" if done.returncode else default.empty)
    if done.returncode or not answer:
        why = (done.stderr.strip() or "no answer").splitlines()[-1]
        then = f"; {default.otherwise}" if default.otherwise else ""
        raise RunError(f"{shlex.join(words)} returned no {default.what} ({why}){then}")
    return answer


def _start(launched: Launched, words: Sequence[str]) -> None:
    (launched.path / ENDED).unlink(missing_ok=True)
    detach = [sys.executable, "-m", "systolic.launching.detach", OUTPUT, *here(words)]
    done = subprocess.run(detach, cwd=launched.path, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RunError(f"{shlex.join(words)} could not be started in {launched.folder}")
    write_line(launched.path / PROCESS, identity(int(done.stdout)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """Result of a stop."""

    name: str
    """Name of the launch."""
    text: str
    """One line for the user."""
    saved: bool = True
    """Whether the training had saved, as far as this machine knows."""

    def to_json(self) -> dict[str, Any]:
        """JSON object."""
        return {"name": self.name, "result": self.text, "saved": self.saved}


def stop(launched: Launched) -> Stopped:
    """Asks the training to save, then ends the launch; returns what happened.

    Raises:
        RunError: the client is missing or fails, or found nothing and may have looked in the wrong context, or the
            launch runs on another host.
    """
    check_here(launched)
    if launched.submitted is None and not _has_client(launched):
        return Stopped(name=launched.name, text=NOT_SUBMITTED)
    if launched.untouched:
        keep(replace(launched, stopped=utc_now()))
        return Stopped(
            name=launched.name,
            text="submitting had failed before anything was created; nothing to stop",
        )
    if launched.via == LOCAL:
        return _stop_local(launched)
    process = launched.process if launched.detached else None
    if process is not None and lives(process):
        # Without an answer from the client nothing could be deleted, neither here nor by the script killed below.
        call(launched.path, launched.commands.status)
        # The script would request the machines again.
        os.killpg(process.pid, signal.SIGKILL)
    left = _has_left_queue(launched)
    codes = [GONE if left else _end(launched, words) for words in launched.commands.stop]
    existed = any(code != GONE for code in codes)
    if launched.submitted is None and not existed:
        return Stopped(name=launched.name, text=NOT_SUBMITTED)
    by_kubectl = launched.commands.stop[0][0] == "kubectl"
    if not existed and by_kubectl and not launched.place:
        raise RunError(
            f"kubectl finds nothing of {launched.name} in its current context; select the launch's with kubectl config use-context CONTEXT"
        )
    keep(replace(launched, stopped=utc_now()))
    if KILLED in codes:
        return _unsaved(launched, "the container was killed before the training had saved")
    where = f" ({launched.place})" if launched.place else ""
    return Stopped(
        name=launched.name, text="stopped" if existed else f"already gone, nothing to stop{where}"
    )


def _unsaved(launched: Launched, why: str) -> Stopped:
    """Result of a stop after which the run lacks the last steps."""
    checkpoints = Path(launched.run) / "checkpoints"
    steps = [int(p.name) for p in checkpoints.glob("*") if p.name.isdigit() and manifest.is_at(p)]
    kept = f"its newest checkpoint is of step {max(steps)}" if steps else "it has no checkpoint"
    return Stopped(
        name=launched.name, text=f"stopped; {why}; run {launched.run}: {kept}", saved=False
    )


def _has_left_queue(launched: Launched) -> bool:
    """Whether Slurm has no job of a launch, which scancel does not report.

    Raises:
        RunError: squeue fails.
    """
    words = [*launched.commands.status, "--noheader"]
    if words[0] != "squeue":
        return False
    check_client(words[0])
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise failed(launched.path, words, done.returncode)
    return not done.stdout.strip()


def _has_client(launched: Launched) -> bool:
    """Whether the client is here by which the user may have submitted a launch by hand."""
    return launched.via != LOCAL and shutil.which(launched.commands.stop[0][0]) is not None


def _end(launched: Launched, words: Sequence[str]) -> int:
    """Runs a command that ends a launch; returns 0, GONE if there was nothing to end, or KILLED.

    Raises:
        RunError: the command fails for another reason.
    """
    check_client(words[0])
    if words[0] != "kubectl":
        code = code_of(launched.path, words)
        if code not in (0, GONE, KILLED):
            raise failed(launched.path, words, code)
        return code
    done = subprocess.run(words, cwd=launched.path, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stdout + done.stderr)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("Warning: ")]
    if done.returncode and not all(line.startswith(NOTHING) for line in errors if line):
        raise failed(launched.path, words, done.returncode)
    lines = [*done.stdout.splitlines(), *errors]
    return GONE if all(line.startswith(NOTHING) for line in lines if line) else 0


def _stop_local(launched: Launched) -> Stopped:
    process = launched.process
    if process is None or not lives(process):
        return Stopped(name=launched.name, text=f"not running ({phase(launched).name})")
    os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + SAVE_SECONDS + 10
    while lives(process):
        if time.monotonic() > deadline:
            raise RunError(f"{launched.name} did not end; its supervisor is process {process.pid}")
        time.sleep(POLL_SECONDS)
    why = unsaved(phase(launched).codes)
    return _unsaved(launched, why) if why else Stopped(name=launched.name, text="stopped")
