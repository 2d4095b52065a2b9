"""The parent's side: ask the store, else a child; turn its answer, or its death, into an outcome."""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from systolic.aot import environment, host
from systolic.aot.dump import SCHEDULE_ONLY
from systolic.aot.outcome import ERROR, EXECUTABLE, REPORT, Compiled, Failed, Outcome, rejection
from systolic.aot.program import Program
from systolic.chips import Slice
from systolic.core.digest import digest
from systolic.core.errors import (
    DataError,
    LayoutError,
    MissingExtraError,
    NotFoundError,
    OptionError,
    RunError,
    SystolicError,
)
from systolic.core.files import write_json
from systolic.core.store import Store, cache_home, read_json

Say = Callable[[str], None]
"""Told the stage: importing, tracing, lowering, waiting (another compiles the same), compiling,
serializing, compiled or found."""

LOG_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """How to compile: flags, effort, and where answers are kept."""

    flags: Sequence[str] = ()
    """As libtpu takes them: ``--xla_tpu_…=…``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    save: bool = False
    """Also keep the serialized executable."""
    root: Path = field(default_factory=cache_home)

    def quick(self) -> "Compiler":
        """The same up to the schedule and its memory: seconds, and no cycle estimates."""
        return replace(self, options={**self.options, SCHEDULE_ONLY: True})


_MISTAKES = {
    kind.__name__: kind for kind in (OptionError, NotFoundError, DataError, LayoutError, RunError)
}
"""What the child says by name is raised here as the same."""


def compile(
    program: Program, on: Slice, compiler: Compiler | None = None, say: Say = lambda _: None
) -> Outcome:
    """The program compiled for a slice, from the store when it was compiled before.

    Args:
        program: What to compile.
        on: For what; nothing of it need be there.
        compiler: Flags, effort, store.
        say: Told the stage.

    Raises:
        SystolicError: the layout does not divide the model, and other mistakes of the user.
        MissingExtraError: libtpu is not installed.
        KeyboardInterrupt: after the child has ended; nothing is left behind.
    """
    return _compile(program, on, compiler or Compiler(), say, _Children())


class Pool:
    """Several compiles at once, each in its own child; leaving the context ends what still runs.

    Raises on leaving nothing of its own: what a compile raised is in its future.
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
        """A compile that begins when a worker is free."""
        return self._threads.submit(_compile, program, on, compiler, say, self._children)


@dataclass
class _Children:
    """Processes at work, so that all of them can be ended at once."""

    running: "set[subprocess.Popen[str]]" = field(default_factory=set)
    ended: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> Any:
        with self.guard, log.open("w") as errors:
            if self.ended:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.PIPE,  # held open: the child ends when it closes, as with our death
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            self.running.add(process)
            return process

    def forget(self, process: "subprocess.Popen[str]") -> None:
        with self.guard:
            self.running.discard(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def end(self) -> None:
        with self.guard:
            self.ended = True
            for process in self.running:
                _kill(process)


def _compile(
    program: Program, on: Slice, compiler: Compiler, say: Say, children: _Children
) -> Outcome:
    if on.platform == "tpu" and version("libtpu") is None:
        raise MissingExtraError(f"compiling for {on.name}", "tpu")
    host.check(on, compiler.save)
    if on.platform != "tpu" and SCHEDULE_ONLY in compiler.options:
        # Only libtpu takes minutes beyond its schedule.
        kept = {k: v for k, v in compiler.options.items() if k != SCHEDULE_ONLY}
        compiler = replace(compiler, options=kept)
    store, requests = Store("programs", compiler.root), Store("requests", compiler.root)
    name = _request_name(program, on, compiler)
    if name is not None and (known := _known(requests, name, store, compiler)) is not None:
        return known
    with store.scratch() as folder, store.scratch() as desk:
        made = _run_child(_Task(program, on, compiler, folder, desk), say, children)
    if isinstance(made, Failed):
        return made
    digest_made, cached = made
    if name is not None:
        write_json(requests.path(name).with_suffix(".json"), {"program": digest_made})
    return _outcome(store.path(digest_made), digest_made, cached)


def _known(requests: Store, name: str, store: Store, compiler: Compiler) -> Outcome | None:
    path = requests.path(name).with_suffix(".json")
    if not path.is_file():
        return None
    made = read_json(path)["program"]
    found = store.get(made)
    refused = found is not None and (found / ERROR).exists()
    if found is None or (compiler.save and not refused and not (found / EXECUTABLE).exists()):
        return None
    return _outcome(found, made, cached=True)


def _outcome(folder: Path, made: str, cached: bool) -> Outcome:
    refused = folder / ERROR
    if not refused.exists():
        return Compiled(folder, made, cached)
    report = read_json(folder / REPORT)
    answer = rejection(read_json(refused)["text"], 0)
    assert answer is not None
    # The report's figure is exact, the message's has two decimals.
    need = report.get("memory", {}).get("used_in_bytes", answer.need_bytes)
    return replace(
        answer, need_bytes=need, digest=made, cached=cached, report=report, folder=folder
    )


@dataclass(frozen=True)
class _Task:
    program: Program
    on: Slice
    compiler: Compiler
    folder: Path
    """For the answer."""
    desk: Path
    """For what parent and child tell each other."""


def _run_child(task: _Task, say: Say, children: _Children) -> tuple[str, bool] | Failed:
    """Digest of the program in the store and whether it was there before; or why there is none."""
    import cloudpickle

    compiler, request, log = task.compiler, task.desk / "request", task.desk / "log"
    asked = {
        "program": task.program,
        "slice": task.on.name,
        "flags": tuple(compiler.flags),
        "options": dict(compiler.options),
        "save": compiler.save,
        "store": str(compiler.root),
    }
    request.write_bytes(cloudpickle.dumps(asked))
    process = children.start(
        [sys.executable, "-m", "systolic.aot.child", str(request), str(task.folder)],
        environment.child_environment(os.environ, task.on, compiler.flags),
        log,
    )
    try:
        made, stage = _listen(process, say)
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
        return made, stage == "found"
    printed = log.read_text(errors="replace")
    tail = "\n".join(printed.splitlines()[-LOG_LINES:])
    refused = task.folder / ERROR
    if not refused.exists():
        return Failed(reason=_death(code, printed), log=tail)
    told = read_json(refused)
    if told["who"] == "user":
        raise _MISTAKES.get(told["kind"], SystolicError)(told["text"])
    return Failed(reason=_first_line(told["text"]), log=f"{told['text']}\n{tail}")


def _listen(process: "subprocess.Popen[str]", say: Say) -> tuple[str, str]:
    """The digest and the last stage that the child told."""
    made = stage = ""
    assert process.stdout is not None
    for text in process.stdout:
        try:
            record = json.loads(text)
        except ValueError:
            continue  # a library that prints
        if not isinstance(record, dict) or "stage" not in record:
            continue
        made, stage = record.get("digest", made), record["stage"]
        say(stage)
    return made, stage


def _kill(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _death(code: int, text: str) -> str:
    """One line on how a child died: its CHECK failure, its signal, or its last line."""
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


def _first_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _request_name(program: Program, on: Slice, compiler: Compiler) -> str | None:
    key = program.key()
    if key is None:
        return None
    return digest(
        {
            "program": key,
            "slice": on.name,
            "flags": list(compiler.flags),
            "options": dict(compiler.options),
            "versions": {
                name: version(name) for name in ("jax", "jaxlib", "libtpu", "flax", "optax")
            },
            "code": _code(),
            "machine": host.seen(on, os.environ),
        },
        length=32,
    )


@cache
def version(name: str) -> str | None:
    """Of an installed package; None when it is not."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _code() -> str:
    """Of the source that decides what a job traces to."""
    package = Path(__file__).parent.parent
    files = sorted(
        path
        for part in ("models", "steps", "job", "aot", "recipes", "data")
        for path in (package / part).rglob("*.py")
    )
    return digest([[str(path.relative_to(package)), path.read_text()] for path in files])
