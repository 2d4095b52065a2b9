"""Several processes that train one job: joining, agreeing, and choosing the writer.

Each process reads its part of the data and computes on its own devices; the first one writes the
run's files, and all of them write checkpoints. Functions that exchange something must be called by
every process in the same order, otherwise they deadlock.
"""

import json
import os
import sys
import zlib
from collections.abc import Mapping
from typing import Any

from systolic.artifact.reading import Peers
from systolic.core.errors import DataError, RunError
from systolic.data.skipped_files import Skipped
from systolic.training import meeting
from systolic.training import peers as finding

TEXT_BYTES = 4096
"""Most bytes of a text that the first process shares."""


def belongs(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several of the same job; see :mod:`systolic.training.peers`."""
    return finding.belongs(environ)


def describe(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Tells this process its job as options have it, which come before what its environment says."""
    given = {finding.ADDRESS: coordinator, finding.COUNT: processes, finding.INDEX: process}
    os.environ |= {name: str(value) for name, value in given.items() if value is not None}


def join(environ: Mapping[str, str] = os.environ) -> bool:
    """Connects the processes of the job, before any other use of JAX; returns False for a single process.

    Raises:
        OptionError: the description of the job has a part missing.
        RunError: the other processes were not reached.
    """
    if not belongs(environ):
        return False
    import jax

    if jax.distributed.is_initialized():
        return True
    place = finding.find(environ)
    if place is None:
        return False
    from systolic import __version__

    reports = meeting.meet(place, {"jax": jax.__version__, "systolic": __version__}, tell=_tell)
    for what in ("systolic", "jax"):
        first, *others = meeting.differing(reports, what).items()
        if others:
            version, where = others[0]
            raise RunError(
                f"{where[0].name} has {what} {version}, and {first[1][0].name} has {first[0]}; install the same version on all hosts"
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
            f"{place.name(place.index)} of {place.count}, as {place.by} has it, could not join its job at {place.coordinator} ({reason}); see systolic doctor --multi-host in each"
        ) from error
    return True


def _tell(text: str) -> None:
    print(f"systolic: {text}", file=sys.stderr, flush=True)


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
