"""Tests run on the CPU unless the environment names another platform, one process a core, and compile quickly and once."""

import atexit
import gc
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# libtpu, where it is installed, otherwise asks for a TPU over the network and locks out the other workers.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import psutil
import pytest
from hypothesis import settings

from systolic.core.machine import set_up_xla
from tests.compiles import (
    KeptPrograms,
    cheap,
    compiles_little,
    compiling,
    with_packages,
)
from tests.forked import forked
from tests.tiers import longest_first, workers

# Otherwise each child and each worker would compile our 700 modules for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What tests and packages import lives as long as the worker: a full collection has nothing to find among it.
gc.disable()
# How long an example takes says how busy the machine is.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

BEGIN_BEFORE = "SYSTOLIC_TESTS_BEGIN_BEFORE"
"""Variable with a time in seconds since 1970: tests that have not begun by then are skipped, as CI's time is limited."""
AS_GIVEN = "SYSTOLIC_TESTS_AS_GIVEN"
"""Variable that, where it is set, keeps files in the order of the command line."""
SLOW = pytest.StashKey[bool]()
"""Whether slow tests run, which have programs as users do in some folders."""
OWN_PROGRAMS = "own_programs"
"""Mark of files whose tests see what the compiler makes: a program that was kept has the source lines of whoever
compiled it, and can't be saved again (jaxlib 0.10.2)."""
REPEATED = 20
"""Failures that the command to repeat them names; beyond, it takes those of the last run."""
MORE_BYTES = 1 << 30
"""Resident memory that a worker takes up, since it last did, before it gives back what it compiled, between files.

To look through all objects takes a second, and programs that the next file uses are traced again.
"""
GIVEN_BACK = pytest.StashKey[int]()
"""Resident bytes after a worker last gave memory back."""


def pytest_configure(config: pytest.Config) -> None:
    set_up_xla()
    slow = config.stash[SLOW] = config.option.markexpr in ("slow", "long")
    if not slow:
        # XLA reads its flags once a process; children have those of their test's process.
        os.environ["XLA_FLAGS"] = cheap(os.environ.get("XLA_FLAGS", ""))
        # A worker a core: threads of PyTorch and NumPy would wait for one another, spinning.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if hasattr(config, "workerinput") and "coverage" not in sys.modules:
        import jax  # noqa: F401

        # What is registered after JAX's own runs before this: a worker has told all by then, and JAX would take four
        # seconds to free each program by itself.
        atexit.register(_leave, os.getpid())


def _leave(worker: int) -> None:
    if os.getpid() == worker:  # no child that was forked
        os._exit(0)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return 0 if config.option.usepdb else workers(config.args if _are_given(config) else ())


def _are_given(config: pytest.Config) -> bool:
    return config.args_source is pytest.Config.ArgsSource.ARGS


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if AS_GIVEN in os.environ or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    order = longest_first(item.path for item in items)
    place = {file: number for number, file in enumerate(order)}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    gc.freeze()
    # Traced programs are many small objects, most of which stay until memory is given back between files.
    gc.set_threshold(2_000_000, 20, 20)
    if session.config.stash[SLOW] or sys.platform != "linux":
        return
    cores = sorted(psutil.Process().cpu_affinity())
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and len(cores) == int(os.environ["PYTEST_XDIST_WORKER_COUNT"]):
        # On a core of its own, where the compiler starts one thread and not one for every core.
        # One that takes the place of a crashed worker has a higher number.
        psutil.Process().cpu_affinity([cores[int(worker) % len(cores)]])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get(BEGIN_BEFORE, "inf")):
        item.add_marker(pytest.mark.skip(reason="no time left to begin it"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    reports = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    failed = list(dict.fromkeys(report.nodeid for report in reports))
    if failed:
        kept = config.pluginmanager.hasplugin("cacheprovider")
        named = ["--last-failed"] if kept and len(failed) > REPEATED else failed
        given = set(config.getoption("override_ini") or ()) - {"strict_markers=true"}
        options = [word for one in sorted(given) for word in ("-o", one)]
        usual, tier = [*config.getini("addopts"), ""][-1], config.option.markexpr
        if tier != usual:
            options += ["-m", tier]
        terminalreporter.section("to repeat what failed", blue=True)
        if any(name.startswith("::") for name in failed):
            # Files outside of this tree have no path in their names.
            named = [one for one in config.args if _are_given(config)]
        if config.invocation_params.dir != config.rootpath:
            terminalreporter.line(shlex.join(["cd", str(config.rootpath)]))
        terminalreporter.line(shlex.join(["python", "-m", "pytest", "-n0", *options, *named]))


@pytest.fixture(scope="session")
def kept_programs(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KeptPrograms]:
    """Programs compiled by this worker, by others and by earlier runs; children and commands keep theirs apart from the user's."""
    cache = getattr(pytestconfig, "cache", None)
    base = tmp_path_factory.getbasetemp()
    # One folder for all workers: the store of answers is made for several processes at once.
    shared, home = base / "shared", base / "home"
    if cache:
        with suppress(OSError):  # a folder that nobody may write to, or a full disk
            shared, home = cache.mkdir("xla"), cache.mkdir("home")
    made = KeptPrograms(shared, base)
    with pytest.MonkeyPatch.context() as patch:
        if not pytestconfig.stash[SLOW]:
            with_packages(home / "systolic")
            patch.setenv("XDG_CACHE_HOME", str(home))
        yield made
    made.exchange()
    made.prune()


@pytest.fixture(autouse=True, scope="session")
def forked_children(pytestconfig: pytest.Config) -> Iterator[None]:
    """Children find JAX imported; those of slow tests are started as users do."""
    with nullcontext() if pytestconfig.stash[SLOW] else forked():
        yield


@pytest.fixture(autouse=True, scope="module")
def compiled_once(request: pytest.FixtureRequest, kept_programs: KeptPrograms) -> Iterator[None]:
    """Compiles of a file's tests find what was compiled before, unless they count compiles."""
    here = Path(__file__).parent
    file = request.path.relative_to(here) if request.path.is_relative_to(here) else request.path
    slow = request.config.stash[SLOW]
    own = request.node.get_closest_marker(OWN_PROGRAMS) is not None
    little = compiles_little(file, slow) and not own
    kept_programs.exchange()
    # Slow tests have programs as users do, where they do not compare numbers alone.
    keeps = not own and (little or not slow)
    with compiling(kept_programs if keeps else None, little, children=not slow):
        yield
    before = request.config.stash.get(GIVEN_BACK, MORE_BYTES)
    if psutil.Process().memory_info().rss > before + MORE_BYTES:
        import jax

        jax.clear_caches()
        gc.collect()
        request.config.stash[GIVEN_BACK] = psutil.Process().memory_info().rss
