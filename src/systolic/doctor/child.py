"""Child process that imports JAX, measures one device and prints one JSON line.

A device held by another process can make this one hang or abort; the parent handles both.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

_ENOUGH_SECONDS = 0.05
"""Minimum duration of a timed call, far above the dispatch overhead."""
_LARGEST_MATMUL = 16384
_ACCELERATOR_COPY_BYTES, _CPU_COPY_BYTES = 2**30, 2**27
_REPEATS = 5


def main() -> None:
    """Prints the devices that JAX sees, and the rates of the first."""
    import jax

    device = jax.devices()[0]
    result: dict[str, Any] = {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": jax.device_count(),
        "num_local_devices": jax.local_device_count(),
    }
    on_cpu = device.platform == "cpu"
    result["bf16_flops_per_second"] = matmul_rate("bfloat16", 256 if on_cpu else 4096)
    result["f32_flops_per_second"] = matmul_rate("float32", 512 if on_cpu else 2048)
    result["copy_bytes_per_second"] = copy_rate(
        _CPU_COPY_BYTES if on_cpu else _ACCELERATOR_COPY_BYTES
    )
    sys.stdout.write("\n" + json.dumps(result) + "\n")


def matmul_rate(dtype: str, size: int) -> float | None:
    """FLOP/s of a square matmul, whose size grows until one call is long enough to time.

    f32 uses highest precision, which is not the default on TPUs and newer GPUs.
    """
    import jax
    import jax.numpy as jnp

    precision = "highest" if dtype == "float32" else "default"
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    rate = None
    while True:
        try:
            a = jnp.full((size, size), 0.5, dtype)
            seconds = _best_seconds(lambda a=a: multiply(a, a))
        except RuntimeError:  # out of memory: keep the rate of the previous size
            return rate
        rate = 2 * size**3 / seconds
        if seconds >= _ENOUGH_SECONDS or size >= _LARGEST_MATMUL:
            return rate
        size *= 2


def copy_rate(num_bytes: int) -> float | None:
    """Bytes read plus bytes written per second when an array is negated in place.

    In place, because newly allocated memory on a CPU costs page faults that a training step doesn't have.
    """
    import jax
    import jax.numpy as jnp

    negate = jax.jit(jnp.negative, donate_argnums=0)
    try:
        x = jnp.zeros(num_bytes // 4, jnp.float32)

        def call() -> Any:
            nonlocal x
            x = negate(x)
            return x

        return 2 * num_bytes / _best_seconds(call)
    except RuntimeError:  # out of memory
        return None


def _best_seconds(call: Callable[[], Any]) -> float:
    """Minimum time of a few calls, without the first one, which compiles."""
    call().block_until_ready()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call().block_until_ready()
        times.append(time.perf_counter() - start)
        if sum(times) > 20 * _ENOUGH_SECONDS:
            break
    return min(times)


if __name__ == "__main__":
    main()
