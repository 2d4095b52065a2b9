"""Request of the parent, reports to it (JSON lines in ``events.jsonl``), and the warning of files that the program saves."""

import contextlib
import fcntl
import functools
import json
import os
import signal
import sys
import threading
import types

FOLDER = os.environ.get("SYSTOLIC_CAPTURE", "")
PARENT = "parent.lock"
"""File that the parent has locked while it lives."""
LENT = "SYSTOLIC_CAPTURE_LENT"
"""Variable that is set where the libtpu is the parent's: libtpu sets its path itself when it is imported."""
CUDA = ("xla_cuda12", "xla_cuda13")
"""JAX's plugins for NVIDIA's GPUs."""
LEAST_JAX = (0, 5, 0)
"""Oldest jax whose inner functions are those that are changed here."""
SAVING_MODULES = (
    *("orbax", "tensorstore", "safetensors", "flax.serialization", "flax.training", "msgpack"),
    *("numpy.lib", "pickle", "cloudpickle", "dill", "joblib", "h5py", "torch"),
)
"""Packages that write files."""
SAVING_WORDS = ("save", "checkpoint", "serialize")
"""Words in the names of functions that do."""
MOST_FRAMES = 40

LARGE_BYTES = 1 << 20
"""Bytes of an array from which its value is hardly read to be looked at."""
_lock = threading.Lock()
_warned = []
_read = []


@functools.cache
def request():
    """The parent's ``CaptureRequest``, as it wrote it to request.json."""
    with open(os.path.join(FOLDER, "request.json")) as file:
        return types.SimpleNamespace(**json.load(file))


def say(**record):
    """Appends an event."""
    with _lock, open(os.path.join(FOLDER, "events.jsonl"), "a") as file:
        file.write(json.dumps({"pid": os.getpid(), **record}) + "\n")


def version_of(name):
    """Version of an installed package; None without it."""
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_environment():
    """Ends the process, with a reason, in an environment that can't compile for the slice."""
    import importlib.util

    jax = version_of("jax")
    numbers = tuple(int(part) for part in (jax or "0").split(".")[:3] if part.isdigit())
    if numbers < LEAST_JAX:
        least = ".".join(map(str, LEAST_JAX))
        refuse(
            f"{sys.executable} has jax {jax} and a capture needs {least} or later",
            f"'jax[{'cuda12' if request().gpu else 'tpu'}]'",
        )
    elif request().gpu:
        _check_cuda(jax)
    elif os.path.isfile(os.environ.get("TPU_LIBRARY_PATH", "")):
        pass
    elif importlib.util.find_spec("libtpu") is None:
        lent = request().compiler
        if lent is None:
            refuse(f"{sys.executable} has no libtpu, the compiler of TPUs", f"'jax[tpu]=={jax}'")
        os.environ["TPU_LIBRARY_PATH"] = lent["path"]
        os.environ[LENT] = "1"


def _check_cuda(jax):
    """Lends JAX's CUDA plugin to an environment without one; ends the process where neither fits its jax."""
    import importlib.util

    with contextlib.suppress(ImportError):
        if any(importlib.util.find_spec(f"jax_plugins.{name}") for name in CUDA):
            return
    lent = request().compiler
    if lent is None or lent["version"] != version_of("jaxlib"):
        why = f", and that of Systolic is {lent['version']}" if lent is not None else ""
        refuse(
            f"{sys.executable} has no CUDA plugin of jax {jax}, whose compiler a GPU's program needs{why}",
            f"'jax[cuda12-local]=={jax}'",
        )
    os.environ[LENT] = "1"
    # The parent's folder of plugins alone, and nothing else of its environment.
    plugins = sys.modules.setdefault("jax_plugins", types.ModuleType("jax_plugins"))
    vars(plugins)["__path__"] = [*vars(plugins).get("__path__", ()), lent["path"]]


def compiler():
    """Name and version of the compiler, and whether it is the parent's: the environment has none then."""
    if not request().gpu:
        return ("libtpu", *libtpu())
    if os.environ.get(LENT):
        own = request().compiler
        return own["name"], own["version"], True
    names = (f"jax-cuda{number}-pjrt" for number in (12, 13))
    known = ((name, version_of(name)) for name in names)
    name, version = next((pair for pair in known if pair[1]), ("jax-cuda12-pjrt", None))
    return name, version, False


def libtpu():
    """Version of the compiler, and whether it is the parent's: the environment has none then."""
    if os.environ.get(LENT):
        return request().compiler["version"], True
    return version_of("libtpu"), False


def refuse(reason, package=""):
    """Tells the parent why there is no answer, and ends the process."""
    step = f"{sys.executable} -m pip install {package}" if package else ""
    say(refused=reason, next=step)
    leave(3)


def end_with_parent():
    """Begins to wait for the parent's death, which frees its lock: the process group ends with it, however it died."""

    def wait():
        try:
            with open(os.path.join(FOLDER, PARENT)) as file:
                fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:
            return
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def leave(code):
    """Ends the process: no handler of the program's runs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def warn_of_read(array):
    """Warns, once, where the values of an array are read to be saved, or those of a large one at all; a loss is none of them."""
    if _warned or array.size <= 1:
        return
    if _saves():
        warn_of_save()
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


def warn_of_save():
    """Warns, once, that zeros are saved."""
    if _warned:
        return
    _warned.append(True)
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
        if (
            module.startswith(tuple(f"{package}." for package in SAVING_MODULES))
            or module in SAVING_MODULES
        ):
            return True
        if any(word in frame.f_code.co_name.lower() for word in SAVING_WORDS):
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
