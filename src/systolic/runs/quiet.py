"""Suppresses log messages around a failed save, which the run reports in one line."""

import logging
import os
import sys
import warnings
from types import CoroutineType, TracebackType

_ORBAX = f"{os.sep}orbax{os.sep}"
_UNSTARTED = "coroutine 'async_serialize"
_installed = False


def hush() -> None:
    """Suppresses messages of Orbax and its event loops about saves for the rest of the process.

    When a disk fills up, every array of a checkpoint fails. Orbax raises the first failure and closes
    its event loop. The other failures are logged as unretrieved task exceptions when they are
    collected, hit the closed loop in TensorStore's threads, or are coroutines that were never awaited.
    """
    global _installed
    if _installed:
        return
    _installed = True
    logging.getLogger("absl").addFilter(_progress)
    logging.getLogger("asyncio").addFilter(_failures)
    warnings.filterwarnings("ignore", message=_UNSTARTED, category=RuntimeWarning)
    before = sys.unraisablehook

    def hook(report: "sys.UnraisableHookArgs") -> None:
        if not _of_a_closed_loop(report):
            before(report)

    sys.unraisablehook = hook


def _of_a_closed_loop(report: "sys.UnraisableHookArgs") -> bool:
    error = report.exc_value
    if isinstance(error, RuntimeWarning):  # If warnings are errors.
        return isinstance(report.object, CoroutineType) and _ORBAX in (
            report.object.cr_code.co_filename
        )
    return isinstance(error, RuntimeError) and "loop is closed" in str(error)


def _progress(record: logging.LogRecord) -> bool:
    """Log filter that drops Orbax's messages: failures surface as one error, and the run reports progress."""
    return _ORBAX not in record.pathname


def _failures(record: logging.LogRecord) -> bool:
    """Log filter that drops asyncio's messages about Orbax tasks."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if ".orbax-checkpoint-tmp" in str(error):  # TensorStore's failures have no traceback.
        return False
    trace: TracebackType | None = None if error is None else error.__traceback__
    while trace is not None:
        if _ORBAX in trace.tb_frame.f_code.co_filename:
            return False
        trace = trace.tb_next
    return True
