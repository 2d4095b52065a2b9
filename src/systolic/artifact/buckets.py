"""Runs, Bundles and data in buckets (``s3://``, ``gs://``), by way of copies here.

A copy is below ``cache_home()/buckets`` and follows the bucket: what is read is brought up to date first, and what a
run writes is sent while it trains. Of a run's checkpoints only the manifests come at once; arrays come when one is
read. A checkpoint is complete in the bucket when its manifest is there, which is sent last and goes first.
"""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.artifact import manifest, replace, room
from systolic.artifact.access import Lock
from systolic.core.errors import NotFoundError, RunError
from systolic.core.files import write_atomically, write_json
from systolic.core.store import cache_home

COPIES = "buckets"
CHECKPOINTS = "checkpoints"
RUN = "job.json"
"""File that only a run has."""
SEND_SECONDS = 10.0
"""Between two sendings of what a run has written."""
LOOK_SECONDS = 1.0
"""Between two looks for a new checkpoint, which is sent at once."""
_TRANSFERS = 8
_RETRIES = 6
_URL = re.compile(r"(s3|gs):/+([^/]+)/*(.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFolder:
    """A folder in a bucket, or an object."""

    scheme: str
    bucket: str
    key: str
    """Without slashes at its ends."""

    @property
    def url(self) -> str:
        """As the user gives it."""
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    @property
    def copy(self) -> Path:
        """Where its copy is."""
        return _copies() / self.scheme / self.bucket / self.key


def in_bucket(path: Path | str) -> BucketFolder | None:
    """What a path in a bucket names, also where ``Path`` has taken one of its slashes; None for a path here.

    Raises:
        NotFoundError: it names nothing within the bucket.
    """
    matched = _URL.fullmatch(str(path))
    if matched is None:
        return None
    scheme, bucket, key = matched.groups()
    parts = [part for part in key.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise NotFoundError(f"{path} names no folder in a bucket; give {scheme}://{bucket}/FOLDER")
    return BucketFolder(scheme=scheme, bucket=bucket, key="/".join(parts))


def origin(path: Path) -> BucketFolder | None:
    """What a copy is of, wherever its cache was; None for other paths."""
    parts = path.parts
    at = [n for n, part in enumerate(parts[:-3]) if part == COPIES and parts[n + 1] in ("s3", "gs")]
    if not at:
        return None
    scheme, bucket, *key = parts[at[-1] + 1 :]
    return BucketFolder(scheme=scheme, bucket=bucket, key="/".join(key))


class Objects:
    """Objects below a folder in a bucket, by their names in it."""

    def __init__(self, folder: BucketFolder) -> None:
        self.folder = folder
        import tensorstore

        self._range: Any = tensorstore.KvStore.KeyRange
        self._store = self._do(lambda: tensorstore.KvStore.open(_spec(folder)))

    def names(self, below: str = "") -> list[str]:
        """Names of the objects, sorted."""
        keys = self._range(f"/{below}", f"/{below}\U0010ffff")
        listed = self._do(lambda: self._store.list(keys))
        found = sorted(name.decode().removeprefix("/") for name in listed)
        return [name for name in found if name.startswith(below)]

    def read(self, name: str, known: str = "") -> tuple[bytes, str] | None:
        """Content and version of an object, None without one; the content is empty where the version is ``known``."""
        options = {"if_not_equal": bytes.fromhex(known)} if known else {}
        found = self._do(lambda: self._store.read(_key(name), **options))
        if found.state == "missing":
            return None
        same = found.state == "unspecified"
        if same:
            return b"", known
        # Emulators of Google's storage give no version.
        version = found.stamp.generation
        return found.value, version.hex() if any(version) else ""

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        nothing = slice(0, 0)
        found = self._do(lambda: self._store.read(_key(name), byte_range=nothing))
        return found.state != "missing"

    def reaches(self, name: str, num_bytes: int) -> bool:
        """Whether an object has so many bytes."""
        last = slice(num_bytes - 1, num_bytes)
        try:
            return self._store.read(_key(name), byte_range=last).result().state != "missing"
        except (ValueError, RuntimeError, OSError) as error:
            if "OUT_OF_RANGE" in str(error):
                return False
            raise _told(self.folder, str(error)) from error

    def write(self, name: str, content: bytes) -> None:
        """Writes an object, whole."""
        self._do(lambda: self._store.write(_key(name), content))

    def delete(self, name: str) -> None:
        """Deletes an object, if it is there."""
        self._do(lambda: self._store.write(_key(name), None))

    def _do(self, call: Callable[[], Any]) -> Any:
        try:
            return call().result()
        except (ValueError, RuntimeError, OSError) as error:
            raise _told(self.folder, str(error)) from error


def _quietly(text: str) -> None:
    """Says nothing; the default of ``tell``."""


def pull(path: Path | str, tell: room.Tell = _quietly) -> Path:
    """The copy of what a path in a bucket names, brought up to date; a path here is returned as it is.

    A run that a process here is writing is newer in its copy, which then stays as it is. Of several processes
    of a machine one copies and the others wait.

    Args:
        path: The path.
        tell: Called with the size of what is copied, and where another process is waited for.

    Raises:
        NotFoundError: there is nothing.
        RunError: the bucket does not answer, or refuses, or the disk has no room.
    """
    folder = in_bucket(path)
    if folder is None:
        return Path(path)
    with room.alone(folder.copy, tell):
        return _pulled(Objects(folder), tell)


def _pulled(objects: Objects, tell: room.Tell) -> Path:
    copy = objects.folder.copy
    if objects.exists(""):
        _download(objects, [""], tell)
        return copy
    copy.mkdir(parents=True, exist_ok=True)
    try:
        lock = Lock(copy)
    except RunError:
        return copy
    try:
        bring(objects, tell)
    finally:
        lock.release()
    return copy


def has(folder: Path, name: str) -> bool:
    """Whether a folder, in a bucket or here, holds a file."""
    remote = in_bucket(folder)
    if remote is None:
        return (folder / name).is_file()
    return Objects(remote).exists(name)


def bring(objects: Objects, tell: room.Tell = _quietly) -> None:
    """Makes a copy what the bucket holds, but for the arrays of checkpoints.

    Raises:
        NotFoundError: there is nothing.
        RunError: the disk has no room.
    """
    names = objects.names()
    if not names:
        raise NotFoundError(f"{objects.folder.url} holds nothing; check the path")
    copy = objects.folder.copy
    wanted = [name for name in names if not _is_array(name)]
    steps = {name.split("/")[1] for name in wanted if _is_manifest(name)}
    for step in (copy / CHECKPOINTS).glob("[0-9]*"):
        if step.name not in steps:
            shutil.rmtree(step)
    for file in _files(copy):
        if file not in names:
            (copy / file).unlink()
    manifests = {step: copy / CHECKPOINTS / step / manifest.NAME for step in steps}
    before = {step: _content(file) for step, file in manifests.items()}
    # Of a run only small files come.
    _download(objects, wanted, None if RUN in wanted else tell)
    for step, file in manifests.items():
        if before[step] != _content(file):  # Arrays that are here are of another checkpoint.
            for array in _files(file.parent):
                if array != manifest.NAME:
                    (file.parent / array).unlink()


def complete(step: Path) -> None:
    """Brings the arrays of a checkpoint whose run is a copy; nothing for other folders."""
    folder = origin(step)
    if folder is None or not step.is_relative_to(_copies().resolve()):
        return
    run = origin(step.parent.parent)
    if run is None:
        return
    try:
        written = manifest.read(step).files
    except manifest.DamagedError:
        return
    sizes = {name: size for name, (size, _) in written.items()}
    absent = [name for name, size in sizes.items() if _size(step / name) != size]
    if absent:
        objects = Objects(run)
        room.require(run.url, sum(sizes[name] for name in absent), run.copy.parent)
        below = f"{CHECKPOINTS}/{step.name}/"
        changing = [n for n in objects.names(below) if n.removeprefix(below) not in sizes]
        _download(objects, [*(below + name for name in absent), *changing])


def again(path: Path) -> Path:
    """The path, fetched once more where it was a copy that is gone."""
    folder = None if path.exists() else origin(path)
    return path if folder is None else pull(folder.url)


class Sender:
    """Sends what a run writes into its copy to the bucket, in the background.

    Args:
        objects: The run's.

    Raises:
        RunError: the bucket refuses.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects, self._copy = objects, objects.folder.copy
        self._there = set(objects.names())
        local = [name for name in _files(self._copy) if name in self._there]
        self._sent = {name: _stamp(self._copy / name) for name in local}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="systolic-sender", daemon=True)

    def start(self) -> None:
        """Sends what is there, then goes on in the background."""
        self.send()
        self._thread.start()

    def close(self) -> None:
        """Sends the rest.

        Raises:
            RunError: it could not be sent; the copy is whole.
        """
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self.send()
        except RunError as error:
            raise RunError(
                f"{self._copy} is whole, and its last changes did not reach {self._objects.folder.url} ({error}); copy the folder there before it is continued from there"
            ) from error

    def send(self) -> None:
        """Sends what changed and deletes what is gone."""
        # A step's records are written before its checkpoint, so files are listed first and logs sent after arrays.
        local = _files(self._copy)
        whole = {name.split("/")[1] for name in local if _is_manifest(name)}
        changed = [name for name in local if self._sent.get(name) != _stamp(self._copy / name)]
        arrays = [name for name in changed if _is_array(name) and name.split("/")[1] in whole]
        manifests = [name for name in changed if _is_manifest(name)]
        others = [n for n in changed if not _is_array(n) and not _is_manifest(n)]
        absent = self._there - set(local)
        # Arrays of a step that was not needed here stay there as long as its manifest.
        gone = [n for n in absent if not (_is_array(n) and n.split("/")[1] in whole)]
        for names in (arrays, others, manifests):
            self._upload(names)
        for name in sorted(gone, key=lambda name: not _is_manifest(name)):
            self._objects.delete(name)
            self._there.discard(name)
            self._sent.pop(name, None)

    def _upload(self, names: Sequence[str]) -> None:
        def one(name: str) -> None:
            # A checkpoint may go meanwhile; its manifest then does, too.
            with suppress(FileNotFoundError):
                stamp = _stamp(self._copy / name)
                self._objects.write(name, (self._copy / name).read_bytes())
                self._sent[name] = stamp
                self._there.add(name)

        _in_parallel(one, names)

    def _watch(self) -> None:
        sent = time.monotonic()
        while not self._ended.wait(LOOK_SECONDS):
            if time.monotonic() - sent > SEND_SECONDS or self._has_new_checkpoint():
                with suppress(RunError):  # It is tried again, and told at the end.
                    self.send()
                sent = time.monotonic()

    def _has_new_checkpoint(self) -> bool:
        files = (self._copy / CHECKPOINTS).glob(f"[0-9]*/{manifest.NAME}")
        return any(file.relative_to(self._copy).as_posix() not in self._sent for file in files)


def _download(objects: Objects, names: Sequence[str], tell: room.Tell | None = None) -> None:
    """Copies objects that are not here, or changed; with ``tell`` their size is asked for and said before."""
    copy = objects.folder.copy
    record = copy.with_name(f".{copy.name}.versions.json")
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        known = json.loads(record.read_text())
    new = [name for name in names if name not in known or not (copy / name).exists()]
    if tell is not None:
        room.check(objects.folder.url, new, objects.reaches, copy.parent, tell)

    def one(name: str) -> None:
        file = copy / name
        found = objects.read(name, known.get(name, "") if file.exists() else "")
        if found is None:
            raise NotFoundError(f"{objects.folder.url}/{name} went while it was read; try again")
        content, version = found
        if not file.exists() or known.get(name) != version:
            room.require(objects.folder.url, len(content), copy.parent)
            write_atomically(file, content)
            known[name] = version

    try:
        _in_parallel(one, names)
    finally:
        write_json(record, known)


def _in_parallel(work: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_TRANSFERS) as pool:
        for _ in pool.map(work, names):
            pass


def _files(copy: Path) -> list[str]:
    """Names of files in a copy that belong to the bucket: no lock, nothing half written."""
    found = []
    for folder, folders, files in os.walk(copy):
        unfinished = (".orbax-checkpoint-tmp", *replace.FOLDERS)
        folders[:] = [n for n in folders if not n.startswith(".") and not n.endswith(unfinished)]
        inside = Path(folder).relative_to(copy)
        found += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def _size(file: Path) -> int | None:
    stamp = _stamp(file)
    return None if stamp is None else stamp[0]


def _is_array(name: str) -> bool:
    """Whether a file of a run is in a checkpoint, and not its manifest."""
    return re.match(rf"{CHECKPOINTS}/\d+/", name) is not None and not _is_manifest(name)


def _is_manifest(name: str) -> bool:
    return re.fullmatch(rf"{CHECKPOINTS}/\d+/{manifest.NAME}", name) is not None


def _copies() -> Path:
    return cache_home() / COPIES


def _key(name: str) -> str:
    return f"/{name}" if name else ""


def _spec(folder: BucketFolder) -> dict[str, Any]:
    """TensorStore's description of the folder; its own variables and files give credentials."""
    if folder.scheme == "gs":
        retries = {"gcs_request_retries": {"max_retries": _RETRIES}}
        return {"driver": "gcs", "bucket": folder.bucket, "path": folder.key, "context": retries}
    spec: dict[str, Any] = {"driver": "s3", "bucket": folder.bucket, "path": folder.key}
    spec["context"] = {"s3_request_retries": {"max_retries": _RETRIES}}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in os.environ:
        # Without this it looks at files first and complains of each that is not there.
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def _told(folder: BucketFolder, reason: str) -> RunError | NotFoundError:
    """A store's error on one line."""
    first = reason.splitlines()[0].partition(" [")[0][:200] if reason else "no reason"
    if "NoSuchBucket" in reason or ("NOT_FOUND" in reason and "bucket" in reason.lower()):
        return NotFoundError(
            f"there is no bucket {folder.bucket}, or not for you; make it, or check the name"
        )
    if any(word in reason for word in ("PERMISSION_DENIED", "UNAUTHENTICATED", "AccessDenied")):
        how = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials"
        if folder.scheme == "gs":
            how = "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS"
        return RunError(f"{folder.url} refuses access ({first}); give credentials: {how}")
    return RunError(f"{folder.url} does not answer ({first}); check the network and try again")
