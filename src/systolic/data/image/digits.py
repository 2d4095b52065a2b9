"""The 1797 handwritten digits of 8 x 8 pixels in scikit-learn (Alpaydin and Kaynak 1998)."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.core.errors import MissingExtraError
from systolic.core.ranges import NOT_NEGATIVE, check
from systolic.job import Data, Field, Read, Split
from systolic.job.data import Batches

if TYPE_CHECKING:
    import numpy as np


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
            MissingExtraError: scikit-learn is not installed.
        """
        from systolic.data.image.small_images import SmallImages
        from systolic.data.random_access import open_table

        images, labels = _splits()[read.split]
        changed = read.split is Split.train and read.shuffle
        table = SmallImages(images, labels, seed=read.seed, shift=self.shift if changed else 0)
        return open_table(table, read, self.fields(), fill={"label": -1})

    def load(self, path: Path) -> dict[str, Any]:
        """A picture (a light digit on dark ground) as image uint8[8, 8, 1]."""
        from systolic.data.image.small_images import read_picture

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

    from systolic.data.image.small_images import hold_out

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
        raise MissingExtraError("the pictures of digits", package="scikit-learn")
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
