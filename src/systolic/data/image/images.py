"""Folders of pictures, one folder a class, plain or packed into ArrayRecord files."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import as_paths, nearest_file, write_json
from systolic.core.ranges import Range, check
from systolic.data.image.pictures import Augmentation, Preparation
from systolic.job import Data, Field, Read, Split
from systolic.job.data import Batches, Contents, OnError

if TYPE_CHECKING:
    import numpy as np

INDEX = "images.json"
"""The file that marks a packed set: {"labels": [name], "splits": {split: num_examples}}."""

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"))
"""Suffixes of pictures, in any case."""

FOLDERS = {
    Split.train: ("train",),
    Split.validation: ("val", "validation", "valid"),
    Split.test: ("test",),
}
"""Names of the folders that hold a split."""


class Listing(NamedTuple):
    """The pictures of one split, in an order that does not depend on the disk."""

    files: tuple[str, ...]
    labels: "np.ndarray"
    """int32[files]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Images(Data):
    """Pictures under ``path``: image uint8[side, side, channels] and label int32[].

    ``path`` holds one folder a class, or folders ``train`` and maybe ``val`` and ``test`` of such,
    or what ``systolic data pack`` made of either. Without split folders every class is split into
    training, validation and test; a ``train`` without ``val`` gives up its share for validation.
    Training shows a random part of a picture, changed as ``augmentation`` says; evaluation shows the
    centre.
    """

    path: Path | None
    """None where only shapes are needed, as for a forecast."""
    side: Annotated[int, Range(least=1, most=2**14)] = 224
    """Height and width after cropping and resizing."""
    channels: Annotated[int, Range(least=1, most=3)] = 3
    """3, or 1 for grey."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    """Augmentation of training examples."""
    held_out: Annotated[float, Range(least=0, below=0.5)] = 0.1
    """Share of each class for a split (validation, test) that has no folder of its own."""
    on_error: OnError = OnError.skip
    """Handling of a damaged picture."""
    classes: tuple[str, ...] = ()
    """The classes in label order; () takes the folders that hold pictures."""
    whole: bool = False
    """Whether all pictures are in the validation split."""
    preparation: Preparation | None = None
    """Resize and cut of pictures that are not augmented; None takes the centre as for models of our own."""

    def __post_init__(self) -> None:
        as_paths(self, "path")
        check(self)

    def fields(self) -> Mapping[str, Field]:
        """image and label."""
        return {
            "image": Field(shape=(self.side, self.side, self.channels), dtype="uint8"),
            "label": Field(shape=(), dtype="int32"),
        }

    def missing(self) -> str:
        """See :class:`Data`."""
        if self.path is not None:
            return ""
        return "image is given no pictures, which only a forecast does without; add --path with a folder that has one folder of pictures a class"

    @property
    def folder(self) -> Path:
        """The path.

        Raises:
            OptionError: there is none.
        """
        if self.path is None:
            raise OptionError(self.missing())
        return self.path

    def notes(self) -> tuple[str, ...]:
        """Class folders without a picture."""
        if _index(self.folder):
            return ()
        root = _layout(self.folder)[0]
        return tuple(
            f"{root / name} has no picture ({', '.join(sorted(SUFFIXES))}) and is no class"
            for name in _folders(root)
            if not _holds_pictures(root / name)
        )

    def labels(self) -> tuple[str, ...]:
        """The classes given, or the names of the class folders, sorted; a folder without a picture is no class.

        Raises:
            NotFoundError: no such folder.
            DataError: no class in it.
        """
        if self.classes:
            return self.classes
        packed = _index(self.folder)
        return tuple(packed["labels"]) if packed else _classes(_layout(self.folder)[0])

    def size(self, split: Split) -> int:
        """Pictures in a split."""
        packed = _index(self.folder)
        if packed:
            return packed["splits"].get(split.value, 0)
        return len(self.listing(split).files)

    def with_labels(self, labels: tuple[str, ...]) -> "Images":
        """See :class:`Data`."""
        return replace(self, classes=labels)

    def at(self, path: Path) -> "Images":
        """See :class:`Data`; class folders have the names of the training classes.

        Raises:
            DataError: it is packed, or has folders of splits.
        """
        if _index(path) is not None:
            raise DataError(
                f"--path {path} is packed; give the folder of pictures that it was packed from"
            )
        root, own = _layout(path)
        if root != path or own:
            raise DataError(
                f"--path {path} has folders of splits; give one of them, such as {root}"
            )
        return replace(self, path=path, classes=self.labels(), whole=True)

    def listing(self, split: Split) -> Listing:
        """The pictures of a split of a plain folder."""
        if not self.whole:
            return listing(self.folder, self.held_out, split, self.classes)
        if split is not Split.validation:
            return _nothing()
        return _scan(_layout(self.folder)[0], self.labels())

    def contents(self, split: Split) -> Contents | None:
        """Fingerprint of the split's pictures."""
        from systolic.data.fingerprint import of_files

        packed = _index(self.folder)
        if packed is not None and split.value not in packed["splits"]:
            return None
        index = [] if packed is None else [self.folder / INDEX]
        return of_files(self.folder, [*index, *self.files(split)])

    def files(self, split: Split) -> Sequence[Path]:
        """See :class:`Data`."""
        if _index(self.folder) is not None:
            return [self.folder / f"{split.value}.array_record"]
        return [Path(file) for file in self.listing(split).files]

    def lasting(self) -> frozenset[str]:
        """The held-out share, and the size of pictures."""
        return frozenset(("held_out", "side", "channels"))

    def open(self, read: Read) -> Batches:
        """Batches of a split; training pictures are cropped and changed at random when shuffled.

        Raises:
            NotFoundError: no such folder.
            DataError: no picture in the split, or a damaged one (when its batch is read).
            MissingExtraError: Pillow is not installed.
        """
        import importlib.util

        from systolic.core.errors import MissingExtraError
        from systolic.data.image.tables import Crops, Decoded, PackedPictures, PictureFiles
        from systolic.data.random_access import open_table

        if importlib.util.find_spec("PIL") is None:
            raise MissingExtraError("reading pictures", "image")
        packed = _index(self.folder)
        if packed:
            source = PackedPictures(
                str(self.folder / f"{read.split.value}.array_record"), self.size(read.split)
            )
        else:
            source = PictureFiles(*self.listing(read.split))
        crops = Crops(
            side=self.side,
            channels=self.channels,
            seed=read.seed,
            augmentation=self.augmentation if read.split is Split.train and read.shuffle else None,
            preparation=self.preparation,
        )
        return open_table(
            Decoded(source, crops, self.on_error), read, self.fields(), fill={"label": -1}
        )

    def load(self, path: Path) -> dict[str, Any]:
        """A picture or a .npy array as image uint8[side, side, channels], cropped as in evaluation."""
        from systolic.data.image.pictures import EVALUATION_SHARE
        from systolic.data.image.tables import read_picture

        if self.preparation is not None and path.suffix != ".npy":
            if not path.is_file():
                raise NotFoundError(
                    f"{path} is not a file{nearest_file(path)}; give a picture (.png, .jpg)"
                )
            return {"image": self.preparation.apply(path, self.channels)}
        return {"image": read_picture(path, self.side, self.channels, EVALUATION_SHARE)}

    def read(self, content: bytes, name: str) -> dict[str, Any]:
        """A picture's content as image uint8[side, side, channels], cropped as in evaluation."""
        from systolic.data.image.pictures import EVALUATION_SHARE, centre, decode

        if self.preparation is not None:
            return {"image": self.preparation.apply(content, self.channels, name)}
        image = centre(decode(content, name), self.side, self.channels, EVALUATION_SHARE, name)
        return {"image": image}


def _nothing() -> Listing:
    import numpy as np

    return Listing((), np.zeros(0, np.int32))


def listing(path: Path, held_out: float, split: Split, classes: tuple[str, ...] = ()) -> Listing:
    """The pictures of a split of the folder ``path``, empty when it has none.

    Raises:
        NotFoundError: no such folder.
        DataError: no class in it, or a split with a class that training lacks.
    """
    from systolic.data.image.tables import hold_out

    root, own = _layout(path)
    classes = classes or _classes(root)
    if split in own:
        return _scan(own[split], classes)
    shared = [s for s in (Split.validation, Split.test) if s not in own]
    if root != path:
        # With a train folder, test pictures are given or there are none.
        shared = [s for s in shared if s is not Split.test]
    if split is not Split.train and split not in shared:
        return _nothing()
    files, labels = _scan(root, classes)
    parts = hold_out(labels, (held_out,) * len(shared))
    part = parts[0 if split is Split.train else 1 + shared.index(split)]
    return Listing(tuple(files[index] for index in part), labels[part])


def pack(
    images: Images, out: Path, tell: Callable[[str, int], None] | None = None
) -> dict[str, int]:
    """Writes the splits of a folder as ``out/SPLIT.array_record``; picture files are kept byte for byte.

    Args:
        images: says the folder and how it is split.
        out: a folder, made if need be.
        tell: called with a split's name and the pictures written so far.

    Returns:
        Pictures written per split.

    Raises:
        DataError: the folder is packed already, or has no picture.
        NotFoundError: no such folder.
        RunError: ``out`` can't be written.
    """
    import msgspec
    from array_record.python.array_record_module import ArrayRecordWriter  # ty: ignore[import-not-found]

    if _index(images.folder):
        raise DataError(f"{images.folder} is packed already; give a folder of pictures")
    labels, splits = images.labels(), {}
    for split in Split:
        files, classes = listing(images.folder, images.held_out, split)
        if not files:
            continue
        out.mkdir(parents=True, exist_ok=True)
        # One record a group, so that any picture is read without its neighbours.
        writer = ArrayRecordWriter(str(out / f"{split.value}.array_record"), "group_size:1")
        for number, (file, label) in enumerate(zip(files, classes, strict=True)):
            record = {"label": int(label), "name": file, "image": Path(file).read_bytes()}
            writer.write(msgspec.msgpack.encode(record))
            if tell and (number + 1) % 1000 == 0:
                tell(split.value, number + 1)
        writer.close()
        splits[split.value] = len(files)
    if not splits:
        raise DataError(f"{images.folder} has no picture in its class folders; nothing was packed")
    # The index comes last: a set without one is not taken for whole.
    write_json(out / INDEX, {"labels": list(labels), "splits": splits})
    return splits


def _index(path: Path) -> dict[str, Any] | None:
    """The index of a packed set, ``None`` for a plain folder."""
    file = path / INDEX
    return json.loads(file.read_text()) if file.is_file() else None


def _layout(path: Path) -> tuple[Path, dict[Split, Path]]:
    """The folder of the training classes, and the folders of the other splits that have one."""
    if not path.is_dir():
        raise NotFoundError(f"{path} is not a folder; give one with a folder of pictures per class")
    folders = {
        split: path / name
        for split, names in FOLDERS.items()
        for name in reversed(names)
        if (path / name).is_dir()
    }
    # Without train/, a folder named test is a class like any other.
    root = folders.pop(Split.train, None)
    return (path, {}) if root is None else (root, folders)


def _folders(root: Path) -> list[str]:
    return sorted(e.name for e in root.iterdir() if e.is_dir() and not e.name.startswith("."))


def _classes(root: Path) -> tuple[str, ...]:
    folders = _folders(root)
    if not folders:
        raise DataError(f"{root} has no folders; it needs one folder of pictures per class")
    names = tuple(name for name in folders if _holds_pictures(root / name))
    if not names:
        raise DataError(
            f"{root} has no picture in any of its folders ({', '.join(folders[:5])}); put pictures into one folder per class"
        )
    return names


def _holds_pictures(folder: Path) -> bool:
    return any(file.suffix.lower() in SUFFIXES for file in folder.iterdir())


def _scan(root: Path, classes: tuple[str, ...]) -> Listing:
    """All pictures in the class folders of ``root``, sorted by class and name."""
    extra = [
        name for name in _folders(root) if name not in classes and _holds_pictures(root / name)
    ]
    if extra:
        raise DataError(
            f"{root} has a class {extra[0]!r} that training does not; remove it or add it to both"
        )
    changed = tuple(_changed_ns(root / name) for name in classes)
    return _scan_again(root, classes, changed)


@lru_cache(maxsize=8)
def _scan_again(root: Path, classes: tuple[str, ...], changed_ns: tuple[int, ...]) -> Listing:
    """Reads the folders; ``changed_ns`` makes a changed folder be read anew."""
    import numpy as np

    files: list[str] = []
    labels: list[int] = []
    for label, (name, time_ns) in enumerate(zip(classes, changed_ns, strict=True)):
        if time_ns:
            pictures = sorted(
                str(file) for file in (root / name).iterdir() if file.suffix.lower() in SUFFIXES
            )
            files += pictures
            labels += [label] * len(pictures)
    return Listing(tuple(files), np.array(labels, np.int32))


def _changed_ns(folder: Path) -> int:
    """Time of a folder's last change, 0 if absent (a class without pictures in this split)."""
    return folder.stat().st_mtime_ns if folder.is_dir() else 0
