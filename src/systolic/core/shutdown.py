"""Threads in uninterruptible native code, and leaving a process while one of them runs.

A daemon thread that comes back from native code after the interpreter has ended is cancelled inside
a C++ destructor, which aborts the process. So these threads are not daemons: a Python program waits
for them at its end, and a command that has printed its answer does not.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_NAME = "systolic-native-"
_lost: list[int] = []
_at_once: list[bool] = []


def start_native(name: str, work: Callable[[], None]) -> threading.Thread:
    """Runs ``work``, which spends its time in native code such as a compiler, in a thread of its own.

    Args:
        name: What it does, for whoever lists the threads.
        work: Raises nothing.
    """
    thread = threading.Thread(target=work, name=_NAME + name)
    thread.start()
    return thread


def remember_interrupts() -> None:
    """Keeps Ctrl-C from being lost in a command: some imported code catches KeyboardInterrupt and continues.

    The exception is raised as usual; :func:`raise_lost_interrupt` raises it again.
    """
    signal.signal(signal.SIGINT, _interrupted)


def raise_lost_interrupt() -> None:
    """Raises KeyboardInterrupt if other code caught an earlier one."""
    if _lost:
        _lost.clear()
        raise KeyboardInterrupt


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    _lost.append(number)
    raise KeyboardInterrupt


class TerminatedError(KeyboardInterrupt):
    """SIGTERM within :func:`ends_cleanly`: what catches an interrupt catches it too."""


@contextmanager
def ends_cleanly() -> Generator[None]:
    """SIGTERM interrupts the block as Ctrl-C does, so that it removes what it was writing; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = os.getpid()

    def end(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        # A process that was forked in the block has nothing to remove, and a second signal would cut the removal short.
        if os.getpid() != own:
            os._exit(128 + number)
        signal.signal(number, signal.SIG_IGN)
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def remembered(signals: list[int]) -> Generator[None]:
    """Appends SIGTERM and Ctrl-C to a list while it is open, in the main thread; code within may handle them itself."""

    def remember(number: int, frame: FrameType | None) -> None:
        del frame
        signals.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.signal(each, remember) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def leave_at_once() -> None:
    """Makes :func:`leave` skip functions registered with atexit, which would wait for a process that is dead."""
    _at_once.append(True)


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code, at once even while native code works.

    Functions registered with atexit run, and printed output is flushed.
    """
    if _at_once:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        os._exit(code)
    if any(thread.name.startswith(_NAME) for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        os._exit(code)
    sys.exit(code)
