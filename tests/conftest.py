"""Tests run on the CPU unless the environment names another platform, and those that compare numbers compile quickly."""

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
    *("interop/test_damage.py", "interop/test_gguf.py", "interop/test_gguf_export.py"),
    *("interop/test_gguf_gemma.py", "models/families/", "models/test_attention_switches.py"),
    *("models/test_convolutions.py", "models/test_decoder.py", "steps/test_adapters.py"),
    *("steps/test_choice.py", "steps/test_classification.py", "steps/test_decode.py"),
)
"""Beginnings of files whose tests compare numbers, and see neither what the compiler makes nor what is kept of it."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get(BEGIN_BEFORE, "inf")):
        item.add_marker(pytest.mark.skip(reason="no time left to begin it"))


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leaves out LLVM's costly passes, which change only rounding, here and in children."""
    file = request.path.relative_to(Path(__file__).parent).as_posix()
    if not file.startswith(QUICK):
        yield
        return
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name.upper(), "1")
        jax.config.update(name, True)
        yield
        jax.config.update(name, before)
