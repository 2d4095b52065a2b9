"""Tests run on the CPU unless the environment names another platform."""

import os
import time

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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get(BEGIN_BEFORE, "inf")):
        item.add_marker(pytest.mark.skip(reason="no time left to begin it"))
