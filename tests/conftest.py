"""Tests run on the CPU unless the environment names another platform, and most compile quickly and once."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# libtpu, where it is installed, otherwise asks for a TPU over the network and locks out the other workers.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

BEGIN_BEFORE = "SYSTOLIC_TESTS_BEGIN_BEFORE"
"""Variable with a time in seconds since 1970: tests that have not begun by then are skipped, as CI's time is limited."""
QUICK = (
    *("interop", "models/families", "models/test_attention", "models/test_convolutions.py"),
    *("models/test_decoder.py", "models/test_dense_switches.py", "models/test_dropless.py"),
    *("models/test_interleaved.py", "models/test_rolling.py", "session", "steps"),
)
"""Folders and files whose tests compare numbers; the others see what the compiler makes, or which programs are kept."""
COMPILED = (
    *("session/test_capacity.py", "session/test_comparing.py", "session/test_planning.py"),
    *("session/test_server_steps.py", "session/test_serving.py", "steps/test_paged_cpu.py"),
    *("steps/test_sharding.py",),
)
"""Files of those folders that do see what the compiler makes."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get(BEGIN_BEFORE, "inf")):
        item.add_marker(pytest.mark.skip(reason="no time left to begin it"))


@pytest.fixture(autouse=True, scope="module")
def compiled_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Folder of the programs that this worker compiled, without LLVM's costly passes, which change only rounding.

    Children do without those passes too, and find no programs, unless a test gives them the folder.
    """
    folder = tmp_path_factory.getbasetemp() / "xla"
    file = request.path.relative_to(Path(__file__).parent).as_posix()
    if not file.startswith(QUICK) or file in COMPILED:
        yield folder
        return
    quick = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
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
