"""Compile, the parent's side: an outcome from the store, or from a child and its answer or crash.

Programs to compile: a step of a job, or a user's function. Sent to the child as bytes.
"""

import contextlib
import functools
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from systolic.chips import Prices, Slice
from systolic.chips.flags import is_option, name_of
from systolic.compiling import host_backend, settings
from systolic.compiling.dump import SCHEDULE_ONLY
from systolic.compiling.outcome import (
    ERROR,
    EXECUTABLE,
    FAILED,
    FOUND,
    ChildLine,
    Compiled,
    CompileRequest,
    Failed,
    Outcome,
    check_owner,
    read_report,
    rejection,
)
from systolic.compiling.pickled import dumps
from systolic.compiling.settings import COMPILING, child_environment
from systolic.compiling.traced import (
    FunctionCall,
    PagedCall,
    ProgramFacts,
    ServingCall,
    StepKind,
    Traced,
)
from systolic.core.errors import (
    DataError,
    LayoutError,
    MissingExtraError,
    NotFoundError,
    OptionError,
    RunError,
    SystolicError,
)
from systolic.core.files import FULL, Store, cache_home, digest, read_json, unwritable, write_json
from systolic.job import Job
from systolic.models.program.config import Maker

_KNOWN = ("systolic", "builtins")
"""Packages whose code is part of every key."""
_UNASKED = ("power_watts", "power_watts_min", "power_watts_max", "tdp_watts")
"""Fields of a chip, besides its prices, that no program depends on."""
Say = Callable[[str], None]
"""Callback for stages: importing, tracing, lowering, waiting (for another compile of the same program),
compiling, serializing, compiled or found."""
LOG_LINES = 40
REASON = 500
"""Characters of an error that a message has."""
_NO_OPTION = re.compile(r"No such compile option: '([^']+)'")
_MISTAKES = {
    kind.__name__: kind for kind in (OptionError, NotFoundError, DataError, LayoutError, RunError)
}
"""Errors of the child that are raised here as the same class."""
DECISIVE = ("jax", "jaxlib", "libtpu", "flax", "optax", "qwix", "numpy")
"""Packages whose code a job's program depends on."""
CODE = ("models", "steps", "job", "compiling", "recipes", "data", "chips", "core")
"""Packages whose source a job's trace depends on."""


class Program(Protocol):
    """Program to compile."""

    def key(self) -> Any:
        """JSON key; equal keys trace to equal programs. None for a program without one."""
        ...

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """Traces it for the devices; called in the child."""
        ...


@dataclass(frozen=True, kw_only=True)
class JobProgram:
    """Step of a job."""

    job: Job
    verb: StepKind = StepKind.train

    def key(self) -> Any:
        """The job, the arrays of a batch and the step kind; None where a part is a user's class, whose code is unknown."""
        if not _of_known_code(self.job):
            return None
        try:
            arrays = self.job.data.fields()
        except SystolicError:
            raise
        except Exception:  # an error of the user's data function, which the child reports
            return None
        batch = {
            name: [list(array.shape), array.dtype, list(array.axes)]
            for name, array in arrays.items()
        }
        return {"job": self.job.to_json(), "batch": batch, "verb": self.verb.value}

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """See :class:`Program`.

        Raises:
            LayoutError: the layout does not divide the slice, the model or the batch.
        """
        from systolic.compiling.tracing import trace_job

        return trace_job(self.job, self.verb, on, devices)


@dataclass(frozen=True, kw_only=True)
class ServingProgram(ServingCall):
    """Step of a server of a job's language model."""

    def key(self) -> Any:
        """The job and the sizes; None where a part is a user's class, whose code is unknown."""
        if not _of_known_code(self.job):
            return None
        sizes: dict[str, Any] = {"rows": self.rows, "tokens": self.tokens, "context": self.context}
        sizes |= self.served.to_json()
        return {"job": self.job.to_json(), "serving": sizes}

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """See :class:`Program`.

        Raises:
            LayoutError: the layout does not divide the slice or the model.
            RunError: the model does not generate text.
        """
        from systolic.compiling.tracing import trace_serving

        return trace_serving(self, on, devices)


@dataclass(frozen=True, kw_only=True)
class PagedProgram(PagedCall):
    """Step of a server over a cache in pages, as the engine runs it."""

    def key(self) -> Any:
        """The job and the sizes; None where a part is a user's class, whose code is unknown."""
        if not _of_known_code(self.job):
            return None
        sizes = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "job"
        }
        for name in ("drafts", "adapters"):
            if not sizes[name]:
                del sizes[name]  # So that kept answers of steps without them are found.
        return {"job": self.job.to_json(), "paged": sizes | {"cache": self.cache.value}}

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """See :class:`Program`.

        Raises:
            LayoutError: the layout does not divide the slice or the model.
            RunError: the model does not generate text over pages.
        """
        from systolic.compiling.tracing import trace_paged

        return trace_paged(self, on, devices)


@dataclass(frozen=True, kw_only=True)
class FunctionProgram(FunctionCall):
    """User's function with abstract arguments."""

    def key(self) -> Any:
        """None, since no name identifies a function's code; the lowered text does."""
        return

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """See :class:`Program`."""
        from systolic.compiling.functions import trace_function

        return trace_function(self, on, devices)


def _of_known_code(part: Any) -> bool:
    """Whether a value and its contents use only classes and functions whose code is part of every key."""
    if isinstance(part, Maker):
        return _of_known_code(part.__wrapped__)
    named = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    package = named.__module__.split(".")[0]
    if package not in _KNOWN and package not in sys.stdlib_module_names:
        return False
    if isinstance(part, functools.partial):
        return (
            _of_known_code(part.func)
            and _of_known_code(part.args)
            and _of_known_code(part.keywords)
        )
    if isinstance(part, Mapping):
        return all(_of_known_code(inner) for inner in part.values())
    if isinstance(part, list | tuple):
        return all(_of_known_code(inner) for inner in part)
    if is_dataclass(part):
        return all(_of_known_code(getattr(part, inner.name)) for inner in fields(part))
    return True


def decisive(on: Slice) -> str:
    """Facts of a slice and its chip that a program may depend on."""
    chip = replace(on.chip, usd_per_chip_hour=Prices(), **dict.fromkeys(_UNASKED))
    return repr(replace(on, chip=chip))


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """Options of a compile: flags, effort, and the store."""

    flags: Sequence[str] = ()
    """All compiler flags, ``--xla_tpu_…=…``; empty for XLA's defaults."""
    runtime: Sequence[str] = ()
    """Flags without a per-program option in XLA, set in the child's environment."""
    options: Mapping[str, Any] = field(default_factory=dict)
    save: bool = False
    """Whether to keep the serialized executable."""
    root: Path = field(default_factory=cache_home)

    def quick(self) -> "Compiler":
        """The same up to the schedule and its memory, which takes seconds and has no cycle estimates."""
        return replace(self, options={**self.options, SCHEDULE_ONLY: True})


def compile(
    program: Program, on: Slice, compiler: Compiler | None = None, say: Say = lambda _: None
) -> Outcome:
    """Compiles a program for a slice, which need not exist on this machine, or takes the answer from the store.

    Raises:
        SystolicError: a mistake of the user, such as a layout that does not divide the model.
        MissingExtraError: libtpu is not installed.
        KeyboardInterrupt: after the child has ended; nothing is left behind.
    """
    return _compile(_Asked(program, on, compiler or Compiler()), say, _Children())


class Pool:
    """Several compiles at once, each in its own child; leaving the context ends those that still run.

    Errors of a compile are in its future; leaving the context raises none.
    """

    def __init__(self, workers: int) -> None:
        self._children = _Children()
        self._threads = ThreadPoolExecutor(max_workers=max(workers, 1))

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._children.end()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def submit(
        self, program: Program, on: Slice, compiler: Compiler, say: Say = lambda _: None
    ) -> "Future[Outcome]":
        """Submits a compile, which begins when a worker is free."""
        request = _Asked(program, on, compiler)
        return self._threads.submit(_compile, request, say, self._children)


@dataclass
class _Children:
    """Running processes, so that all can be ended at once."""

    running: "set[subprocess.Popen[bytes]]" = field(default_factory=set)
    ended: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> Any:
        with self.guard, log.open("w") as errors:
            if self.ended:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.PIPE,  # held open: the child ends when it closes, also if we are killed
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            self.running.add(process)
            return process

    def forget(self, process: "subprocess.Popen[bytes]") -> None:
        with self.guard:
            self.running.discard(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # the child ended before it read all
                    pipe.close()

    def end(self) -> None:
        with self.guard:
            self.ended = True
            for process in self.running:
                _kill(process)


def _compile(request: "_Asked", say: Say, children: _Children) -> Outcome:
    _check_not_compiling()
    on, compiler = request.on, request.compiler
    if on.platform == "tpu" and version("libtpu") is None:
        raise MissingExtraError(f"compiling for {on.name}", "tpu")
    host_backend.check(on, compiler.save)
    if on.platform != "tpu" and SCHEDULE_ONLY in compiler.options:
        # Only libtpu takes minutes beyond its schedule.
        kept = {k: v for k, v in compiler.options.items() if k != SCHEDULE_ONLY}
        compiler = replace(compiler, options=kept)
        request = replace(request, compiler=compiler)
    store, requests = Store("programs", compiler.root), Store("requests", compiler.root)
    if compiler.save:
        check_owner(store.root)
    name = _request_name(request)
    if name is not None and (known := _known(requests, name, store, compiler)) is not None:
        return known
    store.check_room()
    with store.scratch() as folder, store.scratch() as desk:
        try:
            reply = _run_child(_CompileTask(request, folder, desk), say, children)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise unwritable(store.root, error) from error
    if isinstance(reply, Failed):
        unknown = [flag for flag in compiler.flags if name_of(flag) == reply.unknown_flag]
        if set(unknown) <= set(compiler.runtime):
            return reply
        more = replace(compiler, runtime=(*compiler.runtime, *unknown))
        return _compile(replace(request, compiler=more), say, children)
    if name is not None:
        # An answer is returned even if its note can't be written.
        with contextlib.suppress(RunError):
            note = {"program": reply.digest, "facts": reply.facts.to_json()}
            write_json(_note_path(requests, name), note)
    return _outcome(store.path(reply.digest), reply)


class _Note(msgspec.Struct, frozen=True):
    """Note of what was requested: the store's entry with its answer."""

    program: str
    facts: ProgramFacts


def _check_not_compiling() -> None:
    """Refuses a compile by a module that the process that compiles imports, which would go on without end."""
    if COMPILING in os.environ:
        raise RunError(
            "a module that the compiler imports for its function forecasts when it is imported; put those lines below if __name__ == '__main__':"
        )


def _note_path(requests: Store, name: str) -> Path:
    return requests.path(name).with_suffix(".json")


def _known(requests: Store, name: str, store: Store, compiler: Compiler) -> Outcome | None:
    """Stored answer to a request of that name; None when it is absent or damaged."""
    try:
        note = msgspec.convert(read_json(_note_path(requests, name)), _Note)
        reply = _Answer(note.program, note.facts, cached=True)
        folder = store.get(reply.digest)
    except (RunError, msgspec.ValidationError):
        return None
    if folder is None:
        return None
    refused = (folder / ERROR).exists()
    if compiler.save and not refused and not (folder / EXECUTABLE).exists():
        return None
    return _outcome(folder, reply)


@dataclass(frozen=True)
class _Answer:
    """Result of a child: the store's entry with its answer, and the facts of the program."""

    digest: str
    facts: ProgramFacts
    cached: bool


def _outcome(folder: Path, reply: _Answer) -> Outcome:
    refused = folder / ERROR
    if not refused.exists():
        return Compiled(folder, reply.digest, reply.cached, reply.facts)
    report = msgspec.structs.replace(read_report(folder), program=reply.facts)
    answer = rejection(read_json(refused)["text"], 0)
    assert answer is not None
    # The report's figure is exact; the message rounds to two decimals.
    used = None if report.memory is None else report.memory.used_in_bytes
    return replace(
        answer,
        need_bytes=answer.need_bytes if used is None else used,
        digest=reply.digest,
        cached=reply.cached,
        report=report,
        folder=folder,
    )


@dataclass(frozen=True)
class _Asked:
    """Requested compile, with JAX's settings in the requesting thread."""

    program: Program
    on: Slice
    compiler: Compiler
    settings: Mapping[str, Any] = field(default_factory=settings.of_process)


@dataclass(frozen=True)
class _CompileTask:
    wanted: _Asked
    folder: Path
    """Folder of the answer."""
    desk: Path
    """Folder of the child's output and the compiler's dump."""

    def message(self) -> bytes:
        """Request that the child reads."""
        import cloudpickle

        compiler = self.wanted.compiler
        return cloudpickle.dumps(
            CompileRequest(
                program=dumps(self.wanted.program),
                slice=self.wanted.on.name,
                flags=tuple(compiler.flags),
                runtime=_runtime(compiler),
                options=dict(compiler.options),
                save=compiler.save,
                store=str(compiler.root),
                settings=dict(self.wanted.settings),
            )
        )


def _run_child(task: _CompileTask, say: Say, children: _Children) -> _Answer | Failed:
    """The store's entry with the answer, or the failure."""
    log, message = task.desk / "log", task.message()
    on, compiler = task.wanted.on, task.wanted.compiler
    own = _runtime(compiler) if on.platform == "tpu" else compiler.flags
    process = children.start(
        [sys.executable, "-m", "systolic.compiling.child", str(task.folder), str(task.desk)],
        child_environment(os.environ, on, own),
        log,
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it crashed, and its output has the reason
            process.stdin.write(len(message).to_bytes(8, "little") + message)
            process.stdin.flush()
        last = _listen(process, say)
        code = process.wait()
    except BaseException:
        _kill(process)
        process.wait()
        raise
    finally:
        children.forget(process)
    if children.ended:
        raise KeyboardInterrupt
    if code == 0:
        assert last is not None
        assert last.facts is not None
        return _Answer(last.digest, last.facts, cached=last.stage == FOUND)
    printed = log.read_text(errors="replace")
    tail = "\n".join(printed.splitlines()[-LOG_LINES:])
    if last is None or last.stage != FAILED:
        return Failed(reason=_death(code, printed), log=tail)
    if last.who == "user":
        raise _MISTAKES.get(last.kind, SystolicError)(last.text)
    log = f"{last.text}\n{tail}"
    if (unknown := _NO_OPTION.search(last.text)) is not None:
        flag = f"--{unknown[1]}"
        reason = f"libtpu {version('libtpu')} or XLA does not know a flag: {flag}; leave it out"
        return Failed(reason=reason, log=log, unknown_flag=flag)
    where = f" (at {last.where})" if last.where else ""
    return Failed(reason=f"{_first_line(last.text)}{where}", log=log)


def _listen(process: "subprocess.Popen[bytes]", say: Say) -> ChildLine | None:
    """The child's last line; None of one that printed none."""
    last = None
    assert process.stdout is not None
    for line in process.stdout:
        try:
            last = msgspec.convert(json.loads(line), ChildLine)
        except (ValueError, msgspec.ValidationError):
            continue  # a library that prints
        if last.stage != FAILED:
            say(last.stage)
    return last


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _death(code: int, text: str) -> str:
    """Reason of a child's crash in one line: its CHECK failure, its signal, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    checks = [line for line in lines if "Check failed" in line or line.startswith("F0")]
    unknown = [
        line for line in lines if "Unknown command line flag" in line or "Unknown flag" in line
    ]
    if unknown:
        return f"libtpu {version('libtpu')} or XLA does not know a flag: {unknown[0][:200]}"
    if checks:
        return f"the compiler stopped at a failed check: {checks[0][:300]}"
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; it may have run out of memory" if name == "SIGKILL" else ""
        return f"the compiler died of {name}{hint}"
    return lines[-1][:300] if lines else f"the compiler ended with code {code}"


def _runtime(compiler: Compiler) -> tuple[str, ...]:
    """Flags that a TPU's child gets in its environment; all others are options of the program."""
    return tuple(f for f in compiler.flags if f in compiler.runtime or not is_option(f))


def _first_line(text: str) -> str:
    return " ".join(text.split())[:REASON]


def _request_name(request: _Asked) -> str | None:
    key = request.program.key()
    if key is None:
        return None
    return digest(
        {
            "program": key,
            "slice": decisive(request.on),
            "flags": list(request.compiler.flags),
            "options": dict(request.compiler.options),
            "versions": {name: version(name) for name in DECISIVE},
            "code": _code(),
            "machine": host_backend.seen(request.on, os.environ),
            "settings": {name: repr(value) for name, value in request.settings.items()},
            "variables": settings.of_variables(os.environ),
        },
        length=32,
    )


@cache
def version(name: str) -> str | None:
    """Version of an installed package; None when it is not installed."""
    import importlib.metadata  # slow, and not needed to report a mistake

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _code() -> str:
    """Digest of the source that a job's trace depends on."""
    package = Path(__file__).parent.parent
    files = sorted(path for part in CODE for path in (package / part).rglob("*.py"))
    return digest([[str(path.relative_to(package)), path.read_text()] for path in files])
