"""Tables of pictures: decoded on access, or small and in memory, shifted and mirrored at random while training."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import nearest_file
from systolic.data.image.pictures import (
    CHANCES,
    EVALUATION_SHARE,
    Augmentation,
    Preparation,
    centre,
    crop,
    decode,
    random_box,
    upright,
)
from systolic.data.input_files import SIDE, pack
from systolic.data.random_access import Picks, Table, uniform
from systolic.job.data import MASK, OnError

MANY = 8
"""Unreadable pictures of one batch without a readable one that count as a failure of all."""


class Picture(NamedTuple):
    """One encoded picture."""

    content: bytes
    label: int
    name: str
    """Name for error messages."""
    error: DataError | None = None
    """Reason why there is no content."""


class PictureSource(ABC):
    """Encoded pictures by number; can be pickled for worker processes."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of pictures."""

    @abstractmethod
    def get(self, indices: np.ndarray) -> list[Picture]:
        """The pictures with these numbers int64[n]; one whose file can't be read holds the error."""


class PictureFiles(PictureSource):
    """Picture files."""

    def __init__(self, files: tuple[str, ...], labels: np.ndarray) -> None:
        self._files, self._labels = files, labels

    def __len__(self) -> int:
        return len(self._files)

    def get(self, indices: np.ndarray) -> list[Picture]:
        """Reads the files."""
        return [self._read(int(index)) for index in indices]

    def _read(self, index: int) -> Picture:
        name = self._files[index]
        try:
            with open(name, "rb") as file:
                return Picture(file.read(), int(self._labels[index]), name)
        except OSError as error:
            reason = DataError(
                f"{name} can't be read ({error.strerror}); restore it, or start a new run without it"
            )
            return Picture(b"", int(self._labels[index]), name, reason)


class PackedPictures(PictureSource):
    """A split that :func:`systolic.data.image.images.pack` wrote."""

    def __init__(self, path: str, count: int) -> None:
        self._path, self._count, self._reader = path, count, None

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> tuple[str, int]:
        # A worker process opens the file itself.
        return (self._path, self._count)

    def __setstate__(self, state: tuple[str, int]) -> None:
        self.__init__(*state)

    def get(self, indices: np.ndarray) -> list[Picture]:
        """Reads the records."""
        import msgspec

        records = self._open().__getitems__([int(index) for index in indices])
        unpacked = [msgspec.msgpack.decode(record) for record in records]
        return [Picture(r["image"], r["label"], f"{r['name']} in {self._path}") for r in unpacked]

    def _open(self) -> Any:
        if self._reader is None:
            from array_record.python.array_record_data_source import ArrayRecordDataSource

            try:
                reader = ArrayRecordDataSource(self._path)
            except (OSError, ValueError, RuntimeError) as error:
                raise NotFoundError(
                    f"{self._path} can't be read; pack the pictures again"
                ) from error
            if len(reader) != self._count:
                raise DataError(
                    f"{self._path} has {len(reader)} pictures but its index says {self._count}; pack them again"
                )
            self._reader = reader
        return self._reader


class Crops(NamedTuple):
    """Crops of pictures."""

    side: int
    channels: int
    seed: int
    augmentation: Augmentation | None
    """Augmentation; ``None`` takes the centre crop."""
    preparation: Preparation | None = None
    """Replaces the centre crop."""

    def apply(self, picture: Picture, chance: np.ndarray) -> np.ndarray:
        """uint8[side, side, channels]; ``chance`` f64[CHANCES] drives crops and changes.

        Raises:
            DataError: the picture can't be read.
        """
        if picture.error is not None:
            raise picture.error
        if self.augmentation is None and self.preparation is not None:
            return self.preparation.apply(picture.content, self.channels, picture.name)
        image = decode(picture.content, picture.name)
        if self.augmentation is None:
            return centre(image, self.side, self.channels, EVALUATION_SHARE, picture.name)
        box = random_box(*upright(image, picture.name), self.augmentation.crop, chance)
        pixels = crop(image, box, self.side, self.channels, picture.name)
        return self.augmentation.apply(pixels, chance)


class Decoded(Table):
    """Pictures decoded and cropped on access; random crops depend on the stream position alone."""

    def __init__(self, source: PictureSource, crops: Crops, on_error: OnError) -> None:
        self._source, self._crops, self._on_error = source, crops, on_error

    def __len__(self) -> int:
        return len(self._source)

    def take(self, picks: Picks) -> dict[str, np.ndarray]:
        """image uint8[n, side, side, channels] and label int32[n]; mask f32[n] and names where some can't be read.

        Raises:
            DataError: a damaged picture under the rule ``stop``, or under ``skip`` nothing but such.
        """
        chances = uniform(self._crops.seed, picks.positions, CHANCES)
        pictures = self._source.get(picks.indices)
        images: list[np.ndarray | None] = []
        reasons: list[str] = []
        for picture, chance in zip(pictures, chances, strict=True):
            try:
                images.append(self._crops.apply(picture, chance))
            except DataError as error:
                if self._on_error is OnError.stop:
                    raise
                images.append(None)
                reasons.append(str(error))
        labels = np.array([picture.label for picture in pictures], np.int32)
        if not reasons:
            return {
                "image": np.stack([image for image in images if image is not None]),
                "label": labels,
            }
        return {"image": self._filled(images, reasons), "label": labels} | {
            MASK: np.array([image is not None for image in images], np.float32),
            SIDE: pack(reasons),
        }

    def _filled(self, images: list[np.ndarray | None], reasons: list[str]) -> np.ndarray:
        """uint8[n, side, side, channels] with a picture of the batch, which counts once, where one is missing.

        Statistics of the batch, as batch norm takes them, are then those of pictures.
        """
        good = [image for image in images if image is not None]
        if not good and len(images) >= MANY:
            raise DataError(
                f"none of {len(images)} pictures in a row can be read; the first: {reasons[0]}"
            )
        side, channels = self._crops.side, self._crops.channels
        spare = good[0] if good else np.zeros((side, side, channels), np.uint8)
        return np.stack([spare if image is None else image for image in images])


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
