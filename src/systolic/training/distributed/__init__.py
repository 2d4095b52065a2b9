"""Multi-process jobs: joining the job, collective decisions, and which process writes.

Each process reads its part of the data and computes on its own devices; process 0 writes the run's
files, and all processes write checkpoints. Functions that communicate are collective: every process
must call them in the same order, otherwise they deadlock.
"""

import json
import os
import sys
import zlib
from collections.abc import Mapping
from typing import Any

from systolic.core.errors import DataError, RunError
from systolic.data.input_files import Skipped
from systolic.runs.reading import Peers
from systolic.training.distributed import detect, rendezvous

TEXT_BYTES = 4096
"""Size limit of a text for :func:`share`."""


def belongs(environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to a multi-process job; see :mod:`systolic.training.distributed.detect`."""
    return detect.belongs(environ)


def describe(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Sets the job's environment variables from options, which take precedence over the environment.

    Raises:
        OptionError: they contradict each other; the environment stays as it is.
    """
    settings = {detect.ADDRESS: coordinator, detect.COUNT: processes, detect.INDEX: process}
    changed = {name: str(value) for name, value in settings.items() if value is not None}
    if changed:
        detect.find({**os.environ, **changed})
    os.environ |= changed


def join(environ: Mapping[str, str] = os.environ) -> bool:
    """Connects the processes of the job, before any other use of JAX; returns False for a single process.

    Raises:
        OptionError: the description of the job is incomplete.
        RunError: the other processes could not be reached.
    """
    if not belongs(environ):
        return False
    import jax

    if jax.distributed.is_initialized():
        return True
    place = detect.find(environ)
    if place is None:
        return False
    from systolic import __version__

    reports = rendezvous.meet(place, {"jax": jax.__version__, "systolic": __version__}, tell=_tell)
    for what in ("systolic", "jax"):
        first, *others = rendezvous.differing(reports, what).items()
        if others:
            version, where = others[0]
            raise RunError(
                f"{where[0].name} has {what} {version}, but {first[1][0].name} has {first[0]}; install the same version on all hosts"
            )
    try:
        jax.distributed.initialize(
            coordinator_address=place.coordinator,
            num_processes=place.count,
            process_id=place.index,
            local_device_ids=None if place.local is None else [place.local],
            cluster_detection_method="deactivate",
        )
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"{place.name(place.index)} of {place.count} (from {place.by}) could not join its job at {place.coordinator} ({reason}); run systolic doctor --multi-host in every process"
        ) from error
    return True


def _tell(text: str) -> None:
    print(f"systolic: {text}", file=sys.stderr, flush=True)


def joined() -> bool:
    """Whether this process has joined a multi-process job; imports nothing in a single process."""
    return belongs(os.environ) and several()


def is_first() -> bool:
    """Whether this is process 0, which writes the run's files."""
    import jax

    return jax.process_index() == 0


def several() -> bool:
    """Whether the job has more than one process."""
    import jax

    return jax.process_count() > 1


def share(text: str) -> str:
    """Broadcasts the text of process 0 to every process.

    Raises:
        RunError: the text is longer than ``TEXT_BYTES``.
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
    """Whether ``flag`` is set in any process, and the maximum of ``seconds`` over all."""
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
    """Gathers the texts of all processes, in process order."""
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
    """Index of this process, and the number of processes of its job."""
    import jax

    return Peers(index=jax.process_index(), count=jax.process_count(), exchange=exchange)


def require_same(batch: Mapping[str, Any]) -> None:
    """Checks that processes that hold the same part of a batch have the same data for it.

    Raises:
        DataError: the data differs; names the array, the rows and the processes.
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
    """New messages of all processes since the last call, without duplicates, in every process."""
    mine = lines.take()
    if not several():
        return mine
    for text in exchange(json.dumps(mine)):
        lines.note(json.loads(text))
    return mine + lines.take()


def gather(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Global arrays as full numpy arrays in every process."""
    import jax
    import numpy as np

    if not several():
        return {name: np.asarray(array) for name, array in jax.device_get(dict(arrays)).items()}
    from jax.experimental import multihost_utils

    return {
        name: np.asarray(multihost_utils.process_allgather(array, tiled=True))
        for name, array in arrays.items()
    }
