"""Several processes that train one job: joining, agreeing, and choosing the writer.

Each process reads its part of the data and computes on its own devices; the first one writes the
run's files, and all of them write checkpoints. Functions that exchange something must be called by
every process in the same order, otherwise they deadlock.
"""

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

from systolic.artifact.reading import Peers
from systolic.core.errors import DataError, OptionError, RunError
from systolic.data.skipped_files import Skipped

TEXT_BYTES = 4096
"""Most bytes of a text that the first process shares."""

_ADDRESS, _COUNT, _INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def belongs(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several of the same job, by its environment.

    Known by an explicit coordinator, a scheduler (Slurm, Open MPI) or a TPU slice of several hosts.
    """
    several = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")
    hosts = environ.get("TPU_WORKER_HOSTNAMES") or environ.get("TPU_PROCESS_ADDRESSES") or ""
    return (
        _ADDRESS in environ or "," in hosts or any(_number(environ, name) > 1 for name in several)
    )


def join(environ: Mapping[str, str] = os.environ) -> bool:
    """Connects the processes of the job, before any other use of JAX; returns False for a single process.

    ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` describe a job explicitly;
    under a scheduler or on a TPU slice JAX finds them itself.

    Raises:
        OptionError: a part of an explicit description is missing.
        RunError: the other processes were not reached.
    """
    if not belongs(environ):
        return False
    import jax

    if jax.distributed.is_initialized():
        return True
    given: dict[str, Any] = {}
    if _COUNT in environ or _INDEX in environ:
        missing = [name for name in (_ADDRESS, _COUNT, _INDEX) if name not in environ]
        if missing:
            raise OptionError(
                f"{missing[0]} is not set, but a job of several processes needs {_ADDRESS}, {_COUNT} and {_INDEX}; set all three in every process"
            )
        given = {
            "coordinator_address": environ[_ADDRESS],
            "num_processes": _number(environ, _COUNT),
            "process_id": _number(environ, _INDEX),
        }
    try:
        jax.distributed.initialize(**given)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"this process could not join its job ({reason}); set {_ADDRESS}, {_COUNT} and {_INDEX} in every process"
        ) from error
    return True


def joined() -> bool:
    """Whether this process has joined others; imports nothing where it runs alone."""
    return belongs(os.environ) and several()


def is_first() -> bool:
    """Whether this process writes the run's files."""
    import jax

    return jax.process_index() == 0


def several() -> bool:
    """Whether there is more than one process."""
    import jax

    return jax.process_count() > 1


def share(text: str) -> str:
    """The first process's text, in every process.

    Raises:
        RunError: it is longer than ``TEXT_BYTES``.
    """
    if not several():
        return text
    import numpy as np
    from jax.experimental import multihost_utils

    encoded = text.encode()
    if len(encoded) > TEXT_BYTES:
        raise RunError(
            f"a text of {len(encoded)} bytes is too long to share; the limit is {TEXT_BYTES}"
        )
    padded = np.zeros(TEXT_BYTES, np.uint8)
    padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    shared = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    return shared.tobytes().rstrip(b"\0").decode()


def agree(flag: bool, seconds: float) -> tuple[bool, float]:
    """Whether ``flag`` is set in any process, and the longest ``seconds`` of all."""
    if not several():
        return flag, seconds
    import numpy as np
    from jax.experimental import multihost_utils

    both = multihost_utils.process_allgather(np.asarray([flag, seconds], np.float32))
    return bool(np.any(both[:, 0])), float(np.max(both[:, 1]))


def any_of(flag: bool) -> bool:
    """Whether ``flag`` is set in any process."""
    if not several():
        return flag
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def exchange(text: str) -> list[str]:
    """Texts of all processes, in the order of the processes."""
    if not several():
        return [text]
    import numpy as np
    from jax.experimental import multihost_utils

    encoded = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(len(encoded), np.int32))
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: len(encoded)] = encoded
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    return [
        row[:size].tobytes().decode() for row, size in zip(gathered, sizes.tolist(), strict=True)
    ]


def peers() -> Peers:
    """Index of this process among those of its job."""
    import jax

    return Peers(index=jax.process_index(), count=jax.process_count(), exchange=exchange)


def require_same(batch: Mapping[str, Any]) -> None:
    """Checks that processes that hold the same part of a batch have the same contents.

    Raises:
        DataError: they differ; names the array, the rows and the processes.
    """
    if not several():
        return
    import numpy as np

    mine = {
        f"{name} {shard.index}": zlib.crc32(np.ascontiguousarray(shard.data).tobytes())
        for name, array in batch.items()
        for shard in array.addressable_shards
    }
    seen: dict[str, tuple[int, int]] = {}
    for process, text in enumerate(exchange(json.dumps(mine))):
        for part, content in json.loads(text).items():
            other, first = seen.setdefault(part, (process, content))
            if first != content:
                raise DataError(
                    f"processes {other} and {process} hold the same part of a batch and read different data for it ({part}); give both the same files and versions"
                )


def share_lines(lines: Skipped) -> list[str]:
    """New messages of all processes since the last call, each once, in every process."""
    mine = lines.take()
    if not several():
        return mine
    for text in exchange(json.dumps(mine)):
        lines.note(json.loads(text))
    return mine + lines.take()


def gather(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Global arrays as numpy arrays, whole in every process."""
    import jax
    import numpy as np

    if not several():
        return {name: np.asarray(array) for name, array in jax.device_get(dict(arrays)).items()}
    from jax.experimental import multihost_utils

    return {
        name: np.asarray(multihost_utils.process_allgather(array, tiled=True))
        for name, array in arrays.items()
    }


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else 0
