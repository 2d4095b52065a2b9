"""What tests compile is compiled cheaply and once: by no other worker, and by no later run of the tests."""

import hashlib
import os
import platform
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

CHEAP = {
    "--xla_cpu_use_fusion_emitters=false": "0.11.1",
    "--xla_cpu_parallel_codegen_split_count=1": None,
}
"""XLA's flags for a CPU: without emitters of fusions, which take most of the time of a compile, and in one module.

Each with the jaxlib that knows it no more, which would end the process.
"""
VERSIONS = ("jax", "jaxlib", "numpy")
"""Packages whose versions name the folder of kept programs."""
KEPT_BYTES = 1 << 30
"""Bytes of kept programs, beyond which the oldest go."""
NUMERIC = (
    *(
        "formats/test_",
        "formats/gguf",
        "models/families",
        "models/test_attention",
        "models/test_convolutions.py",
    ),
    *("models/test_decoder.py", "models/test_dense_switches.py", "models/test_dropless.py"),
    *("models/test_interleaved.py", "models/test_rolling.py", "quantizing", "steps"),
)
"""Folders and files whose tests compare numbers, for which XLA's costly passes are left out: they change only rounding."""
DEFAULT = (
    *(
        *NUMERIC,
        "runs",
        "cli",
        "data",
        "doctor",
        "explaining",
        "formats",
        "launching",
        "models",
    ),
    *("planning", "inference", "recipes", "report", "serving", "training", "tuning"),
    *("comparing", "compat"),
)
"""The same of default tests; slow ones of the last folders have programs as users do."""


def as_users_do() -> dict[str, bool]:
    """Compiler options of one compile with the fusions that a user's program has."""
    flag, gone = next(iter(CHEAP.items()))
    known = Version(version("jaxlib")) < Version(str(gone))
    return {flag.removeprefix("--").partition("=")[0]: True} if known else {}


def cheap(flags: str) -> str:
    """``XLA_FLAGS`` with the flags of a cheap compile, where they are known and not given."""
    own = Version(version("jaxlib"))
    known = [one for one, gone in CHEAP.items() if gone is None or own < Version(gone)]
    more = [one for one in known if one.partition("=")[0] not in flags]
    return " ".join([flags, *more]).strip()


def compiles_little(file: Path, slow: bool) -> bool:
    """Whether the tests of a file, relative to ``tests``, do without XLA's costly passes."""
    return file.as_posix().startswith(NUMERIC if slow else DEFAULT)


class KeptPrograms:
    """Programs that JAX compiled, shared by workers and by runs.

    JAX writes entries of its persistent cache in place, so that another process can read half of one, and a child
    that is killed leaves half of one. Each worker therefore has a folder of its own, and one for its children;
    whole entries move between them and the shared one, by hard links, before a file of tests.

    Args:
        shared: Folder that all workers and later runs read.
        base: Folder of this worker.
    """

    def __init__(self, shared: Path, base: Path) -> None:
        self.shared, self.own = shared / _surroundings(), base / "xla"
        self._children = base / "xla-children"
        for folder in (self.shared, self.own, self._children):
            folder.mkdir(parents=True, exist_ok=True)

    def exchange(self) -> None:
        """Takes what others compiled, and gives what this worker and its children did."""
        for folder in (self.own, self._children):
            here, there = _names(folder), _names(self.shared)
            for name in there - here:
                with suppress(OSError):
                    _link(self.shared / name, folder / name)
            for name in here - there:
                with suppress(OSError):
                    if _is_whole(folder / name):
                        _link(folder / name, self.shared / name)

    def prune(self) -> None:
        """Removes the oldest entries beyond :data:`KEPT_BYTES`, of all surroundings; other runs may use, add and remove them meanwhile."""
        entries = []
        for one in self.shared.parent.glob("*/*-cache"):
            with suppress(FileNotFoundError):
                entries.append((one.stat(), one))
        size = sum(stat.st_size for stat, _ in entries)
        for stat, one in sorted(entries, key=lambda entry: entry[0].st_mtime):
            if size <= KEPT_BYTES:
                return
            one.unlink(missing_ok=True)
            size -= stat.st_size

    def variables(self) -> dict[str, str]:
        """Environment of children, which keep their programs for one another."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self._children),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        }


def with_packages(home: Path) -> None:
    """Lets a cache of the tests have the packages of formats that the user's has (``python -m systolic.formats.packages``)."""
    from systolic.core.files import cache_home
    from systolic.formats.packages import FOLDER

    home.mkdir(parents=True, exist_ok=True)
    installed = cache_home() / FOLDER
    if installed.is_dir():
        with suppress(FileExistsError):
            (home / FOLDER).symlink_to(installed)


@contextmanager
def compiling(programs: KeptPrograms | None, little: bool, children: bool = True) -> Iterator[None]:
    """Compiles of this process, and of its ``children``, find and keep programs, without costly passes if ``little``."""
    folder = None if programs is None else programs.own
    settings: dict[str, object] = {
        "jax_compilation_cache_dir": None if folder is None else str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # The folder of XLA's own caches, which are for GPUs, would be part of JAX's keys.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    with pytest.MonkeyPatch.context() as patch:
        if programs is not None and children:
            for name, value in programs.variables().items():
                patch.setenv(name, value)
        if little:
            settings["jax_disable_most_optimizations"] = True
            patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        before = _configure(settings)
        yield
        _configure(before)


def _configure(values: dict[str, object]) -> dict[str, object]:
    """Changes settings of JAX, which opens its cache anew; returns those that were."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: jax.config.values[name] for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    return before


def _surroundings() -> str:
    """A name for what compiled programs depend on besides themselves, which JAX's keys leave out in part."""
    parts = [f"{name}-{version(name)}" for name in VERSIONS]
    parts += [platform.python_version(), platform.machine(), _processor()]
    parts += [os.environ.get("XLA_FLAGS", ""), os.environ.get("JAX_PLATFORMS", "")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor's features: programs compiled for some can't run without them."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()


def _names(folder: Path) -> set[str]:
    """Names of the entries of a folder, without those being written; none of one that another run has cleared."""
    with suppress(FileNotFoundError):
        found: Iterable[os.DirEntry[str]] = os.scandir(folder)
        return {one.name for one in found if one.name.endswith("-cache")}
    return set()


def _link(source: Path, target: Path) -> None:
    """Puts a whole file under another name in one move."""
    draft = target.with_name(f".{secrets.token_hex(8)}")
    try:
        os.link(source, draft)
    except OSError:  # another disk
        shutil.copyfile(source, draft)
    os.replace(draft, target)


def _is_whole(entry: Path) -> bool:
    """Whether an entry was written to its end, where its compression's checksum is; only zlib's are shared."""
    try:
        zlib.decompress(entry.read_bytes())
    except zlib.error:
        return False
    return True
