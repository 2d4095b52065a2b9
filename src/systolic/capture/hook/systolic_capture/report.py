"""Request of the parent, and reports to it: JSON lines in ``events.jsonl``."""

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
LEAST_JAX = (0, 5, 0)
"""Oldest jax whose inner functions are those that are changed here."""
_lock = threading.Lock()


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
    """Ends the process, with a reason, in an environment that can't compile for a TPU."""
    import importlib.util

    jax = version_of("jax")
    numbers = tuple(int(part) for part in (jax or "0").split(".")[:3] if part.isdigit())
    if numbers < LEAST_JAX:
        least = ".".join(map(str, LEAST_JAX))
        refuse(f"{sys.executable} has jax {jax} and a capture needs {least} or later", "jax[tpu]")
    elif os.path.isfile(os.environ.get("TPU_LIBRARY_PATH", "")):
        pass
    elif importlib.util.find_spec("libtpu") is None:
        lent = request().libtpu
        if lent is None:
            refuse(f"{sys.executable} has no libtpu, the compiler of TPUs", f"'jax[tpu]=={jax}'")
        os.environ["TPU_LIBRARY_PATH"] = lent["path"]
        os.environ[LENT] = "1"


def libtpu():
    """Version of the compiler, and whether it is the parent's: the environment has none then."""
    if os.environ.get(LENT):
        return request().libtpu["version"], True
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
