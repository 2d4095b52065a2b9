"""Fingerprint of data, to recognise other data of the same size at a bounded cost.

It covers the number of files, their names and sizes, and :data:`SAMPLE_BYTES` of their contents: all bytes up
to that size, beyond it evenly spaced blocks, the first and the last byte included. A change between two
blocks that keeps the size of its file is not noticed. Names are relative to the data's folder and times do
not count, so data may be copied and moved.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from systolic.core.errors import DataError
from systolic.core.units import gibibytes
from systolic.job.data import Contents, Data, Split

if TYPE_CHECKING:
    import numpy as np

SAMPLE_BYTES = 1 << 26
"""Bytes of contents that are read; 64 MiB take about a tenth of a second from memory."""

BLOCK_BYTES = 1 << 16
"""Size of a block where only a sample is read."""

MOST_FILES = 1 << 17
"""Files whose sizes and contents count, evenly spaced if there are more: each costs a call to the file system. All names count."""

_DIGITS = 16


def of_files(root: Path, files: Sequence[Path]) -> Contents | None:
    """Fingerprint of files; ``None`` if there are none.

    Args:
        root: Folder that names are relative to.
        files: Files below it, in reading order.

    Raises:
        DataError: one of them cannot be read.
    """
    if not files:
        return None
    names = _digest(path.relative_to(root).as_posix() for path in files)
    looked = [files[at] for at in _spread(len(files), MOST_FILES)]
    try:
        sizes = [path.stat().st_size for path in looked]
        taken = _sampled(looked, sizes)
    except OSError as error:
        raise DataError(
            f"{error.filename} can't be read ({error.strerror}); check the path"
        ) from error
    return Contents(
        where=str(files[0] if len(files) == 1 else root),
        files=len(files),
        bytes=sum(sizes),
        names=names,
        digest=_digest([*map(str, sizes), taken]),
    )


def of_arrays(where: str, arrays: "Mapping[str, np.ndarray]") -> Contents | None:
    """Fingerprint of arrays: names, shapes, dtypes and a sample of their bytes."""
    import numpy as np

    if not arrays:
        return None
    hashed = hashlib.sha256()
    share = max(1, SAMPLE_BYTES // BLOCK_BYTES // len(arrays))
    for name in sorted(arrays):
        flat = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        for start, stop in _blocks(len(flat), share * BLOCK_BYTES):
            hashed.update(flat[start:stop].tobytes())
    kinds = [f"{name} {arrays[name].dtype}{arrays[name].shape}" for name in sorted(arrays)]
    return Contents(
        where=where,
        files=len(arrays),
        bytes=sum(array.nbytes for array in arrays.values()),
        names=_digest(kinds),
        digest=hashed.hexdigest()[:_DIGITS],
        arrays=tuple(
            f"{name} {arrays[name].dtype}{list(arrays[name].shape)}" for name in sorted(arrays)
        ),
    )


def contents_of(data: Data) -> dict[str, Contents]:
    """Split to fingerprint of its data, for the splits with data of their own."""
    by_split = {split.value: data.contents(split) for split in Split}
    return {name: contents for name, contents in by_split.items() if contents is not None}


def shared(files: Iterable[Path], others: Iterable[Path]) -> list[Path]:
    """Files with the contents of one of the others, whatever their names; empty ones have none.

    Raises:
        DataError: one of them cannot be read.
    """
    try:
        by_size, copies = _by_size(others), []
        for size, own in _by_size(files).items():
            known = {_whole(file) for file in by_size.get(size, ())}
            copies += [file for file in own if known and _whole(file) in known]
    except OSError as error:
        raise DataError(
            f"{error.filename} can't be read ({error.strerror}); check the path"
        ) from error
    return copies


def _by_size(files: Iterable[Path]) -> dict[int, list[Path]]:
    by_size: dict[int, list[Path]] = {}
    for file in files:
        if size := file.stat().st_size:
            by_size.setdefault(size, []).append(file)
    return by_size


def _whole(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def difference(before: Contents, now: Contents) -> str | None:
    """Describes the difference in a few words; ``None`` if there is none."""
    if before.files != now.files:
        return f"{now.files} files, {before.files} before"
    if before.names != now.names and before.arrays and now.arrays:
        changed = [text for text in now.arrays if text not in before.arrays]
        gone = [text for text in before.arrays if text not in now.arrays]
        return f"{' and '.join(changed)}, before {' and '.join(gone)}"
    if before.names != now.names:
        return "arrays of other names, types or shapes" if now.arrays else "other names"
    if before.bytes != now.bytes:
        return f"{now.bytes} bytes, {before.bytes} before"
    if before.digest != now.digest:
        how = (
            "compared whole"
            if now.bytes <= SAMPLE_BYTES
            else f"compared at {gibibytes(SAMPLE_BYTES)} of them"
        )
        return f"as many bytes ({now.bytes}) with other contents, {how}"
    return None


def _sampled(files: Sequence[Path], sizes: Sequence[int]) -> str:
    """Digest of the sampled bytes of all files, concatenated."""
    hashed = hashlib.sha256()
    blocks = _blocks(sum(sizes), SAMPLE_BYTES)
    number, begins = 0, 0
    for start, stop in blocks:
        while start < stop:
            while start >= begins + sizes[number]:
                begins += sizes[number]
                number += 1
            upto = min(stop, begins + sizes[number])
            with files[number].open("rb") as opened:
                opened.seek(start - begins)
                hashed.update(opened.read(upto - start))
            start = upto
    return hashed.hexdigest()


def _blocks(size: int, most: int) -> list[tuple[int, int]]:
    """Ranges that cover ``size`` bytes, or ``most`` of them evenly spaced."""
    if size <= most:
        return [(start, min(start + most, size)) for start in range(0, size, most)]
    count = most // BLOCK_BYTES
    last = size - BLOCK_BYTES
    starts = [last * number // max(count - 1, 1) for number in range(count)]
    return [(start, start + BLOCK_BYTES) for start in starts]


def _spread(count: int, most: int) -> Sequence[int]:
    """Numbers below ``count``: all, or ``most`` of them evenly spaced."""
    if count <= most:
        return range(count)
    return [(count - 1) * number // (most - 1) for number in range(most)]


def _digest(texts: Iterable[str]) -> str:
    hashed = hashlib.sha256()
    for text in texts:
        hashed.update(text.encode(errors="surrogateescape") + b"\0")
    return hashed.hexdigest()[:_DIGITS]
