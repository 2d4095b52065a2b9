"""Submits a launch through the platform's own client."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic.artifact.access import is_held
from systolic.core.errors import RunError, TakenError
from systolic.core.files import write_atomically
from systolic.launching import Launch
from systolic.launching.clients import NEEDS, call, check_client, here
from systolic.launching.record import (
    ENDED,
    OUTPUT,
    PROCESS,
    RECORD,
    TIMES,
    Launched,
    at_place,
    from_record,
    keep,
    last_record,
    launches,
    read_record,
    utc_now,
    where_of,
)
from systolic.launching.state import check_here
from systolic.launching.supervisor import STATE, identity, lives

SUBMISSION = ("slice", "bill", "submitted", "stopped", "untouched")
"""Fields of a submission that its cost is computed from."""


def check_free(launch: Launch, folder: Path, via: str) -> None:
    """Checks that no launch of the same name is running, and that the folder is free or from the same launch.

    Raises:
        RunError: a launch of that name is running here or on another host, was submitted to another place, or has another folder.
        TakenError: the folder has files that are not from a launch of that name and platform.
    """
    name = launch.name
    if folder.is_dir() and any(folder.iterdir()):
        before = last_record(folder, name)
        if not before and (folder / RECORD).is_file():
            raise TakenError(
                f"{folder / RECORD} is empty or cut short, and the list has no copy; choose a new folder with --out, or remove {folder} if its launch is not running"
            )
        if not before:
            raise TakenError(
                f"{folder} has files that are not from a launch; choose a new folder with --out"
            )
        if (before.get("name"), before.get("via")) != (name, via):
            raise TakenError(
                f"{folder} holds the launch {before.get('name')} via {before.get('via')}; choose another --name or --out, or remove the folder if that launch is not running"
            )
        there = before.get("submitted") and not before.get("stopped") and not _given_back(folder)
        if there and before.get("where", "") != where_of(launch):
            raise RunError(
                f"{name} was submitted with {before.get('where') or 'no zone, project or namespace'}; run systolic stop {name} first, or choose another --name"
            )
        check_here(from_record({**before, "folder": str(folder.absolute())}, name))
    found = {one.name: one for one in launches()}.get(name)
    if found is None:
        return
    check_here(found)
    if found.detached and found.alive():
        raise RunError(f"{name} is running; run systolic stop {name}, or choose another --name")
    if found.path != folder.absolute() and found.path.is_dir():
        raise RunError(
            f"the launch {name} is in {found.folder}; choose another --name, or launch it again with --out {found.folder}"
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
    first = (*launched.commands["submit"], *launched.commands["checks"])
    for client in (*(each[0] for each in first), *NEEDS.get(launched.via, ())):
        check_client(client)
    made = _placed(launched)
    words = made.commands["submit"]
    for each in made.commands["checks"]:
        call(made.path, each)
    _check_run(made)
    before = last_record(made.path, made.name)
    now = utc_now()
    made = replace(made, submitted=now, earlier=_earlier(made, before, now))
    # Recorded before it starts: a launch that started only in part must be listed so that it can be stopped.
    keep(made)
    untouched = True
    try:
        for each in words[:-1]:
            call(made.path, each)
        if made.detached:
            _start(made, words[-1])
        else:
            untouched = False
            call(made.path, words[-1])
    except (RunError, KeyboardInterrupt) as error:
        why = str(error).removesuffix("; its output is above") or "interrupted"
        keep(replace(made, failed=why, untouched=untouched))
        raise
    return made


def _check_run(made: Launched) -> None:
    """Checks that no other process here trains the run: it would cost restarts, and the launch would take it over later.

    Raises:
        RunError: another launch or another process uses the run.
    """
    run = made.run
    for one in launches():
        if run and one.run == run and one.path != made.path and one.detached and one.alive():
            raise RunError(
                f"{run} is in use by the launch {one.name}; run systolic stop {one.name}, or choose another --run"
            )
    left = read_record(made.path / STATE).get("running", ())
    # Processes that a killed supervisor of this launch left behind are ended by the next.
    if run and Path(run).is_dir() and is_held(Path(run)) and not any(map(lives, left)):
        raise RunError(
            f"{run} is in use by another process; wait for it, stop it, or choose another --run"
        )


def _earlier(made: Launched, before: Mapping[str, Any], now: str) -> list[Mapping[str, Any]]:
    """Submissions before this one, each at its own price; objects updated in place had theirs until ``now``."""
    earlier = list(before.get("earlier", ()))
    if before.get("submitted"):
        last = {name: before.get(name) for name in SUBMISSION}
        if made.commands["in_place"] and not last["stopped"]:
            last["stopped"] = now
        earlier.append({**last, "until": now})
    return earlier


def _placed(launched: Launched) -> Launched:
    """Adds the client's current defaults, such as the context, to all commands of a launch.

    Raises:
        RunError: the client has no default, or another one than at submit.
    """
    found: list[str] = []
    for asked in launched.commands["asked"]:
        found.append(f"--{asked['what']}={_answer(asked, found)}")
    place = shlex.join(found)
    if launched.place not in ("", place):
        raise RunError(
            f"{launched.name} was submitted with {launched.place}, but the defaults are now {place}; run systolic stop {launched.name} first"
        )
    return launched if launched.place or not place else at_place(launched, place)


def _answer(asked: Mapping[str, Any], found: Sequence[str]) -> str:
    """Asks a client for a default, given the options that are fixed already.

    Raises:
        RunError: the client fails, or prints nothing where it must.
    """
    words = [*asked["words"], *found]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    answer = done.stdout.strip() or ("" if done.returncode else asked["empty"])
    if done.returncode or not answer:
        why = (done.stderr.strip() or "no answer").splitlines()[-1]
        then = f"; {asked['otherwise']}" if asked["otherwise"] else ""
        raise RunError(f"{shlex.join(words)} returned no {asked['what']} ({why}){then}")
    return answer


def _start(launched: Launched, words: Sequence[str]) -> None:
    (launched.path / ENDED).unlink(missing_ok=True)
    detach = [sys.executable, "-m", "systolic.launching.detach", OUTPUT, *here(words)]
    done = subprocess.run(detach, cwd=launched.path, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RunError(f"{shlex.join(words)} could not be started in {launched.folder}")
    write_atomically(launched.path / PROCESS, json.dumps(identity(int(done.stdout))) + "\n")
