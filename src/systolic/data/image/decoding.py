"""Tables of pictures that are decoded on access."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from systolic.core.errors import DataError, NotFoundError
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
