"""Tests run on the CPU unless the environment names another platform, and most compile quickly and once."""

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# libtpu, where it is installed, otherwise asks for a TPU over the network and locks out the other workers.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import pytest
from hypothesis import settings

from tests.devices import CHEAP, FLAGS
from tests.turns import turns

# What tests and packages import lives as long as the worker: a full collection has nothing to find among it.
gc.disable()
# How long an example takes says how busy the machine is.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

BEGIN_BEFORE = "SYSTOLIC_TESTS_BEGIN_BEFORE"
"""Variable with a time in seconds since 1970: tests that have not begun by then are skipped, as CI's time is limited."""
TURN = "SYSTOLIC_TESTS_TURN"
"""Variable with a number: files take turns, folder by folder, and with another number other files are first."""
QUICK = (
    *("interop", "models/families", "models/test_attention", "models/test_convolutions.py"),
    *("models/test_decoder.py", "models/test_dense_switches.py", "models/test_dropless.py"),
    *("models/test_interleaved.py", "models/test_rolling.py", "session", "steps"),
)
"""Folders and files whose tests compare numbers; the others see what the compiler makes, or which programs are kept."""
DEFAULT = (*QUICK, "explaining", "models", "serving/batch", "serving/text", "training")
"""The same of default tests; slow ones of the last folders have programs as users do."""
COMPILED = (
    *("serving/batch/test_kept_programs.py", "serving/text/test_second_start.py"),
    *("session/test_capacity.py", "session/test_comparing.py", "session/test_planning.py"),
    *("session/test_server_steps.py", "session/test_serving.py", "steps/test_paged_cpu.py"),
    *("steps/test_sharding.py", "training/test_executable.py"),
)
"""Files of those folders that do see what the compiler makes."""
SLOW = pytest.StashKey[bool]()
"""Whether slow tests run."""
LESS: dict[str, Any] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options of a compile for a CPU: without emitters of fusions, which take most of its time, and in one module."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if turn := os.environ.get(TURN):
        place = {
            file: number for number, file in enumerate(turns((i.path for i in items), int(turn)))
        }
        items.sort(key=lambda item: place[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    session.stash[SLOW] = any(item.get_closest_marker("slow") for item in session.items)
    gc.enable()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get(BEGIN_BEFORE, "inf")):
        item.add_marker(pytest.mark.skip(reason="no time left to begin it"))


@pytest.fixture(autouse=True, scope="module")
def compiled_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Folder of the programs that this worker compiled, without XLA's costly passes, which change only rounding.

    Children do without LLVM's passes too, and find no programs, unless a test gives them the folder.
    """
    folder = tmp_path_factory.getbasetemp() / "xla"
    file = request.path.relative_to(Path(__file__).parent).as_posix()
    slow = request.session.stash[SLOW]
    if file in COMPILED:
        # Commands of earlier tests have set the user's folder, where a program may be that took long to compile.
        before = _configure({"jax_compilation_cache_dir": None})
        yield folder
        _configure(before)
        return
    if not file.startswith(QUICK if slow else DEFAULT):
        yield folder
        return
    from jax._src import compiler

    whole, more = compiler.get_compile_options, {} if slow else LESS

    def less(**named: Any) -> Any:
        if named["backend"].platform == "cpu":
            named["env_options_overrides"] = more | dict(named["env_options_overrides"] or {})
        return whole(**named)

    quick = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv(FLAGS, "" if slow else CHEAP)
        patch.setattr(compiler, "get_compile_options", less)
        before = _configure(quick)
        yield folder
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
