"""Children that are forked from a process which has imported JAX, Flax and Orbax already: those take a second and more.

``with forked():`` lets :class:`subprocess.Popen` begin children that compile or rehearse, and programs of ``tests``,
that way. A forked process is a child of this one as any other: it has its own process id, session, files,
environment, folder and exit code, and runs its program as ``__main__`` to the interpreter's end. JAX starts no
threads, devices or compilers before it is used, and has its settings from the child's environment. Only the seed by
which strings are hashed is that of all other forked children.

Children that show what Python imports, or that end in the middle of it, are started as usual: ``-c`` and other
modules, and those whose interpreter has other settings (``PYTHON...``) or another user, group or mask.
"""

import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

TESTS = Path(__file__).parent
IMPORTED = (
    *("jax.experimental.topologies", "cloudpickle", "flax.nnx", "optax", "orbax.checkpoint"),
    *("systolic.compiling.child", "systolic.runs", "systolic.steps", "systolic.models"),
)
MODULES = (
    *("systolic.compiling.child", "systolic.training.rehearsal"),
    *("systolic.formats.program.child", "systolic.formats.program.exported"),
    "systolic.compiling.kernels",
)
"""Programs of the package that are forked."""
SUBREAPER = 36
"""Linux's ``PR_SET_CHILD_SUBREAPER``: orphans below this process become its children."""
LIMITS = tuple(sorted(name for name in dir(resource) if name.startswith("RLIMIT_")))
"""Names of the limits that a process has."""
COVERAGE = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
"""Variables by which coverage counts lines of whole interpreters."""
PATHS = "PYTHONPATH"
"""The one variable of an interpreter that a forked process takes later."""
PYTHONS = ((3, 11), (3, 13))
"""First and last Python whose :class:`subprocess.Popen` begins children by the method that :class:`Forked` has."""


class Nursery:
    """The process that forks; it starts with the first child.

    Args:
        words: Module that serves, by default this one, and what it has before the number of its line.
        variables: Environment beside this process's.
    """

    def __init__(self, *words: str, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._words, self._variables = words or ("tests.forked",), variables
        self._guard = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._prctl = ctypes.CDLL(None).prctl

    def fork(self, asked: Mapping[str, Any], files: Sequence[int]) -> int:
        """The id of a new child of this process, which has ``files`` as its standard ones."""
        with self._guard:
            try:
                return self._asked(asked, files)
            except (EOFError, OSError):  # it was killed
                self.close()
                self._line = None
            try:
                return self._asked(asked, files)
            except (EOFError, OSError) as error:
                raise RuntimeError(
                    f"`python -m {' '.join(self._words)}` ends; its error is above"
                ) from error

    def _asked(self, asked: Mapping[str, Any], files: Sequence[int]) -> int:
        line = self._begun()
        content = json.dumps(asked).encode()
        self._prctl(SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(line, [len(content).to_bytes(4, "little")], list(files))
            line.sendall(content)
            return int.from_bytes(_read(line, 4), "little")
        finally:
            self._prctl(SUBREAPER, 0, 0, 0, 0)

    def _begun(self) -> socket.socket:
        if self._line is None:
            self._line, there = socket.socketpair()
            with there:
                self.process = Popen(
                    [sys.executable, "-m", *self._words, str(there.fileno())],
                    pass_fds=[there.fileno()],
                    env={name: os.environ[name] for name in os.environ if name[:4] != "JAX_"}
                    | dict(self._variables),
                    cwd=TESTS.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        return self._line

    def close(self) -> None:
        if self._line is not None and self.process is not None:
            self._line.close()
            self.process.wait()


Popen = subprocess.Popen
"""Python's own, which :func:`forked` replaces."""
NURSERY: list[Nursery] = []
"""The nursery of this process, if there is one."""
CAPTURED: list[Nursery] = []
"""That of programs under capture, while the fixture ``forked_programs`` lasts."""
CAPTURE = "SYSTOLIC_CAPTURE"
"""Variable of a program under capture."""


class Forked(Popen):
    """A process that is forked where :func:`fits` says so."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        close_fds, pass_fds, cwd, env, _, _, shell, *pipes = rest
        ends, (_, *user, new_session, process_group) = pipes[:6], pipes[6:]
        given = preexec_fn or shell or executable not in (None, sys.executable)
        other = process_group != -1 or user != [None, None, None, -1]
        env = dict(os.environ if env is None else env)
        nursery = None if given or other or not close_fds else nursery_of(args, env)
        if nursery is None:
            super()._execute_child(args, executable, preexec_fn, *rest)  # ty: ignore[missing-attribute]
            return
        asked = {
            "words": [os.fspath(word) for word in args[1:]],
            "env": env,
            "cwd": os.fspath(cwd or Path.cwd()),
            "new_session": bool(new_session),
            "numbers": [0, 1, 2, *pass_fds],
            "interrupts": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
            "mask": _mask(),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "cores": list(os.sched_getaffinity(0)),
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        }
        files = [end if end >= 0 else n for n, end in enumerate((ends[0], ends[3], ends[5]))]
        self.pid = nursery.fork(asked, [*files, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*ends)  # ty: ignore[missing-attribute]


def nursery_of(args: Any, env: Mapping[str, str]) -> Nursery | None:
    """The nursery of a command; None where it needs an interpreter of its own."""
    if fits(args, env):
        return NURSERY[0]
    captured = CAPTURED and CAPTURE in env and not isinstance(args, str | bytes | os.PathLike)
    if captured and args[0] == sys.executable and Path([*args, ""][1]).is_file():
        return CAPTURED[0]
    return None


def fits(args: Any, env: Mapping[str, str]) -> bool:
    """Whether a command is a program that needs no interpreter of its own."""
    if CAPTURE in env or _interpreter(env) != _interpreter(os.environ):
        return False
    if isinstance(args, str | bytes | os.PathLike) or len(args) < 2 or args[0] != sys.executable:
        return False
    if args[1] == "-m" and len(args) > 2:
        return args[2] in MODULES or str(args[2]).startswith("tests.")
    return TESTS in Path(args[1]).parents


@contextmanager
def forked() -> Generator[None]:
    """Begins children of this process by forking, while it lasts; does nothing where that can't be done."""
    known = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    if sys.platform != "linux" or not known or NURSERY or any(map(os.environ.get, COVERAGE)):
        yield
        return
    NURSERY.append(Nursery())
    subprocess.Popen = Forked  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        subprocess.Popen = Popen
        NURSERY.pop().close()


def _interpreter(env: Mapping[str, str]) -> dict[str, str]:
    """What Python reads when it starts."""
    return {name: env[name] for name in env if name.startswith("PYTHON") and name != PATHS}


def _mask() -> int:
    """Permissions that new files lack."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)


def _read(line: socket.socket, size: int) -> bytes:
    made = b""
    while len(made) < size:
        part = line.recv(size - len(made))
        if not part:
            raise EOFError("the process that forks has ended")
        made += part
    return made


def serve(line: socket.socket, base: Sequence[str], added: Mapping[str, str]) -> Sequence[str]:
    """Forks a child for each request and ends with the line; returns in the child, what it shall run.

    Args:
        line: Where requests come from.
        base: Folders of modules that every interpreter has.
        added: Variables that imports have set.
    """
    while True:
        try:
            size, files, _, _ = socket.recv_fds(line, 4, 16)
            if not size:
                os._exit(0)
            asked = json.loads(_read(line, int.from_bytes(size, "little")))
        except (OSError, EOFError):
            os._exit(0)
        answer, told = os.pipe()
        between = os.fork()
        if not between:
            if child := os.fork():
                os.write(told, child.to_bytes(4, "little"))
                os._exit(0)
            line.close()
            os.close(answer)
            os.close(told)
            _become(asked, files)
            sys.path.extend(base)
            for name, value in added.items():
                os.environ.setdefault(name, value)
            return asked["words"]
        os.close(told)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)  # the child is now one of who asked
        line.sendall(os.read(answer, 4))
        os.close(answer)


def _become(asked: Mapping[str, Any], files: Sequence[int]) -> None:
    """Takes the surroundings of an interpreter that was started so."""
    import jax
    import numpy as np

    if asked["new_session"]:
        os.setsid()
    # Away from the numbers that they shall have.
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(asked["numbers"]) + 1) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(asked["numbers"], above, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["cwd"])
    if asked["interrupts"]:  # a shell's job in the background does not
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(asked["mask"])
    os.setpriority(os.PRIO_PROCESS, 0, asked["nice"])
    os.sched_setaffinity(0, asked["cores"])
    for name, limits in asked["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    np.random.seed()  # of all forked children it would be one; Python's own changes with a fork
    # Its name in lists of processes.
    Path("/proc/self/comm").write_text(_name(asked["words"]))
    before, env = dict(os.environ), asked["env"]
    for name in before.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)
    for name, value in env.items():
        if name.startswith("JAX_") and before.get(name) != value:
            _set(jax, name.lower(), value)
    words = asked["words"]
    named = words[0] == "-m"
    given = env.get(PATHS, "")
    first = asked["cwd"] if named else str(Path(words[0]).parent)
    sys.path[:] = [first, *filter(None, given.split(os.pathsep))]
    sys.argv[:] = words[1:] if named else words


def _name(words: Sequence[str]) -> str:
    """``compiling.child`` of a module, ``child`` of a file."""
    return ".".join(words[1].split(".")[-2:]) if words[0] == "-m" else Path(words[0]).stem


def _set(jax: Any, name: str, value: str) -> None:
    """Gives JAX a setting as its variable would."""
    if name in jax.config.values:
        known = jax.config.values[name]
        if isinstance(known, bool):
            jax.config.update(name, value.lower() in ("y", "yes", "t", "true", "on", "1"))
        else:
            jax.config.update(name, type(known)(value) if isinstance(known, int | float) else value)


def base_paths() -> list[str]:
    """Folders of modules that every interpreter has."""
    given = os.environ.get(PATHS, "").split(os.pathsep)
    return [path for path in sys.path[1:] if path not in given]


def import_all(names: Sequence[str]) -> dict[str, str]:
    """Imports what children use; returns the variables that this has set."""
    before = dict(os.environ)
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def run(words: Sequence[str]) -> None:
    """Runs a module or a file as ``__main__``."""
    if words[0] == "-m":
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    # As the terminal's Ctrl-C goes to a test's process and its children, which end by themselves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = socket.socket(fileno=int(sys.argv[1]))
    run(serve(line, base_paths(), import_all(IMPORTED)))
