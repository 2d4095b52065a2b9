"""Threads in native code that nothing can interrupt, and leaving a process while one of them works.

A daemon thread that comes back from native code after the interpreter has ended is cancelled inside
a C++ destructor, which aborts the process. So these threads are none: a Python program that ends
waits for them, and a command, whose answer is out, does not.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

_NAME = "systolic-native-"


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
    """Makes Ctrl-C hold for a command: imports contain code that catches KeyboardInterrupt and goes on.

    The exception is raised as ever; :func:`raise_lost_interrupt` raises it again.
    """
    signal.signal(signal.SIGINT, _interrupted)


def raise_lost_interrupt() -> None:
    """Raises KeyboardInterrupt where an earlier one was caught by somebody and the command goes on."""
    if _lost:
        _lost.clear()
        raise KeyboardInterrupt


_lost: list[int] = []


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    _lost.append(number)
    raise KeyboardInterrupt


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code, at once even while native code works.

    What was registered to run at exit runs, and what was printed is out.
    """
    if any(thread.name.startswith(_NAME) for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        os._exit(code)
    sys.exit(code)
