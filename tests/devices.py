"""Children of tests with several CPU devices."""

import os


def virtual_devices(count: int) -> dict[str, str]:
    """The environment of a process with so many CPU devices.

    Its programs are compiled as they are for users, but for LLVM's costly passes, which take most of the time and change
    neither what is computed nor how it is split.
    """
    flags = f"--xla_force_host_platform_device_count={count}"
    own = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    return {**os.environ, **own, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
