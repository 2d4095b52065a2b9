"""Heartbeats of processes: late and dead ones are reported."""

import json
from collections.abc import Iterator

import jax
import pytest

from systolic.core import shutdown
from systolic.core.errors import DataError, RunError
from systolic.training.distributed import heartbeat
from systolic.training.distributed.heartbeat import FOLDER, Heartbeat
from systolic.training.ledger import Ledger, Spent


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Store:
    """A coordinator's key-value store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite
        self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]


class Job:
    """Two processes with one store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.store = Clock(), Store()
        self.told: list[tuple[str, str]] = []
        self.kept: list[tuple[str, str]] = []
        self.ledgers = [Ledger(self.clock), Ledger(self.clock)]
        self.calls = [self.call(index) for index in range(2)]
        monkeypatch.setattr(heartbeat.time, "sleep", self.sleep)

    def call(self, index: int) -> Heartbeat:
        made = Heartbeat(
            self.ledgers[index],
            lambda: 57 + index,
            lambda name, text: self.told.append((name, text)),
            lambda name, text: self.kept.append((name, text)),
            lambda: self.store,
            self.clock,
        )
        made._client, made._index = self.store, index
        return made

    def sleep(self, seconds: float) -> None:
        """Process 0 continues, process 1 is dead."""
        self.clock.now += seconds
        self.calls[0].say()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    yield Job(monkeypatch)
    shutdown._at_once.clear()


def test_the_ledger_says_what_the_time_goes_to():
    clock = Clock()
    ledger = Ledger(clock)
    with ledger.spend(Spent.step):
        clock.now = 2.0
        assert ledger.doing() == (Spent.step, 2.0)
        with ledger.spend(Spent.data_wait):
            clock.now = 5.0
            assert ledger.doing() == (Spent.data_wait, 3.0)
        assert ledger.doing() == (Spent.step, 0.0)
    assert ledger.spent(Spent.step) == 2.0
    assert ledger.spent(Spent.data_wait) == 3.0


def test_a_process_that_reads_while_the_others_wait_is_late(job: Job):
    with job.ledgers[0].spend(Spent.step), job.ledgers[1].spend(Spent.data_wait):
        for _ in range(2):
            for call in job.calls:
                call.say()
            job.calls[0].listen()
            job.calls[0]._judge()
            job.clock.now += 40.0
    [(name, text)] = job.told
    assert name == "late"
    assert text.startswith("process 1 on ")
    assert "has been reading data for 40 s at step 58" in text


def test_all_that_compile_are_not_late(job: Job):
    with job.ledgers[0].spend(Spent.compile), job.ledgers[1].spend(Spent.compile):
        job.clock.now = 100.0
        for call in job.calls:
            call.say()
        job.calls[0]._judge()
    assert not job.told


def test_an_error_of_a_collective_names_the_dead(job: Job):
    for call in job.calls:
        call.say()
    with pytest.raises(
        RunError, match=r"process 1 on \S+ is dead or unreachable \(last heartbeat at step 58\)"
    ):
        job.calls[0].__exit__(None, jax.errors.JaxRuntimeError("Connection closed by peer"), None)
    assert not job.told, "the error is printed, and once"
    [(name, text)] = job.kept
    assert name == "lost"
    assert "dead" not in text
    assert shutdown._at_once


@pytest.mark.parametrize("error", [DataError("no data"), ValueError("a bug"), None])
def test_other_errors_stay(job: Job, error: Exception | None):
    for call in job.calls:
        call.say()
    job.calls[0].__exit__(None, error, None)
    assert not job.told


def test_an_error_with_all_alive_stays(job: Job, monkeypatch: pytest.MonkeyPatch):
    def both(seconds: float) -> None:
        job.sleep(seconds)
        job.calls[1].say()

    monkeypatch.setattr(heartbeat.time, "sleep", both)
    job.calls[0].__exit__(None, jax.errors.JaxRuntimeError("out of memory"), None)
    assert not job.told


def test_silence_is_death_without_an_error(job: Job, monkeypatch: pytest.MonkeyPatch):
    codes: list[int] = []
    monkeypatch.setattr(heartbeat.os, "_exit", codes.append)
    for call in job.calls:
        call.say()
    job.calls[0].listen()
    job.clock.now = heartbeat.DEAD_SECONDS
    job.calls[0].say()
    job.calls[0]._judge()
    assert codes == [75]
    assert job.kept[0][0] == "lost"


def test_what_is_said_is_small(job: Job):
    job.calls[0].say()
    text = job.store.values[f"{FOLDER}/0"]
    assert len(text) < 200
    assert json.loads(text)["step"] == 57
