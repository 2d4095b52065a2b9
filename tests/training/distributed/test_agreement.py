"""Several processes decide together: which checkpoint they read, and when they stop."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from systolic.runs import manifest
from systolic.training import distributed
from systolic.training.interrupt import AGREE, AGREE_SECONDS, Interrupt
from tests.training.children import environment, together
from tests.training.restore_child import flip


def cut(step: Path) -> None:
    largest = max((f for f in step.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def no_manifest(step: Path) -> None:
    (step / manifest.NAME).unlink()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flip": (flip, "other content in process 1"),
    "cut": (cut, "were written"),
    "no manifest": (no_manifest, "missing in process 1"),
    "gone": (shutil.rmtree, "not there in process 1"),
}


def restored(tmp_path: Path, damage: dict[int, list[int]], how: Callable[[Path], Any]) -> Any:
    """What two processes restore of copies in which a process finds steps damaged."""
    for process in (0, 1):
        copy = tmp_path / f"{process}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "saved", copy)
        for step in damage.get(process, []):
            how(copy / str(step))
    told = together(
        ["tests.training.restore_child", "restore", f"{tmp_path}/{{}}"],
        environment(tmp_path / "cache"),
        2,
    )
    answers = [json.loads(out.splitlines()[-1]) for out in told]
    return answers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agreement")
    together(
        ["tests.training.restore_child", "save", str(folder / "saved")],
        environment(folder / "cache"),
        2,
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_the_newest_that_all_can_read(saved: Path, kind: str):
    how, reason = DAMAGE[kind]
    answers = restored(saved, {0: [20], 1: [30]}, how)
    assert answers[0] == answers[1]
    assert (answers[0]["step"], answers[0]["same"]) == (10, True)
    assert [step for step, _ in answers[0]["skipped"]] == [30, 20]
    assert reason in answers[0]["skipped"][0][1]
    none = restored(saved, {0: [20], 1: [30, 10]}, how)
    assert none[0] == none[1]
    assert "no checkpoint in FOLDER is intact" in none[0]["error"]


class Clock:
    """Seconds that pass when a test says so."""

    now, calls = 0.0, 0

    def __call__(self) -> float:
        return self.now


def asked(monkeypatch: pytest.MonkeyPatch, mine: float, slowest: float, calls: int) -> list[int]:
    """The calls of ``soon`` at which processes ask each other, where a step takes me ``mine`` seconds."""
    clock, found = Clock(), []

    def agree(flag: bool, seconds: float) -> tuple[bool, float]:
        assert not flag
        found.append(clock.calls)
        return False, max(seconds, slowest)

    monkeypatch.setattr(distributed, "several", lambda: True)
    monkeypatch.setattr(distributed, "agree", agree)
    interrupt = Interrupt(clock)
    for clock.calls in range(calls):
        assert not interrupt.soon()
        clock.now += mine
    return found


def test_fast_steps_ask_every_few(monkeypatch: pytest.MonkeyPatch):
    assert asked(monkeypatch, 0.01, 0.01, 3 * AGREE + 1) == [0, 1, 1 + AGREE, 1 + 2 * AGREE]


def test_slow_steps_ask_at_each(monkeypatch: pytest.MonkeyPatch):
    assert asked(monkeypatch, AGREE_SECONDS, 0.0, 4) == [0, 1, 2, 3]
    # Also where only another process is slow, or half of that time passes in a step.
    assert asked(monkeypatch, 0.01, 60.0, 4) == [0, 1, 2, 3]
    assert asked(monkeypatch, AGREE_SECONDS / 2, 0.0, 7) == [0, 1, 3, 5]


def test_another_process_is_told_to_stop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "several", lambda: True)
    answers = [True]
    monkeypatch.setattr(distributed, "agree", lambda flag, seconds: (answers.pop(), seconds))
    interrupt = Interrupt(Clock())
    assert interrupt.signal is None
    assert interrupt.soon()
    assert interrupt.signal is signal.SIGTERM
    # What all have agreed on stays so, and nobody is asked again.
    assert interrupt.soon()
    assert interrupt.agreed()
    assert interrupt.soon()


def test_alone_nobody_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(distributed, "agree")
    interrupt = Interrupt(Clock())
    assert not interrupt.soon()
    interrupt.signal = signal.SIGINT
    assert interrupt.soon()


def test_a_second_interrupt_raises_in_a_python_program():
    """A notebook's kernel is not ended; a command, which has a handler of its own, is."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert interrupt.signal is signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
