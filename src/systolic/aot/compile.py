"""The parent's side: ask the store, else a child; turn its answer, or its death, into an outcome."""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from systolic.aot import child, environment
from systolic.aot.outcome import EXECUTABLE, REPORT, Compiled, Failed, Outcome, rejection
from systolic.aot.program import Program
from systolic.chips import Slice
from systolic.core.digest import digest
from systolic.core.errors import MissingExtraError, SystolicError
from systolic.core.files import write_json
from systolic.core.store import Store, cache_home, read_json

Say = Callable[[str], None]
"""Told the stage: importing, tracing, lowering, compiling, found."""

LOG_LINES = 40
QUICK = {"exec_time_optimization_effort": -1.0}
"""Compiles three to four times faster with nearly the same memory, without cycle estimates."""


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
        """The same at low effort: whether it fits, not how fast it is."""
        return replace(self, options={**self.options, **QUICK})


class UserError(SystolicError):
    """A mistake that the child found."""


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
    compiler = compiler or Compiler()
    if on.platform == "tpu" and version("libtpu") is None:
        raise MissingExtraError(f"compiling for {on.name}", "tpu")
    store, requests = Store("programs", compiler.root), Store("requests", compiler.root)
    name = _request_name(program, on, compiler)
    if name is not None and (known := _known(requests, name, store, compiler)) is not None:
        return known
    with store.scratch() as folder:
        made = _run_child(program, on, compiler, folder, say)
        if isinstance(made, Failed):
            return made
        fresh = (folder / REPORT).exists()
        if fresh:
            old = store.put(made, folder)
            if folder.exists() and (folder / EXECUTABLE).exists():
                os.replace(folder / EXECUTABLE, old / EXECUTABLE)
    if name is not None:
        write_json(requests.path(name).with_suffix(".json"), {"program": made})
    return _outcome(store.path(made), made, cached=not fresh)


def compile_all(
    work: Sequence[tuple[Program, Slice, Compiler]],
    workers: int,
    done: Callable[[int, Outcome], None] = lambda *_: None,
) -> list[Outcome]:
    """Several at once, each in its own child; ``done`` is told each answer as it comes."""

    def one(index: int) -> Outcome:
        program, on, compiler = work[index]
        answer = compile(program, on, compiler)
        done(index, answer)
        return answer

    with ThreadPoolExecutor(max_workers=max(workers, 1)) as pool:
        return list(pool.map(one, range(len(work))))


def _known(requests: Store, name: str, store: Store, compiler: Compiler) -> Outcome | None:
    path = requests.path(name).with_suffix(".json")
    if not path.is_file():
        return None
    made = read_json(path)["program"]
    found = store.get(made)
    if found is None or (compiler.save and not (found / EXECUTABLE).exists()):
        return None
    return _outcome(found, made, cached=True)


def _outcome(folder: Path, made: str, cached: bool) -> Outcome:
    refused = folder / child.ERROR
    if not refused.exists():
        return Compiled(folder, made, cached)
    report = read_json(folder / REPORT)
    answer = rejection(read_json(refused)["text"], 0)
    assert answer is not None
    return replace(answer, digest=made, cached=cached, report=report)


def _run_child(
    program: Program, on: Slice, compiler: Compiler, folder: Path, say: Say
) -> str | Failed:
    """Digest of the program, or why there is none; fills ``folder`` unless the store had it."""
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="systolic-compile-") as scratch:
        request = Path(scratch) / "request"
        request.write_bytes(
            cloudpickle.dumps(
                {
                    "program": program,
                    "slice": on.name,
                    "flags": tuple(compiler.flags),
                    "options": dict(compiler.options),
                    "save": compiler.save,
                    "again": compiler.save,
                    "store": str(compiler.root),
                }
            )
        )
        log = Path(scratch) / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "systolic.aot.child", str(request), str(folder)],
                env=environment.child_environment(os.environ, on, compiler.flags),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            try:
                made = _listen(process, say)
            except BaseException:
                _end(process)
                raise
        code = process.wait()
        refused = folder / child.ERROR
        if refused.exists():
            told = read_json(refused)
            if told["who"] == "user":
                raise UserError(told["text"])
            if rejection(told["text"], 0) is not None:
                return made
            return Failed(reason=_first_line(told["text"]), log=told["text"])
        if code != 0:
            text = log.read_text(errors="replace")
            return Failed(reason=_death(code, text), log="\n".join(text.splitlines()[-LOG_LINES:]))
        return made


def _listen(process: "subprocess.Popen[str]", say: Say) -> str:
    made = ""
    assert process.stdout is not None
    for text in process.stdout:
        try:
            record = json.loads(text)
        except ValueError:
            continue  # a library that prints
        made = record.get("digest", made)
        say(record.get("stage", ""))
    return made


def _end(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _death(code: int, text: str) -> str:
    """One line on how a child died: its CHECK failure, its signal, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    checks = [line for line in lines if "Check failed" in line or line.startswith("F0")]
    unknown = [
        line for line in lines if "Unknown command line flag" in line or "Unknown flag" in line
    ]
    if unknown:
        return f"libtpu {version('libtpu')} does not know a flag: {unknown[0][:200]}"
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
