"""Small images in memory, shifted and mirrored at random while training.

The 1797 handwritten digits of 8 x 8 pixels in scikit-learn (Alpaydin and Kaynak 1998).
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import nearest_file
from systolic.core.ranges import NOT_NEGATIVE, check
from systolic.data.random_access import Picks, Table, uniform
from systolic.job import Data, Field, Read, Split
from systolic.job.data import Batches

if TYPE_CHECKING:
    import numpy as np


class SmallImages(Table):
    """Images and labels; one gather picks, shifts and mirrors a whole batch.

    Changes depend on ``seed`` and an example's position in the stream only, so a resumed stream is
    the same stream.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        seed: int,
        shift: int = 0,
        flip: bool = False,
    ) -> None:
        """images uint8[n, height, width, channels], labels int32[n].

        ``shift`` is the most pixels an image moves along each dim (zeros come in), ``flip``
        mirrors every other image left to right.
        """
        self._size = images.shape[1:3]
        margin = ((0, 0), (shift, shift), (shift, shift), (0, 0))
        self._images = np.pad(images, margin) if shift else images
        self._labels, self._seed, self._shift, self._flip = labels, seed, shift, flip

    def __len__(self) -> int:
        return len(self._labels)

    def take(self, picks: Picks) -> dict[str, np.ndarray]:
        """image uint8[n, height, width, channels] and label int32[n]."""
        labels = self._labels[picks.indices]
        if not self._shift and not self._flip:
            return {"image": self._images[picks.indices], "label": labels}
        chance = uniform(self._seed, picks.positions, 3)
        moves = (chance[:, :2] * (2 * self._shift + 1)).astype(np.int64)
        rows = np.arange(self._size[0]) + moves[:, :1]
        columns = np.arange(self._size[1])[None, :].repeat(len(rows), axis=0)
        if self._flip:
            columns = np.where(chance[:, 2:] < 0.5, columns[:, ::-1], columns)
        columns = columns + moves[:, 1:2]
        index = picks.indices[:, None, None]
        return {
            "image": self._images[index, rows[:, :, None], columns[:, None, :]],
            "label": labels,
        }


def hold_out(labels: np.ndarray, shares: tuple[float, ...]) -> list[np.ndarray]:
    """Splits examples with every class in the same shares, identically on every machine.

    Args:
        labels: integers[n].
        shares: of each part but the first, which gets the rest.

    Returns:
        int64[...] for each part: the rest, then one for each share; sorted, disjoint, together all.
    """
    parts: list[list[np.ndarray]] = [[] for _ in range(len(shares) + 1)]
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(uniform(int(label), members, 1)[:, 0], kind="stable")]
        start = 0
        for part, share in zip(parts[1:], shares, strict=True):
            count = round(len(members) * share)
            part.append(members[start : start + count])
            start += count
        parts[0].append(members[start:])
    return [np.sort(np.concatenate(part)) if part else np.zeros(0, np.int64) for part in parts]


def read_picture(path: Path, size: int, channels: int, share: float = 1.0) -> np.ndarray:
    """A picture file (PNG, JPEG, ...) or a .npy array as uint8[size, size, channels].

    Pictures of another size are cropped to the centred square whose side is ``share`` of the
    shorter side, and resized.

    Raises:
        NotFoundError: there is no such file.
        DataError: it is not a picture, or an array of other numbers than bytes or 0 to 1.
        MissingExtraError: Pillow is not installed and the file needs it.
    """
    if not path.is_file():
        raise NotFoundError(
            f"{path} is not a file{nearest_file(path)}; give a picture (.png, .jpg) or a .npy array"
        )
    from systolic.data.image.pictures import as_image, centre, decode

    if path.suffix != ".npy":
        return centre(decode(path), size, channels, share, str(path))
    array = _bytes(path)
    if array.shape == (size, size, channels):
        return array
    return centre(as_image(array), size, channels, share, str(path))


def _bytes(path: Path) -> np.ndarray:
    """uint8[height, width, channels] of a .npy file."""
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(
            f"{path} is not a .npy array of numbers; write it with numpy.save"
        ) from error
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3) or 0 in array.shape:
        raise DataError(
            f"{path} has shape {array.shape}; a picture is [height, width] or [height, width, 1 or 3]"
        )
    if array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1:
        array = np.round(array * 255)
    elif array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
        raise DataError(
            f"{path} holds {array.dtype} from {array.min():g} to {array.max():g}; give bytes 0 to 255 or floats 0 to 1"
        )
    return array.astype(np.uint8)


SIZE = 8
"""Pixels on a side."""

BRIGHTEST = 16
"""The largest value of a pixel in scikit-learn's arrays; here it is 255."""

HELD_OUT = {Split.validation: 0.1, Split.test: 0.2}
"""Share of each class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Digits(Data):
    """Image uint8[8, 8, 1] and label int32[], 0 to 9; every class is split 70 : 10 : 20."""

    shift: Annotated[int, NOT_NEGATIVE] = 1
    """Most pixels to move a training image along each dim."""

    def __post_init__(self) -> None:
        check(self)

    def fields(self) -> Mapping[str, Field]:
        """image and label."""
        return {
            "image": Field(shape=(SIZE, SIZE, 1), dtype="uint8"),
            "label": Field(shape=(), dtype="int32"),
        }

    def size(self, split: Split) -> int:
        """Examples in a split."""
        return len(_splits()[split][1])

    def open(self, read: Read) -> Batches:
        """Batches of a split; training images are moved when they are shuffled.

        Raises:
            NotFoundError: scikit-learn is not installed.
        """
        from systolic.data.random_access import open_table

        images, labels = _splits()[read.split]
        changed = read.split is Split.train and read.shuffle
        table = SmallImages(images, labels, seed=read.seed, shift=self.shift if changed else 0)
        return open_table(table, read, self.fields(), fill={"label": -1})

    def load(self, path: Path) -> dict[str, Any]:
        """A picture (a light digit on dark ground) as image uint8[8, 8, 1]."""

        return {"image": read_picture(path, SIZE, 1)}

    def read(self, content: bytes, name: str) -> dict[str, Any]:
        """The same of a picture's content."""
        from systolic.data.image.pictures import centre, decode

        return {"image": centre(decode(content, name), SIZE, 1, name=name)}

    def labels(self) -> tuple[str, ...]:
        """0 to 9."""
        return tuple("0123456789")


@lru_cache(maxsize=1)
def _splits() -> "dict[Split, tuple[np.ndarray, np.ndarray]]":
    """Split to images uint8[n, 8, 8, 1] and labels int32[n]."""
    import numpy as np

    table = np.loadtxt(_file(), delimiter=",", dtype=np.float32)
    pixels, labels = table[:, :-1], table[:, -1].astype(np.int32)
    images = np.round(pixels * (255 / BRIGHTEST)).astype(np.uint8).reshape(-1, SIZE, SIZE, 1)
    parts = hold_out(labels, tuple(HELD_OUT.values()))
    names = (Split.train, *HELD_OUT)
    return {name: (images[part], labels[part]) for name, part in zip(names, parts, strict=True)}


def _file() -> Path:
    """scikit-learn's own table; importing the library to read it takes seconds, for it loads SciPy."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise NotFoundError(
            "scikit-learn, whose digits these are, is not installed: pip install scikit-learn"
        )
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
