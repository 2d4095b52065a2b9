"""Children of tests with several CPU devices."""

import os

COUNT = "--xla_force_host_platform_device_count"


def flags(num_devices: int) -> str:
    """``XLA_FLAGS`` of this process, with so many devices."""
    given = os.environ.get("XLA_FLAGS", "").split()
    return " ".join([f"{COUNT}={num_devices}", *(one for one in given if COUNT not in one)])


def virtual_devices(count: int) -> dict[str, str]:
    """The environment of a process with so many CPU devices.

    Its programs are compiled as they are for users, but for the costly passes, which change
    neither what is computed nor how it is split.
    """
    own = {"XLA_FLAGS": flags(count), "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    return {**os.environ, **own, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
