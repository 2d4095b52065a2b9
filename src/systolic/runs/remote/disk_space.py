"""Room on this machine's disk for what is copied from a bucket, and one copier at a time."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from systolic.core.errors import RunError
from systolic.core.units import MIB, si

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


def about_bytes(names: Sequence[str], reaches: Reaches) -> int:
    """Bytes of objects to an eighth, from above.

    A bucket's list has no sizes here, so that each is found by whether the object has so many bytes.
    """
    step = -(-len(names) // SAMPLE)
    asked = names[::step] if step else []
    with ThreadPoolExecutor(_REQUESTS) as pool:
        sizes = list(pool.map(lambda name: _size(lambda size: reaches(name, size)), asked))
    return sum(sizes) * len(names) // max(len(asked), 1)


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
