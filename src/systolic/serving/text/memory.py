"""Memory of an engine's device, known from the compiled programs before anything is allocated."""

from collections.abc import Iterable
from typing import Any

import jax
import psutil

from systolic.chips.host import memory_bytes
from systolic.core.errors import RunError
from systolic.core.units import gibibytes
from systolic.job.serving_memory import ServingMemory
from systolic.models.quantized.codes import stored_bytes
from systolic.serving.text.runner import Programs


def capacity_bytes(devices: Iterable[Any]) -> int:
    """Bytes that programs may use of each device beside what lies there already, such as another model.

    On a CPU a device's share of what the machine has free, and of its container's limit.

    Args:
        devices: Local ones.
    """
    free = []
    for device in devices:
        stats = device.memory_stats() or {}
        if stats.get("bytes_limit"):
            free.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if free:
        return int(min(free))
    own = psutil.Process().memory_info().rss
    host = min(psutil.virtual_memory().available, max(memory_bytes() - own, 0))
    return host // len(jax.local_devices())


def held_bytes(arrays: Any) -> int:
    """Bytes of abstract arrays on one device."""
    return sum(
        stored_bytes(array.sharding.shard_shape(array.shape), array.dtype)
        for array in jax.tree.leaves(arrays)
    )


def memory_of(programs: Programs, pages: int | None = None) -> ServingMemory:
    """Memory of an engine, whose capacity is measured once: what it allocates is no smaller capacity.

    Args:
        programs: With the largest compiled.
        pages: Of the cache; None takes all that fit.
    """
    paged = programs.paged
    if programs.capacity_bytes is None:
        mesh: Any = paged.steps.target.mesh
        programs.capacity_bytes = capacity_bytes(list(mesh.devices.flat))
    return ServingMemory(
        capacity_bytes=programs.capacity_bytes,
        weights_bytes=held_bytes(paged.placed_weights),
        temporary_bytes=programs.temporary_bytes(),
        page_bytes=held_bytes(paged.placed_pages(1)),
        page_size=paged.page_size,
        pages=pages,
    )


def pages_that_fit(programs: Programs, wanted: int, least: int) -> int:
    """Pages for an engine: as many as it wants, or as there is room for.

    Compiles the largest programs, whose need beside the pages does not depend on their number.

    Args:
        programs: Not compiled yet.
        wanted: Pages that hold all texts at their longest.
        least: Pages of the longest text, and one for padding.

    Raises:
        RunError: not even the least fit.
    """
    programs.compile_largest()
    memory = memory_of(programs)
    if memory.num_pages < least:
        raise RunError(
            f"the longest text needs {least} pages of {gibibytes(memory.page_bytes)} beside {gibibytes(memory.weights_bytes)} of weights and {gibibytes(memory.temporary_bytes)} of temporaries, and the device has {gibibytes(memory.capacity_bytes)}; give a smaller context or fewer rows, or more devices"
        )
    return min(wanted, memory.num_pages)
