"""Liveness of the processes of a job: each sends a heartbeat every second, and process 0 reports late and dead ones.

A collective waits silently for the slowest process, and its errors name an address at best. Heartbeats go through the
key-value store of the job's coordinator, so they arrive while devices wait.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from systolic.core.errors import LostError, SystolicError
from systolic.core.shutdown import leave_at_once
from systolic.training import distributed
from systolic.training.ledger import Ledger, Spent

BEAT_SECONDS = 1.0
LATE_SECONDS = 30.0
"""Time that a process may read, save or compile while others wait for it, before it is reported as late."""
SILENT_SECONDS = 3.0
"""Heartbeat timeout after an error of a collective."""
DEAD_SECONDS = 60.0
"""Heartbeat timeout without an error of a collective."""
FOLDER = "systolic/roll"
DOES = {
    Spent.data_wait: "reading data",
    Spent.checkpoint: "saving or restoring a checkpoint",
    Spent.compile: "compiling",
    Spent.eval: "evaluating",
    Spent.diagnose: "probing gradients",
    Spent.start: "starting",
}


class KeyValues(Protocol):
    """Methods used of JAX's coordinator client."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets a key for all processes."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns the keys below a folder with their values."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """Latest heartbeat of a process."""

    index: int
    host: str
    number: int
    """Sequence number of the heartbeat."""
    step: int
    kind: str
    """Value of the current :class:`Spent`."""
    seconds: float
    """Time spent in it so far."""

    @property
    def name(self) -> str:
        """Name of the process for messages."""
        return f"process {self.index} on {self.host}"


def late(beats: Mapping[int, Beat]) -> list[Beat]:
    """Processes that do local work while another one waits in a step."""
    waits = any(
        beat.kind == Spent.step.value and beat.seconds >= LATE_SECONDS / 2
        for beat in beats.values()
    )
    alone = {kind.value for kind in DOES}
    return [
        beat
        for beat in beats.values()
        if waits and beat.kind in alone and beat.seconds >= LATE_SECONDS
    ]


class Heartbeat:
    """Context in which this process sends heartbeats; does nothing in a single-process job.

    On exit, an error of a collective is replaced by one that names the dead process.

    Args:
        ledger: Records what the process spends its time on.
        step: Returns the number of steps so far.
        warn: Called from a thread of process 0 with the name and the text of an event that the run goes on after: ``late``.
        record: Called with those of one that ends it, ``lost``; what is printed of it is the error.
        client: Returns the key-value store, by default JAX's.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        step: Callable[[], int],
        warn: Callable[[str, str], None],
        record: Callable[[str, str], None],
        client: Callable[[], KeyValues | None] = lambda: _client(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger, self._step, self._clock = ledger, step, clock
        self._warn, self._record = warn, record
        self._find, self._client = client, None
        self._index = 0
        self._ended = threading.Event()
        self._number = 0
        self._heard: dict[int, tuple[Beat, float]] = {}
        """Latest heartbeat of each process, and when it arrived."""
        self._told: set[tuple[int, str, int]] = set()

    def __enter__(self) -> Self:
        self._client = self._find()
        if self._client is not None:
            self._index = distributed.peers().index
            threading.Thread(target=self._beat, name="systolic-roll-call", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._client is not None and isinstance(error, Exception):
                self._blame(error)
        finally:
            self._ended.set()

    def say(self) -> None:
        """Sends a heartbeat."""
        kind, seconds = self._ledger.doing()
        self._number += 1
        mine = {
            "host": socket.gethostname(),
            "number": self._number,
            "step": self._step(),
            "kind": kind.value,
            "seconds": seconds,
        }
        if self._client is not None:
            self._client.key_value_set(f"{FOLDER}/{self._index}", json.dumps(mine), True)

    def listen(self) -> dict[int, float]:
        """Reads the heartbeats; returns the seconds since each process's latest."""
        now = self._clock()
        for key, text in self._client.key_value_dir_get(FOLDER) if self._client else []:
            index = int(key.rpartition("/")[2])
            beat = Beat(index=index, **json.loads(text))
            if index not in self._heard or self._heard[index][0].number != beat.number:
                self._heard[index] = (beat, now)
        return {index: now - when for index, (_, when) in self._heard.items()}

    def dead(self, seconds: float) -> list[Beat]:
        """Other processes without a heartbeat for at least ``seconds``."""
        return [
            self._heard[index][0]
            for index, silent in self.listen().items()
            if silent >= seconds and index != self._index
        ]

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self.say()
                if self._index == 0:
                    self._judge()
            except RuntimeError:  # The coordinator is gone; its client ends this process.
                return

    def _judge(self) -> None:
        dead = self.dead(DEAD_SECONDS)
        if dead:
            self._record("lost", _names(dead))
            print(f"systolic: {LostError(_lost(dead)).line}", file=sys.stderr, flush=True)
            # The main thread waits in a collective that never completes.
            os._exit(LostError.exit_code)
        for beat in late({index: beat for index, (beat, _) in self._heard.items()}):
            lateness = (beat.index, beat.kind, beat.step)
            if lateness not in self._told:
                self._told.add(lateness)
                does = DOES[Spent(beat.kind)]
                self._warn(
                    "late",
                    f"{beat.name} has been {does} for {beat.seconds:.0f} s at step {beat.step}; the other processes wait for it",
                )

    def _blame(self, error: Exception) -> None:
        """Replaces an error of a collective by one that names the dead processes."""
        if isinstance(error, SystolicError) or not _of_a_collective(error):
            return
        try:
            self.listen()
            deadline = self._clock() + 2 * SILENT_SECONDS
            while not (dead := self.dead(SILENT_SECONDS)) and self._clock() < deadline:
                time.sleep(BEAT_SECONDS / 4)
        except RuntimeError:
            return
        if not dead:
            return
        if self._index == 0:
            self._record("lost", _names(dead))
            # The store goes away with this process, and the others still read it.
            time.sleep(BEAT_SECONDS)
        # Otherwise JAX would wait for the dead process at exit.
        leave_at_once()
        raise LostError(_lost(dead)) from error


def _names(dead: list[Beat]) -> str:
    return ", ".join(beat.name for beat in dead)


def _lost(dead: list[Beat]) -> str:
    it = "it" if len(dead) == 1 else "them"
    return f"{_names(dead)} is dead or unreachable (last heartbeat at step {max(beat.step for beat in dead)}); restart all processes, with {it} or on fewer devices: --resume RUN or --continue resumes from the last checkpoint"


def _of_a_collective(error: Exception) -> bool:
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError)


def _client() -> Any:
    """JAX's coordinator client; None in a single process."""
    if not distributed.joined():
        return None
    # No public API stores values for other processes; Orbax uses the same client.
    from jax._src import distributed as coordinator

    return coordinator.global_state.client
