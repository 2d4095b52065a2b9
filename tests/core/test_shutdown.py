"""Ending a process while a thread works in native code."""

import contextlib
import signal
import subprocess
import sys

import pytest

from systolic.core.shutdown import raise_lost_interrupt, remember_interrupts

AT_ONCE = """
import atexit, threading
from systolic.core.shutdown import leave, start_native

atexit.register(lambda: print("cleaned up"))
start_native("forever", threading.Event().wait)
print("told")
leave(130)
"""

WAITS = """
import threading
from systolic.core.shutdown import start_native

free = threading.Event()

def work():
    free.wait()
    print("worked")

start_native("work", work)
threading.Timer(0.2, free.set).start()
print("told")
"""


def run(code: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_command_leaves_at_once_with_all_that_it_printed():
    assert run(AT_ONCE) == (130, "told\ncleaned up\n", "")


def test_a_program_waits_for_native_work():
    assert run(WAITS) == (0, "told\nworked\n", "")


def test_without_such_a_thread_it_is_an_exit():
    code, _, _ = run("from systolic.core.shutdown import leave; leave(3)")
    assert code == 3


def test_an_interrupt_that_was_caught_by_somebody_comes_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        remember_interrupts()
        with contextlib.suppress(KeyboardInterrupt):  # as an import does that catches everything
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            raise_lost_interrupt()
        raise_lost_interrupt()  # once
    finally:
        signal.signal(signal.SIGINT, before)
