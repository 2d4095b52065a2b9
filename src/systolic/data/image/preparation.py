"""Pictures as an imported model wants them: resized and cut as the processor that came with it does."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from systolic.core.ranges import COUNT, check
from systolic.data.image.pictures import decode, plain, readable

if TYPE_CHECKING:
    from PIL.Image import Image


class Resample(enum.Enum):
    """Filter of a resize, by Pillow's names."""

    nearest = "nearest"
    bilinear = "bilinear"
    bicubic = "bicubic"
    lanczos = "lanczos"
    box = "box"
    hamming = "hamming"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """A resize and a cut from the centre, either or none.

    Pixels are those of transformers' processors, which resize with Pillow, too, and round to bytes.
    """

    side: Annotated[int, COUNT]
    """Height and width of the result."""
    shorter: Annotated[int | None, COUNT] = None
    """Length that the shorter edge is resized to; None resizes both edges to one length, whatever the shape."""
    both: Annotated[int | None, COUNT] = None
    """That length; None is ``side``."""
    resize: bool = True
    resample: Resample = Resample.bilinear

    def __post_init__(self) -> None:
        check(self)

    def apply(self, source: Path | bytes, channels: int, name: str = "") -> np.ndarray:
        """A picture file, or its content, as uint8[side, side, channels]; black where it is too small for the cut.

        Raises:
            DataError: it is not a picture, or damaged; the message calls it ``name``.
            MissingExtraError: Pillow is not installed.
        """
        name = name or str(source)
        image = decode(source, name)
        with readable(name):
            return self.cut(image, channels, name)

    def cut(self, image: "Image", channels: int, name: str = "a picture") -> np.ndarray:
        """An open picture as uint8[side, side, channels]; see :meth:`apply` for errors."""
        from PIL import Image, ImageOps

        image = plain(ImageOps.exif_transpose(image), channels, name)
        if self.resize:
            image = image.resize(
                self.size(image.size), Image.Resampling[self.resample.name.upper()]
            )
        if image.size != (self.side, self.side):
            left, top = (image.width - self.side) // 2, (image.height - self.side) // 2
            image = image.crop((left, top, left + self.side, top + self.side))
        return np.asarray(image, np.uint8).reshape(self.side, self.side, channels)

    def size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height after the resize of those before it."""
        if self.shorter is None:
            return self.both or self.side, self.both or self.side
        width, height = size
        if width <= height:
            return self.shorter, int(self.shorter * height / width)
        return int(self.shorter * width / height), self.shorter
