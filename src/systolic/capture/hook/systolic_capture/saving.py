"""Files that the program saves: arrays of the slice have no values, and a file that is written of them has zeros."""

import os
import sys

MODULES = (
    *("orbax", "tensorstore", "safetensors", "flax.serialization", "flax.training", "msgpack"),
    *("numpy.lib", "pickle", "cloudpickle", "dill", "joblib", "h5py", "torch"),
)
"""Packages that write files."""
WORDS = ("save", "checkpoint", "serialize")
"""Words in the names of functions that do."""
MOST_FRAMES = 40

LARGE_BYTES = 1 << 20
"""Bytes of an array from which its value is hardly read to be looked at."""

_told = []
_read = []


def read(array):
    """Warns, once, where the values of an array are read to be saved, or those of a large one at all; a loss is none of them."""
    if _told or array.size <= 1:
        return
    if _saves():
        warn()
    elif array.nbytes >= LARGE_BYTES and not _read:
        _read.append(True)
        _say(
            "reads large arrays of the slice",
            "zeros are read: a file that it writes of them has zeros",
        )


def _say(what, then):
    from systolic_capture import calls

    where = f" ({at})" if (at := line()) else ""
    text = f"the program {what}{where}: they stand for values that nobody has computed, and {then}"
    print(f"systolic: {text}", file=sys.stderr, flush=True)
    calls.note(text)


def warn():
    """Warns, once, that zeros are saved."""
    if _told:
        return
    _told.append(True)
    _say("saves or sends arrays of the slice", "zeros are written")


def _frames():
    frame = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _saves():
    for frame in _frames():
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(tuple(f"{package}." for package in MODULES)) or module in MODULES:
            return True
        if any(word in frame.f_code.co_name.lower() for word in WORDS):
            return True
    return False


def line():
    """The line of the program that is at work; empty where it is in no line of its own."""
    installed = (
        os.path.dirname(__file__),
        os.path.dirname(os.__file__),
        f"{os.sep}site-packages{os.sep}",
    )
    for frame in _frames():
        name = frame.f_code.co_filename
        if not any(part in name for part in installed) and not name.startswith("<"):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
    return ""
