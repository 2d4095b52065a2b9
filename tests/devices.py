"""Children of tests with several CPU devices."""

import os

CHEAP = "--xla_cpu_use_fusion_emitters=false"
"""XLA's flag for compiles on a CPU without the emitters of fusions, which take most of the time and change only rounding."""
FLAGS = "SYSTOLIC_TESTS_XLA_FLAGS"
"""Variable with flags of children, so that they compute as the process of the tests does."""


def virtual_devices(count: int) -> dict[str, str]:
    """The environment of a process with so many CPU devices.

    Its programs are compiled as they are for users, but for the costly passes, which change
    neither what is computed nor how it is split.
    """
    flags = f"--xla_force_host_platform_device_count={count} {os.environ.get(FLAGS, '')}"
    own = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    return {**os.environ, **own, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
