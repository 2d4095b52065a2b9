"""Objects in buckets (``s3://``, ``gs://``) through TensorStore, the paths of their local copies, and room on the disk for one copier at a time."""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.core.errors import NotFoundError, OptionError, RunError
from systolic.core.files import cache_home
from systolic.core.units import MIB, si

COPIES = "buckets"
SCHEMES = ("s3", "gs")
_RETRIES = 6
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+([^/]+)/*(.*)")
_DATABASE = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
}
"""Configuration that Orbax 0.12.8 uses for a checkpoint's database: one root node with array metadata, no chunks."""
SAMPLE = 64
"""Objects whose sizes are asked for; of more the rest is taken to be as large on average."""
SPARE_BYTES = 256 * MIB
"""That a copy leaves free."""
SMALL_BYTES = MIB
"""Less is copied without a word, for as long as the disk takes it."""
_REQUESTS = 16
Reaches = Callable[[str, int], bool]
"""Whether an object has so many bytes."""
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFolder:
    """Folder or object in a bucket."""

    scheme: str
    bucket: str
    key: str
    """Key without leading and trailing slashes."""

    @property
    def url(self) -> str:
        """URL, as a user would give it."""
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    @property
    def copy(self) -> Path:
        """Path of its local copy."""
        return copies() / self.scheme / self.bucket / self.key


def in_bucket(path: Path | str) -> BucketFolder | None:
    """Parses a path in a bucket, even if ``Path`` has removed one of its slashes; None for a local path.

    Raises:
        NotFoundError: the path has no key.
        OptionError: the scheme is not supported.
    """
    matched = _URL.fullmatch(str(path))
    if matched is None:
        return None
    scheme, bucket, key = matched.groups()
    if scheme not in SCHEMES:
        raise OptionError(
            f"{scheme}://{bucket}/{key} has an unsupported scheme; give s3://BUCKET/FOLDER or gs://BUCKET/FOLDER, or mount the storage and give a local folder"
        )
    parts = [part for part in key.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise NotFoundError(
            f"{scheme}://{bucket}/{key} names no folder in a bucket; give {scheme}://{bucket}/FOLDER"
        )
    return BucketFolder(scheme=scheme, bucket=bucket, key="/".join(parts))


def origin(path: Path) -> BucketFolder | None:
    """Bucket folder that a local copy belongs to, in any cache folder; None for other paths."""
    parts = path.parts
    at = [n for n, part in enumerate(parts[:-3]) if part == COPIES and parts[n + 1] in SCHEMES]
    if not at:
        return None
    scheme, bucket, *key = parts[at[-1] + 1 :]
    return BucketFolder(scheme=scheme, bucket=bucket, key="/".join(key))


class Objects:
    """Objects below a folder in a bucket, by relative name."""

    def __init__(self, folder: BucketFolder) -> None:
        self.folder = folder
        import tensorstore

        self._range: Any = tensorstore.KvStore.KeyRange
        spec = _spec(folder)
        # With one context for all databases, merging doesn't copy values.
        self._context: Any = tensorstore.Context(spec.pop("context"))
        self._spec = spec
        self._store = self._do(lambda: tensorstore.KvStore.open(spec, context=self._context))

    def names(self, below: str = "") -> list[str]:
        """Sorted names of the objects with the prefix ``below``."""
        keys = self._range(f"/{below}", f"/{below}\U0010ffff")
        listed = self._do(lambda: self._store.list(keys))
        names = sorted(name.decode().removeprefix("/") for name in listed)
        return [name for name in names if name.startswith(below)]

    def read(self, name: str, known: str = "") -> tuple[bytes, str] | None:
        """Content and version of an object, or None; the content is empty if the version is still ``known``."""
        options = {"if_not_equal": bytes.fromhex(known)} if known else {}
        reply = self._do(lambda: self._store.read(_key(name), **options))
        if reply.state == "missing":
            return None
        same = reply.state == "unspecified"
        if same:
            return b"", known
        # Emulators of Google Cloud Storage provide no version.
        version = reply.stamp.generation
        return reply.value, version.hex() if any(version) else ""

    def exists(self, name: str) -> bool:
        """Whether the object exists."""
        nothing = slice(0, 0)
        reply = self._do(lambda: self._store.read(_key(name), byte_range=nothing))
        return reply.state != "missing"

    def reaches(self, name: str, num_bytes: int) -> bool:
        """Whether an object has at least ``num_bytes`` bytes."""
        last = slice(num_bytes - 1, num_bytes)
        try:
            return self._store.read(_key(name), byte_range=last).result().state != "missing"
        except (ValueError, RuntimeError, OSError) as error:
            if "OUT_OF_RANGE" in str(error):
                return False
            raise _told(self.folder, str(error)) from error

    def write(self, name: str, content: bytes) -> None:
        """Writes an object."""
        self._do(lambda: self._store.write(_key(name), content))

    def delete(self, name: str) -> None:
        """Deletes an object if it exists."""
        self._do(lambda: self._store.write(_key(name), None))

    def merge(self, below: str, parts: Sequence[str]) -> None:
        """Merges the OCDBT databases ``parts``, which are below ``below``, into one there that refers to their files."""
        import tensorstore

        def opened(name: str, **options: Any) -> Any:
            base = self._spec | {"path": f"{self.folder.key}/{name}/"}
            spec = {"driver": "ocdbt", "base": base} | options
            return tensorstore.KvStore.open(spec, context=self._context)

        together = tensorstore.Transaction(atomic=True)
        opening = [opened(below, config=_DATABASE, assume_config=True), *map(opened, parts)]
        whole, *stores = [self._do(lambda future=future: future) for future in opening]
        into = whole.with_transaction(together)
        for copied in [store.experimental_copy_range_to(into) for store in stores]:
            self._do(lambda copied=copied: copied)
        self._do(together.commit_async)

    def _do(self, call: Callable[[], Any]) -> Any:
        try:
            return call().result()
        except (ValueError, RuntimeError, OSError) as error:
            raise _told(self.folder, str(error)) from error


def copies() -> Path:
    """Folder of all local copies."""
    return cache_home() / COPIES


def _key(name: str) -> str:
    return f"/{name}" if name else ""


def _spec(folder: BucketFolder) -> dict[str, Any]:
    """TensorStore spec of the folder; credentials come from the standard variables and files."""
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
        # Otherwise TensorStore tries credential files first and warns about each missing one.
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def _told(folder: BucketFolder, reason: str) -> RunError | NotFoundError:
    """One-line error for a failure of the store."""
    first = reason.splitlines()[0].partition(" [")[0][:200] if reason else "no reason"
    # TensorStore before 0.1.85 does not look for an error in S3's answer to a list.
    nothing = "NoSuchBucket" in reason or "missing <ListBucketResult>" in reason
    if nothing or ("NOT_FOUND" in reason and "bucket" in reason.lower()):
        return NotFoundError(
            f"bucket {folder.bucket} does not exist or is not accessible; create it, or check the name"
        )
    if any(word in reason for word in ("PERMISSION_DENIED", "UNAUTHENTICATED", "AccessDenied")):
        how = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials"
        if folder.scheme == "gs":
            how = "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS"
        return RunError(f"{folder.url} refuses access ({first}); give credentials: {how}")
    return RunError(f"{folder.url} does not answer ({first}); check the network and try again")


def about_bytes(names: Sequence[str], reaches: Reaches) -> int:
    """Bytes of objects to an eighth, from above.

    A bucket's list has no sizes here, so that each is found by whether the object has so many bytes.
    """
    step = -(-len(names) // SAMPLE)
    sample = names[::step] if step else []
    with ThreadPoolExecutor(_REQUESTS) as pool:
        sizes = list(pool.map(lambda name: _size(lambda size: reaches(name, size)), sample))
    return sum(sizes) * len(names) // max(len(sample), 1)


def _size(reaches: Callable[[int], bool]) -> int:
    most = 1 << 12
    while reaches(most):
        most *= 2
    if most == 1 << 12:
        return most
    least = most // 2
    while most - least > least // 8:
        middle = (least + most) // 2
        least, most = (middle, most) if reaches(middle) else (least, middle)
    return most


def check(url: str, names: Sequence[str], reaches: Reaches, folder: Path, tell: Tell) -> None:
    """Says how much is copied, and refuses what the disk has no room for.

    Raises:
        RunError: it has none.
    """
    wanted, free = about_bytes(names, reaches), _free(folder)
    if wanted < SMALL_BYTES:
        return
    if wanted + SPARE_BYTES > free:
        raise RunError(_full(url, f"about {si(wanted, 'B')}", free, folder))
    files = "a file" if len(names) == 1 else f"{len(names)} files"
    tell(f"copying {url}: about {si(wanted, 'B')} in {files}, {si(free, 'B')} free in {folder}")


def require(url: str, num_bytes: int, folder: Path) -> None:
    """Checks that so many bytes more fit.

    Raises:
        RunError: it does not; what is there stays, and is not copied again.
    """
    free = _free(folder)
    if num_bytes >= SMALL_BYTES and num_bytes + SPARE_BYTES > free:
        raise RunError(_full(url, f"{si(num_bytes, 'B')} more", free, folder))


def _full(url: str, size: str, free: int, folder: Path) -> str:
    return f"{url} has {size}, and the disk of {folder} has {si(free, 'B')} free, of which {si(SPARE_BYTES, 'B')} stay so; set SYSTOLIC_CACHE to a larger disk, or mount the bucket and give its folder"


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def alone(copy: Path, tell: Tell) -> Generator[None]:
    """Context in which no other process of this machine copies the same; waits for one that does."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    copy.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(copy.with_name(f".{copy.name}.copying"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"waiting for another process, which copies to {copy}")
            fcntl.lockf(handle, fcntl.LOCK_EX)
        except OSError:  # Network mounts without locks.
            pass
        yield
    finally:
        os.close(handle)
