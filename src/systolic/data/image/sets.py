"""Image sets that machines have: scikit-learn's handwritten digits, and files in IDX, the format of MNIST and its successors."""

import gzip
import importlib.util
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.core.errors import DataError, MissingExtraError, NotFoundError
from systolic.core.files import as_paths
from systolic.core.ranges import COUNT, NOT_NEGATIVE, SHARE, check
from systolic.job import Data, Field, Read, Split
from systolic.job.data import Batches, Contents

if TYPE_CHECKING:
    import numpy as np


SIZE = 8
"""Pixels on a side."""


BRIGHTEST = 16
"""The largest value of a pixel in scikit-learn's arrays; here it is 255."""


HELD_OUT = {Split.validation: 0.1, Split.test: 0.2}
"""Share of each class."""
DEBIAN = Path("/usr/share/datasets")
"""Folder of Debian's packages named dataset-*."""
_BYTES = 8
_FILES = {Split.train: "train", Split.test: "t10k"}


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
        from systolic.data.image.tables import SmallImages
        from systolic.data.random_access import open_table

        images, labels = _splits()[read.split]
        changed = read.split is Split.train and read.shuffle
        table = SmallImages(images, labels, seed=read.seed, shift=self.shift if changed else 0)
        return open_table(table, read, self.fields(), fill={"label": -1})

    def load(self, path: Path) -> dict[str, Any]:
        """A picture (a light digit on dark ground) as image uint8[8, 8, 1]."""
        from systolic.data.image.tables import read_picture

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

    from systolic.data.image.tables import hold_out

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Idx(Data):
    """A folder with ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the same of ``t10k``.

    The files may be compressed (``.gz``). Image uint8[size, size, 1] and label int32[].
    """

    path: Path
    side: Annotated[int, COUNT] = 28
    """Height and width of the images; files of another size are refused."""
    held_out: Annotated[float, SHARE] = 1 / 12
    """Share of each class of the training files that becomes the validation split."""
    shift: Annotated[int, NOT_NEGATIVE] = 2
    """Most pixels to move a training image along each dim."""
    flip: bool = False
    """Mirror training images left to right at random."""
    names: tuple[str, ...] = tuple("0123456789")
    """The classes, in label order."""

    def __post_init__(self) -> None:
        as_paths(self, "path")
        check(self)

    def fields(self) -> Mapping[str, Field]:
        """image and label."""
        return {
            "image": Field(shape=(self.side, self.side, 1), dtype="uint8"),
            "label": Field(shape=(), dtype="int32"),
        }

    def size(self, split: Split) -> int:
        """Examples in a split."""
        return len(self._examples(split)[1])

    def contents(self, split: Split) -> Contents | None:
        """Fingerprint of the training files, which validation is split from, and of the test files."""
        from systolic.data.fingerprint import of_files

        if split not in _FILES:
            return None
        kinds = (("images", 3), ("labels", 1))
        return of_files(self.path, [_idx_file(self.path, _FILES[split], *kind) for kind in kinds])

    def lasting(self) -> frozenset[str]:
        """The held-out share, and the size of images."""
        return frozenset(("held_out", "side"))

    def open(self, read: Read) -> Batches:
        """Batches of a split; training images are moved and mirrored when they are shuffled.

        Raises:
            NotFoundError: no such folder, or no such file in it.
            DataError: a damaged file, or images or labels that are not as declared.
        """
        from systolic.data.image.tables import SmallImages
        from systolic.data.random_access import open_table

        images, labels = self._examples(read.split)
        changed = read.split is Split.train and read.shuffle
        table = SmallImages(
            images,
            labels,
            seed=read.seed,
            shift=self.shift if changed else 0,
            flip=changed and self.flip,
        )
        return open_table(table, read, self.fields(), fill={"label": -1})

    def load(self, path: Path) -> dict[str, Any]:
        """A picture (a light thing on dark ground) as image uint8[size, size, 1]."""
        from systolic.data.image.tables import read_picture

        return {"image": read_picture(path, self.side, 1)}

    def read(self, content: bytes, name: str) -> dict[str, Any]:
        """The same of a picture's content."""
        from systolic.data.image.pictures import centre, decode

        return {"image": centre(decode(content, name), self.side, 1, name=name)}

    def labels(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.names

    def _examples(self, split: Split) -> "tuple[np.ndarray, np.ndarray]":
        """Images uint8[n, size, size, 1] and labels int32[n]."""
        from systolic.data.image.tables import hold_out

        stem = _FILES.get(split, "train")
        images, labels = _pair(
            _idx_file(self.path, stem, "images", 3), _idx_file(self.path, stem, "labels", 1)
        )
        if images.shape[1:] != (self.side, self.side):
            raise DataError(
                f"{self.path} has images of {images.shape[1]} x {images.shape[2]} pixels, not {self.side} x {self.side}; set the data's side"
            )
        if len(labels) and labels.max() >= len(self.names):
            raise DataError(
                f"{self.path} has label {labels.max()} but the data names {len(self.names)} classes; name them all"
            )
        images, labels = images[..., None], labels.astype("int32")
        if split is Split.test:
            return images, labels
        part = hold_out(labels, (self.held_out,))[0 if split is Split.train else 1]
        return images[part], labels[part]


def read_idx(path: Path) -> "np.ndarray":
    """The bytes of one IDX file, compressed or not, as uint8 of the shape it declares.

    Raises:
        DataError: not an IDX file of bytes, or one that is cut off.
    """
    import numpy as np

    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be read ({error}); get the file again") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _BYTES or not content[3]:
        raise DataError(f"{path} is not an IDX file of bytes; it should start with 0 0 8")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{path} ends within its header; get the file again")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    values = np.frombuffer(content, np.uint8, offset=start)
    if len(values) != np.prod(shape, dtype=np.int64):
        raise DataError(
            f"{path} declares {' x '.join(map(str, shape))} bytes but holds {len(values)}; get the file again"
        )
    return values.reshape(shape)


def _idx_file(folder: Path, stem: str, kind: str, dims: int) -> Path:
    """The file of a split, whichever of the usual names it has."""
    names = [f"{stem}-{kind}{mark}idx{dims}-ubyte" for mark in "-."]
    for name in (*names, *(f"{name}.gz" for name in names)):
        if (folder / name).is_file():
            return folder / name
    if folder.is_dir():
        raise NotFoundError(
            f"{folder} has no {names[0]} or {names[0]}.gz; give the folder that holds the IDX files"
        )
    remedy = "give the folder that holds the IDX files"
    if folder.parent == DEBIAN:
        remedy = f"apt-get install dataset-{folder.name}, or {remedy}"
    raise NotFoundError(f"{folder} does not exist; {remedy}")


def _pair(images: Path, labels: Path) -> "tuple[np.ndarray, np.ndarray]":
    return _read_pair(images, labels, images.stat().st_mtime_ns, labels.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read_pair(
    images: Path, labels: Path, images_time_ns: int, labels_time_ns: int
) -> "tuple[np.ndarray, np.ndarray]":
    """Images uint8[n, height, width] and labels uint8[n]; read again when a file changed."""
    del images_time_ns, labels_time_ns
    pictures, classes = read_idx(images), read_idx(labels)
    if pictures.ndim != 3 or classes.ndim != 1:
        raise DataError(
            f"{images} has {pictures.ndim} dims and {labels} has {classes.ndim}; images have 3 and labels 1"
        )
    if len(pictures) != len(classes):
        raise DataError(
            f"{images} has {len(pictures)} images but {labels} has {len(classes)} labels; get both again"
        )
    return pictures, classes
