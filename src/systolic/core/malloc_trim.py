"""Memory that the C library keeps after it was freed."""

import contextlib
import ctypes
import sys


def trim() -> None:
    """Returns freed memory of the heap to the system; nothing where the C library has no such call (glibc has).

    A compile frees some hundred MB in pieces, which would stay in the peak of the steps that follow.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
