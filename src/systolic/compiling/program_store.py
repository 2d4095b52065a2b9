"""Compiled programs kept on disk under fingerprints that can be read, so that a second start neither traces nor compiles; and the dependencies that a fingerprint names.

An entry is a folder ``programs/ab/abcdef…`` of the cache: ``fingerprint.json``, what the program was made for;
``executable.bin``, JAX's serialization, which is a pickle: entries that others could have written are refused;
``facts.json``, what is known about it. Entries are complete or absent, and whatever can't be read is compiled.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import Any

import flax
import jax
import jax.monitoring
import numpy as np
from jax.experimental import serialize_executable

from systolic import IMPORTED
from systolic.chips.host import cpu_features, model_name, num_cpus
from systolic.compiling.executable import flags_of, place
from systolic.core.errors import RunError
from systolic.core.files import Store, canonical, digest, others_who_write
from systolic.core.units import gibibytes
from systolic.steps.step_functions import StepFunctions

SOURCES = (
    *("compiling", "chips", "core", "data", "formats", "hlo", "job", "models", "inference"),
    *("serving/batch", "serving/text", "steps"),
)
"""Packages that say what is computed; those above them print, plan, train and price."""
COMPILERS = (
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
    "libtpu",
    "torchax",
)
"""Packages that compile, where they are installed."""
VARIABLES = ("LIBTPU_", "NVIDIA_TF32", "TPU_MEGACORE", "XLA_")
"""Beginnings of environment variables that compilers and runtimes read."""
ELSEWHERE = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables that are compared as flags."""
HARMLESS = (
    "jax_compilation_cache",
    "jax_debug_log_modules",
    "jax_dump_ir",
    "jax_enable_compilation_cache",
    "jax_explain_cache_misses",
    "jax_log_",
    "jax_logging_level",
    "jax_persistent_cache",
    "jax_platforms",
    "jax_raise_persistent_cache_errors",
    "jax_traceback",
    "jax_tracer_error",
)
"""Beginnings of JAX's settings that say where to look, what to log and where to keep things."""
UNUSED = (
    *("name", "optimizer", "schedule", "evaluation", "checkpoints", "guard"),
    *("steps", "seed", "sample", "start"),
)
"""Fields of a job that no program of serving reads."""
KIND = "programs"
FINGERPRINT, EXECUTABLE, FACTS = "fingerprint.json", "executable.bin", "facts.json"
MOST_BYTES = 8 << 30
"""Bytes of all entries; those that were not used for longest go first."""
PRIVATE = 0o700
JAX_CACHE_HIT = "/jax/compilation_cache/cache_hits"
"""Event of JAX for each program that its own cache had."""


class ForeignCodeError(RunError):
    """A job with code from outside the package, whose changes no fingerprint here would see."""


def surroundings(steps: StepFunctions) -> dict[str, Any]:
    """Named parts of the fingerprint of every program of a job on its devices.

    They are known without tracing. A part too many costs a compile; a part too few would run a wrong program, so
    all settings of JAX and the sources of every package that a traced function can call are in.

    Raises:
        ForeignCodeError: the job has code from outside the package.
        RunError: the package's files are newer than this process, which runs an earlier version of them.
    """
    job, target = steps.job, steps.target
    devices = list(target.mesh.devices.flat)
    platform = target.platform
    return {
        "model": plain(job.model),
        "job": {
            field.name: plain(getattr(job, field.name))
            for field in dataclasses.fields(job)
            if field.name not in (*UNUSED, "model", "data")
        },
        "data": _without_paths(plain(job.data)),
        "target": {
            "dtype": target.dtype,
            "matmul_format": str(target.matmul_format),
            "weight_format": str(target.weight_format),
            "rules": plain(target.rules),
        },
        "device": _device(devices, steps),
        "flags": sorted({*flags_of(os.environ, platform), *target.flags}),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and name not in ELSEWHERE
        },
        "versions": versions(),
        "jax": {
            name: str(value)
            for name, value in sorted(jax.config.values.items())
            if not name.startswith(HARMLESS)
        },
        "source": dict(sources()),
    }


def _device(devices: Sequence[Any], steps: StepFunctions) -> dict[str, Any]:
    first, target = devices[0], steps.target
    cpu = first.platform == "cpu"
    facts: dict[str, Any] = {
        "platform": target.platform,
        "runtime": first.client.platform_version,
        "kind": model_name()
        if cpu
        else ", ".join(sorted({device.device_kind for device in devices})),
        "number": len(devices),
        "ids": [device.id for device in devices],
        "processes": jax.process_count(),
        "mesh": {str(name): int(size) for name, size in target.mesh.shape.items()},
    }
    if cpu:
        facts |= {"cores": num_cpus(), "features": cpu_features()}
    if first.platform == "tpu":
        facts["places"] = [place(device) for device in devices]
    return facts


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the libraries that trace and compile, as this process has them loaded."""
    installed = {
        "jax": jax.__version__,
        "flax": flax.__version__,
        "numpy": np.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    for name in COMPILERS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


@functools.cache
def sources(root: Path = Path(__file__).parents[1]) -> Mapping[str, str]:
    """Digest of each package's Python files, by :data:`SOURCES`.

    Raises:
        RunError: a file changed after this process imported the package: what runs may be an earlier version of it.
    """
    digests = {}
    for package in SOURCES:
        total = hashlib.sha256()
        for path in sorted((root / package).rglob("*.py")):
            if path.stat().st_ctime > IMPORTED:
                raise RunError(
                    f"{path} changed after this process imported the package; compiled programs are neither kept nor read: start again"
                )
            content = path.read_bytes()
            total.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
        digests[package] = total.hexdigest()[:16]
    return digests


def plain(value: Any) -> Any:
    """A value of a job as JSON, with the type of each part.

    Raises:
        ForeignCodeError: a part is of a class, or is a function, from outside the package.
    """
    if value is None or (
        isinstance(value, bool | int | float | str) and type(value).__module__ == "builtins"
    ):
        return value
    kind = type(value)
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple) and kind.__module__ == "builtins":
        return [plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(part) for part in value), key=digest)
    if kind.__module__.startswith("systolic."):
        if isinstance(value, enum.Enum):
            return f"{kind.__name__}.{value.name}"
        if dataclasses.is_dataclass(value):
            parts = {
                part.name: plain(getattr(value, part.name)) for part in dataclasses.fields(value)
            }
            return {"type": kind.__qualname__, **parts}
    raise ForeignCodeError(
        f"the job holds a {kind.__module__}.{kind.__qualname__}, code that is not of this package; its programs are compiled at each start"
    )


def _without_paths(part: Any) -> Any:
    """Data without its places: programs see its fields, which are their arguments."""
    if isinstance(part, Mapping):
        return (
            "a path" if set(part) == {"path"} else {k: _without_paths(v) for k, v in part.items()}
        )
    return [_without_paths(inner) for inner in part] if isinstance(part, list) else part


def arguments_of(arrays: Any) -> dict[str, Any]:
    """Names, shapes, dtypes and shardings of arrays or ShapeDtypeStructs: their number and bytes, and a digest."""
    leaves = jax.tree_util.tree_flatten_with_path(arrays)[0]
    listed = [[jax.tree_util.keystr(path), *_leaf(leaf)] for path, leaf in leaves]
    held = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for _, leaf in leaves)
    dtypes = sorted({str(leaf.dtype) for _, leaf in leaves})
    return {"arrays": len(leaves), "bytes": held, "dtypes": dtypes, "digest": digest(listed, 64)}


def _leaf(leaf: Any) -> list[Any]:
    where = leaf.sharding
    spec = ""
    if where is not None and not where.is_fully_replicated:
        spec = str(where.spec)
    weak = jax.typeof(leaf).weak_type if isinstance(leaf, jax.Array) else bool(leaf.weak_type)
    return [list(leaf.shape), str(leaf.dtype), weak, spec]


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramSpec:
    """A program of a model, by what it is asked for."""

    name: str
    """Such as ``decode 4, 10 pages``."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that its function closes over."""
    arguments: tuple[Any, ...]
    """Arrays or ShapeDtypeStructs with shardings."""
    outputs: Any = None
    """Anything of the structure of its outputs; None: a dict of arrays by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadyProgram:
    """A program that can be called."""

    compiled: Any
    """``jax.stages.Compiled``."""
    cached: bool
    """Whether it was read from the disk."""
    seconds: Mapping[str, float]
    """By phase: ``trace``, ``compile``, ``load``, ``keep``."""

    @property
    def total_seconds(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())


class EntryState(StrEnum):
    """State of a program on the disk, as a start would find it."""

    hit = "hit"
    absent = "absent"
    """No program of that name is kept."""
    differs = "differs"
    """Programs of that name are kept, made for something else."""
    damaged = "damaged"
    refused = "refused"
    """An entry that others could have written, or programs that are not kept at all."""


@dataclass(frozen=True, kw_only=True)
class EntryCheck:
    """Check of a program on the disk, before a start."""

    program: str
    state: EntryState
    differs: Sequence[str] = ()
    """One line for each part that differs from the most similar entry."""
    reason: str = ""
    """Why an entry is refused, or which one is damaged."""

    @property
    def hit(self) -> bool:
        """Whether the program is used as it is."""
        return self.state is EntryState.hit

    @property
    def line(self) -> str:
        """For a terminal."""
        heading = f"{self.state.value:<7}  {self.program}"
        more = f" (and {len(self.differs) - 1} more)" if len(self.differs) > 1 else ""
        said = self.reason or (f"{self.differs[0]}{more}" if self.differs else "")
        return f"{heading}: {said}" if said else heading

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``hit`` beside the state."""
        return {
            "program": self.program,
            "hit": self.hit,
            "state": self.state.value,
            "differs": list(self.differs),
            "reason": self.reason,
        }


class ProgramStore:
    """Programs of one model on this machine, from the disk or compiled.

    Args:
        steps: The model's job on its devices.
        warn: Called with a line where the store can't be used.
        root: Folder of all entries; by default in the user's cache.
    """

    def __init__(
        self,
        steps: StepFunctions,
        warn: Callable[[str], None] = lambda _: None,
        root: Path | None = None,
    ) -> None:
        self._devices = list(steps.target.mesh.devices.flat)
        self._store, self._warn = Store(KIND, root), warn
        self._lock, self._told, self._keeps = threading.Lock(), set[str](), True
        self._arguments: dict[int, tuple[Any, Any]] = {}
        self._around: dict[str, Any] | None = None
        try:
            self._around = surroundings(steps)
            self._own()
        except RunError as error:
            self._around = None
            if not isinstance(error, ForeignCodeError):
                self._say(str(error))
            else:
                self._say(f"programs are not kept: {error}")

    @property
    def root(self) -> Path:
        """Folder of all entries."""
        return self._store.root

    @property
    def used(self) -> bool:
        """Whether programs are read from the disk."""
        return self._around is not None

    def _own(self) -> None:
        """Makes the folder, for this user alone.

        Raises:
            RunError: others can write to it.
        """
        root = self.root
        with suppress(OSError):  # read-only: what is there may still be read
            if not root.is_dir():
                root.mkdir(mode=PRIVATE, parents=True)
        if root.is_dir() and (reason := others_who_write(root)):
            raise RunError(
                f"{reason}, and compiled programs are code that would be executed as you; programs are neither kept nor read: set SYSTOLIC_CACHE to a folder of your own"
            )

    def _say(self, line: str) -> None:
        with self._lock:
            if line in self._told:
                return
            self._told.add(line)
        self._warn(line)

    def fingerprint(self, spec: ProgramSpec) -> dict[str, Any]:
        """Everything that the program depends on, as named parts."""
        assert self._around is not None
        sizes = {name: str(value) for name, value in spec.sizes.items()}
        if not spec.arguments:
            sizes["outputs"] = arguments_of(spec.outputs)["digest"]
        arguments = [self._described(argument) for argument in spec.arguments]
        return {"program": spec.name, "sizes": sizes, "arguments": arguments, **self._around}

    def keep(self, spec: ProgramSpec, compiled: Any) -> None:
        """Writes a compiled program to the disk, where that is possible."""
        if self._around is None or not self._keeps:
            return
        try:
            content, in_tree, out_tree = serialize_executable.serialize(compiled)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            self._say(f"{spec.name} can't be kept ({str(error).splitlines()[0]})")
            return
        outputs = (
            out_tree.unflatten([0] * out_tree.num_leaves) if spec.outputs is None else spec.outputs
        )
        if in_tree != jax.tree.structure((spec.arguments, {})) or out_tree != jax.tree.structure(
            outputs
        ):
            self._say(f"{spec.name} can't be kept: its arguments have another structure")
            return
        names = sorted(outputs) if spec.outputs is None else []
        self._put(self.fingerprint(spec), {EXECUTABLE: content, FACTS: canonical(names)})

    def _described(self, argument: Any) -> Any:
        """An argument's names, shapes and dtypes; programs share weights, which are described once."""
        known = self._arguments.get(id(argument))
        if known is None:
            known = self._arguments[id(argument)] = (argument, arguments_of(argument))
        return known[1]

    def facts(self, spec: ProgramSpec, make: Callable[[], Any]) -> Any:
        """JSON that is known about a program, from the disk or else made and kept."""
        if self._around is None:
            return make()
        wanted = self.fingerprint(spec)
        folder = self._find(wanted)
        if folder is not None:
            with suppress(OSError, ValueError):
                return json.loads((folder / FACTS).read_bytes())
        learned = make()
        self._put(wanted, {FACTS: canonical(learned)})
        return learned

    def read(self, spec: ProgramSpec) -> ReadyProgram | None:
        """The program from the disk; None where it is not there, or can't be loaded."""
        if self._around is None:
            return None
        begin = perf_counter()
        folder = self._find(self.fingerprint(spec))
        if folder is None:
            return None
        try:
            compiled = self._load(spec, folder)
        except Exception as error:  # whatever the runtime or a pickle raises
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._say(f"{folder} can't be loaded ({reason}); {spec.name} is compiled")
            shutil.rmtree(folder, ignore_errors=True)
            return None
        seconds = {"load": perf_counter() - begin}
        return ReadyProgram(compiled=compiled, cached=True, seconds=seconds)

    def _find(self, wanted: Mapping[str, Any]) -> Path | None:
        """An intact entry of this fingerprint that nobody else could have written."""
        folder, state, reason = self._entry(wanted)
        if state is EntryState.damaged:
            self._say(f"{reason} is damaged and is made anew")
        elif state is EntryState.refused:
            self._say(f"{reason} and is not used")
        if folder is not None:
            with suppress(OSError):  # a folder that can be read only
                os.utime(folder)
        return folder

    def _entry(self, wanted: Mapping[str, Any]) -> tuple[Path | None, EntryState, str]:
        """The entry of a fingerprint where it can be used, else why not."""
        name = digest(wanted, 64)
        place = self._store.path(name)
        if not place.is_dir():
            return None, EntryState.absent, ""
        folder = self._store.get(name)
        if folder is None:
            return None, EntryState.damaged, str(place)
        try:
            if reason := _foreign(folder):
                return None, EntryState.refused, reason
            if json.loads((folder / FINGERPRINT).read_bytes()) != json.loads(canonical(wanted)):
                return None, EntryState.refused, f"{folder} is of another program"
        except (OSError, ValueError):  # another process removed it meanwhile
            return None, EntryState.absent, ""
        return folder, EntryState.hit, ""

    def _load(self, spec: ProgramSpec, folder: Path) -> Any:
        content = (folder / EXECUTABLE).read_bytes()
        outputs = spec.outputs
        if outputs is None:
            outputs = dict.fromkeys(json.loads((folder / FACTS).read_bytes()), 0)
        devices = _devices((spec.arguments, spec.outputs)) or self._devices
        return serialize_executable.deserialize_and_load(
            content,
            jax.tree.structure((spec.arguments, {})),
            jax.tree.structure(outputs),
            backend=devices[0].client,
            execution_devices=devices,
        )

    def _put(self, wanted: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        if not self._keeps:
            return
        try:
            self._store.check_room()
            with self._store.scratch() as folder:
                folder.chmod(PRIVATE)
                (folder / FINGERPRINT).write_text(json.dumps(wanted, indent=1, sort_keys=True))
                for name, content in files.items():
                    (folder / name).write_bytes(content)
                self._store.put(digest(wanted, 64), folder)
        except (RunError, OSError) as error:
            self._keeps = False
            self._say(f"compiled programs are not kept: {error}")

    def tidy(self, most_bytes: int = MOST_BYTES) -> None:
        """Removes the entries that were not used for longest until all of them take at most ``most_bytes``."""
        kept = []
        for folder in entries(self.root):
            with suppress(OSError):
                held = sum(file.stat().st_size for file in folder.iterdir())
                kept.append((folder.stat().st_mtime, held, folder))
        total = sum(held for _, held, _ in kept)
        for _, held, folder in sorted(kept):
            if total <= most_bytes:
                return
            shutil.rmtree(folder, ignore_errors=True)
            total -= held
            self._say(f"removed kept programs beyond {gibibytes(most_bytes)} from {self.root}")

    def check(self, spec: ProgramSpec) -> EntryCheck:
        """Whether the program is on the disk, or how the most similar entry differs; nothing is compiled."""
        if self._around is None:
            refusals = "; ".join(self._told) or "programs are not kept"
            return EntryCheck(program=spec.name, state=EntryState.refused, reason=refusals)
        wanted = self.fingerprint(spec)
        _, state, reason = self._entry(wanted)
        if state is not EntryState.absent:
            return EntryCheck(program=spec.name, state=state, reason=reason)
        flat = flattened(wanted)
        differing = [differences(flat, flattened(other)) for other in self._kept(spec.name)]
        if not differing:
            return EntryCheck(program=spec.name, state=state)
        best = tuple(min(differing, key=len))
        return EntryCheck(program=spec.name, state=EntryState.differs, differs=best)

    def _kept(self, name: str) -> list[dict[str, Any]]:
        """Fingerprints of the entries of programs of that name."""
        fingerprints = []
        for folder in entries(self.root):
            with suppress(OSError, ValueError):
                fingerprint = json.loads((folder / FINGERPRINT).read_bytes())
                if isinstance(fingerprint, dict) and fingerprint.get("program") == name:
                    fingerprints.append(fingerprint)
        return fingerprints


def made_ready(
    store: ProgramStore | None, spec: ProgramSpec, lower: Callable[[], Any]
) -> ReadyProgram:
    """A program from the store, or else traced by ``lower``, compiled and kept there."""
    kept = None if store is None else store.read(spec)
    if kept is not None:
        return kept
    begin, from_cache = perf_counter(), _FOUND.count
    lowered = lower()
    traced = perf_counter()
    compiled = lowered.compile()
    seconds = {"trace": traced - begin, "compile": perf_counter() - traced}
    if store is not None and from_cache == _FOUND.count:
        begin = perf_counter()
        store.keep(spec, compiled)
        seconds["keep"] = perf_counter() - begin
    return ReadyProgram(compiled=compiled, cached=False, seconds=seconds)


class _Found(threading.local):
    """Programs that JAX's own cache had for the calling thread.

    On a CPU they lack their functions when they are serialized again (jaxlib 0.10.2), so they are not kept.
    """

    def __init__(self) -> None:
        self.count = 0


_FOUND = _Found()


def _event(event: str, **more: Any) -> None:
    del more
    if event == JAX_CACHE_HIT:
        _FOUND.count += 1


jax.monitoring.register_event_listener(_event)


def entries(root: Path) -> list[Path]:
    """Folders of all entries under a root."""
    return [folder for folder in root.glob("[0-9a-f][0-9a-f]/*") if folder.is_dir()]


def flattened(value: Any, name: str = "") -> dict[str, str]:
    """Parts of a fingerprint by dotted names."""
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list) and any(isinstance(inner, Mapping | list) for inner in value):
        pairs = enumerate(value)
    else:
        return {name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)}
    return {
        path: text
        for part, inner in pairs
        for path, text in flattened(inner, f"{name}.{part}" if name else str(part)).items()
    }


def differences(here: Mapping[str, str], kept: Mapping[str, str]) -> list[str]:
    """``versions.jaxlib is 0.10.2, kept with 0.10.1`` for each part that differs."""
    return [
        f"{name} is {here.get(name) or 'none'}, kept with {kept.get(name) or 'none'}"
        for name in dict.fromkeys([*here, *kept])
        if here.get(name) != kept.get(name)
    ]


def _devices(arrays: Any) -> list[Any]:
    """Devices of the mesh that arrays lie on, in its order; [] where none has one."""
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and isinstance(
            leaf.sharding, jax.sharding.NamedSharding
        ):
            return list(leaf.sharding.mesh.devices.flat)
    return []


def _foreign(folder: Path) -> str | None:
    """Who else could have written an entry."""
    for path in (folder, *folder.iterdir()):
        if reason := others_who_write(path):
            return reason
    return None
