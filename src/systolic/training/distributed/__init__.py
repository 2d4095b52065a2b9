"""Multi-process jobs: joining the job, collective decisions, and which process writes.

Each process reads its part of the data and computes on its own devices; process 0 writes the run's
files, and all processes write checkpoints. Functions that communicate are collective: every process
must call them in the same order, otherwise they deadlock.

When JAX times out, it ends the process with a stack trace that doesn't name the missing processes. So process 0 first
listens on the coordinator's address, the others report to it, and each receives all reports; then the port is free
for JAX.
"""

import contextlib
import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from systolic.core.errors import DataError, RunError
from systolic.data.input_files import Skipped
from systolic.runs.reading import Peers
from systolic.training.distributed import detect
from systolic.training.distributed.detect import Member

MEET_SECONDS = 300.0
"""Timeout of the rendezvous, the same as that of JAX."""
TELL_SECONDS = 20.0
"""Interval between messages about missing processes."""
AGAIN_SECONDS = 0.2
_ANSWER_SECONDS = 10.0
_GREETING = "systolic meeting 1"
TEXT_BYTES = 4096
"""Size limit of a text for :func:`share`."""


class _SocketFile(Protocol):
    """File object of a socket."""

    def readline(self) -> bytes: ...
    def write(self, data: bytes, /) -> int: ...
    def flush(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """Report of one process about itself."""

    index: int
    host: str
    facts: Mapping[str, Any]
    """Facts from the caller: versions, data …"""
    address: str = ""
    """Address of the process as seen by process 0; empty for process 0."""
    ahead_seconds: float = 0.0
    """Offset of its clock from that of process 0."""
    error_seconds: float = 0.0
    """Upper bound of the offset's error: half of the round-trip time."""

    @property
    def name(self) -> str:
        """Name of the process for messages."""
        return f"process {self.index} on {self.host}"


def meet(
    place: Member,
    facts: Mapping[str, Any],
    seconds: float = MEET_SECONDS,
    tell: Callable[[str], None] = lambda text: None,
) -> list[HostReport]:
    """Gathers the reports of all processes, in process order, in each of them.

    Args:
        place: Place of this process.
        facts: Facts to report, as JSON values.
        seconds: Timeout for the other processes.
        tell: Called periodically with a line that names the missing processes.

    Raises:
        RunError: a process did not connect, or two have the same index; the same message in every process that
            connected.
    """
    mine = {
        "greeting": _GREETING,
        "index": place.index,
        "count": place.count,
        "host": socket.gethostname(),
        "facts": dict(facts),
    }
    if place.index:
        answer = _report_to_first(place, mine, seconds)
    else:
        with _Guests(place, mine) as guests:
            answer = guests.gather(seconds, tell)
    if "error" in answer:
        raise RunError(answer["error"])
    return [HostReport(**each) for each in answer["all"]]


class _Guests:
    """Server side in process 0: connections of the other processes by index."""

    def __init__(self, place: Member, mine: Mapping[str, Any]) -> None:
        self._place, self._mine = place, mine
        self._came: dict[int, tuple[dict[str, Any], _SocketFile]] = {}
        self._streams: list[_SocketFile] = []
        self._stack = contextlib.ExitStack()
        self._error = ""

    def __enter__(self) -> "_Guests":
        port = int(self._place.coordinator.rpartition(":")[2])
        try:
            self._server = self._stack.enter_context(_server(port))
        except OSError as error:
            raise RunError(
                f"port {port} of this host, to which the other processes connect, is in use ({error.strerror}); stop the process that uses it, or give another --coordinator HOST:PORT in every process"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def gather(self, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
        """Waits for all processes and answers each."""
        start = last_told = time.monotonic()
        while not self._error and len(self._came) < self._place.count - 1:
            now = time.monotonic()
            if now - start > seconds:
                self._error = f"{self._missing()} did not connect to {self._place.coordinator} within {seconds:.0f} s; check that it runs, can reach that address, and was given the same one"
                break
            if now - last_told > TELL_SECONDS:
                last_told = now
                tell(f"waiting for {self._missing()}")
            self._server.settimeout(AGAIN_SECONDS)
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            self._stack.enter_context(connection)
            self._welcome(connection)
        if self._error:
            answer = {"error": self._error}
        else:
            own = {"index": 0, "host": self._mine["host"], "facts": self._mine["facts"]}
            answer = {"all": [own, *(self._timed(i) for i in range(1, self._place.count))]}
        for stream in self._streams:
            with contextlib.suppress(OSError):
                _write(stream, answer)
        return answer

    def _missing(self) -> str:
        absent = [i for i in range(1, self._place.count) if i not in self._came]
        named = [self._place.name(index) for index in absent[:8]]
        return ", ".join(named) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")

    def _welcome(self, connection: socket.socket) -> None:
        """Reads the report of a connection; ignores connections that send anything else."""
        connection.settimeout(_ANSWER_SECONDS)
        stream = self._stack.enter_context(connection.makefile("rwb"))
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(stream.readline())
            if said["greeting"] != _GREETING:
                return
            index, host, count = said["index"], said["host"], said["count"]
            before = self._came.get(index)
            if count != self._place.count:
                self._error = f"process {index} on {host} expects {count} processes, but process 0 on {self._mine['host']} expects {self._place.count}; give every process the same number"
            elif before is not None and not _left(before[1]):
                self._error = f"process index {index} is used twice, on {before[0]['host']} and on {host}; give each process its own index"
            elif not 0 < index < count:
                self._error = f"process index {index} is used on {host} and on {self._mine['host']}; give each process its own index"
            self._came[index] = (said | {"address": connection.getpeername()[0]}, stream)
            self._streams.append(stream)

    def _timed(self, index: int) -> dict[str, Any]:
        """Report of a process, with the offset of its clock."""
        said, stream = self._came[index]
        report = {name: said[name] for name in ("index", "host", "facts", "address")}
        try:
            sent = time.time()
            _write(stream, {"time": True})
            theirs = json.loads(stream.readline())["time"]
            answered = time.time()
        except (OSError, ValueError, KeyError):
            return report
        return report | {
            "ahead_seconds": theirs - (sent + answered) / 2,
            "error_seconds": (answered - sent) / 2,
        }


def _report_to_first(place: Member, mine: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Reports to process 0 as soon as it listens, and returns its answer."""
    host, _, port = place.coordinator.rpartition(":")
    address = (host.strip("[]"), int(port))
    deadline = time.monotonic() + seconds
    why = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(
                address, timeout=min(left, _ANSWER_SECONDS)
            ) as connection:
                # Process 0 reports missing processes slightly after this one's deadline.
                connection.settimeout(left + _ANSWER_SECONDS)
                with connection.makefile("rwb") as stream:
                    _write(stream, mine)
                    while line := stream.readline():
                        answer = json.loads(line)
                        if "time" not in answer:
                            return answer
                        _write(stream, {"time": time.time()})
        except (OSError, ValueError) as error:
            why = str(error)
        time.sleep(AGAIN_SECONDS)
    return {
        "error": f"{place.name(place.index)} could not reach {place.name(0)} at {place.coordinator} within {seconds:.0f} s ({why or 'it closed the connection'}); check that it runs and that its port is open to this host"
    }


def differing(reports: Sequence[HostReport], what: str) -> dict[str, list[HostReport]]:
    """Reports grouped by the value of a fact, the most frequent value first."""
    groups: dict[str, list[HostReport]] = {}
    for report in reports:
        value = report.facts.get(what)
        groups.setdefault("absent" if value is None else str(value), []).append(report)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _left(stream: _SocketFile) -> bool:
    """Whether the peer has closed the connection, as when its process was restarted."""
    try:
        _write(stream, {"time": True})
        return not stream.readline()
    except OSError:
        return True


def _write(stream: _SocketFile, value: Mapping[str, Any]) -> None:
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


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

    reports = meet(place, {"jax": jax.__version__, "systolic": __version__}, tell=_tell)
    for what in ("systolic", "jax"):
        first, *others = differing(reports, what).items()
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
