"""The table of pictures that are decoded when they are needed."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from systolic.core.errors import DataError, NotFoundError
from systolic.data.pictures import EVALUATION_SHARE, centre, crop, decode, random_box, upright
from systolic.data.shuffle import uniform
from systolic.data.table import Picks, Table


class Picture(NamedTuple):
    """One encoded picture."""

    content: bytes
    label: int
    name: str
    """What an error message calls it."""


class Source(ABC):
    """Encoded pictures by number; can be pickled for worker processes."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def get(self, indices: np.ndarray) -> list[Picture]:
        """The pictures with these numbers int64[n]."""


class Files(Source):
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
            raise DataError(
                f"{name} can't be read ({error.strerror}); put it back or start anew without it"
            ) from error


class Records(Source):
    """A split that :func:`systolic.data.images.pack` wrote."""

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
    """What is cut out of each picture."""

    side: int
    channels: int
    seed: int
    least: float | None
    """The smallest share of the area of a random part; ``None`` takes the centre."""
    flip: bool

    def apply(self, picture: Picture, chance: np.ndarray) -> np.ndarray:
        """uint8[side, side, channels]; ``chance`` f64[5] decides about random parts."""
        image = decode(picture.content, picture.name)
        if self.least is None:
            return centre(image, self.side, self.channels, EVALUATION_SHARE, picture.name)
        box = random_box(*upright(image, picture.name), self.least, chance)
        pixels = crop(image, box, self.side, self.channels, picture.name)
        return pixels[:, ::-1] if self.flip and chance[4] < 0.5 else pixels


class Decoded(Table):
    """Pictures decoded and cropped as they are taken; random parts depend on the stream position only."""

    def __init__(self, source: Source, crops: Crops) -> None:
        self._source, self._crops = source, crops

    def __len__(self) -> int:
        return len(self._source)

    def take(self, picks: Picks) -> dict[str, np.ndarray]:
        """image uint8[n, side, side, channels] and label int32[n]."""
        chances = uniform(self._crops.seed, picks.positions, 5)
        pictures = self._source.get(picks.indices)
        images = [
            self._crops.apply(picture, chance)
            for picture, chance in zip(pictures, chances, strict=True)
        ]
        return {
            "image": np.stack(images),
            "label": np.array([picture.label for picture in pictures], np.int32),
        }
