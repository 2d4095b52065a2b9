"""Picture files as arrays, with Pillow: decoding, resizing, the augmentation of training pictures, and the preprocessing that an imported model came with."""

import enum
import io
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np

from systolic.core.errors import DataError, extra
from systolic.core.ranges import COUNT, SHARE, Range, check

if TYPE_CHECKING:
    from PIL.Image import Image


EVALUATION_SHARE = 0.875
"""Side of the centre crop over the shorter side: 224 of 256, as ImageNet is usually evaluated."""

RATIO = 4 / 3
"""Most stretch of a training crop either way (Szegedy et al. 2015)."""

MOST_ASPECT = 100
"""Most of a picture's longer side over its shorter one: resized to a shorter side of 256 pixels it has 6.5 million; a PNG of 1 x 8000 and 4 KB took 10 seconds and 2 GB without it."""
_ORIENTATION = 0x0112
"""EXIF tag of a camera's orientation."""
SAFE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats of pictures from strangers: Pillow's readers of others start programs, or are rarely looked at."""
CHANCES = 13
"""Random numbers a picture: 5 for crop and mirroring, 3 for colours, 5 for erasing."""
ERASED_AREA = (0.02, 0.33)
"""Share of the picture's area, least and most (Zhong, Zheng, Kang, Li, Yang 2020, table 1)."""
ERASED_ASPECT = (0.3, 3.3)
"""Height over width of the erased rectangle, least and most; same source."""
LUMA = (0.299, 0.587, 0.114)
"""Grey from red, green and blue (ITU-R BT.601)."""


class Crop(NamedTuple):
    """Part of a picture, each number a share (0 to 1) of its width or height."""

    left: float
    top: float
    right: float
    bottom: float


def decode(source: Path | bytes, name: str = "") -> "Image":
    """Opens a picture; pixels are not read yet.

    Raises:
        DataError: not a picture that Pillow reads; the message names the file or ``name``.
        MissingExtraError: Pillow is not installed.
    """
    with extra("reading pictures", "image"):
        from PIL import Image
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
        return Image.open(io.BytesIO(content))
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{name or source} is not a picture that can be read; remove it or replace it"
        ) from error


def as_image(array: np.ndarray) -> "Image":
    """uint8[height, width, 1 or 3] as a Pillow image.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    with extra("resizing pictures", "image"):
        from PIL import Image
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def crop(
    image: "Image", box: Crop, size: int, channels: int, name: str = "a picture"
) -> np.ndarray:
    """The part ``box`` of a picture as uint8[size, size, channels].

    Raises:
        DataError: the file is damaged; the message calls it ``name``.
    """
    from PIL import Image, ImageOps

    mode = "L" if channels == 1 else "RGB"
    width, height = upright(image, name)
    with readable(name):
        scale = size / max(
            1.0, min((box.right - box.left) * width, (box.bottom - box.top) * height)
        )
        if scale < 1:
            # A JPEG is decoded at 1/2, 1/4 or 1/8 where that still has enough pixels.
            image.draft(mode, (int(image.width * scale) + 1, int(image.height * scale) + 1))
        image = ImageOps.exif_transpose(image)
        # Palettes and transparency can't be resized; they become plain colours first.
        image = plain(image, channels, name)
        width, height = image.size
        pixels = (box.left * width, box.top * height, box.right * width, box.bottom * height)
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=pixels)
    return np.asarray(image, np.uint8).reshape(size, size, channels)


def plain(image: "Image", channels: int, name: str = "a picture") -> "Image":
    """A picture with 8 bits a channel, ``L`` or ``RGB``: 16 bits are scaled, transparency lies on white.

    Pillow's own conversion turns 16 bits into white and shows what transparent pixels hide.

    Raises:
        DataError: its pixels are floats or 32-bit integers, whose range is not known.
    """
    from PIL import Image

    mode = "L" if channels == 1 else "RGB"
    if image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.float32)
        image = Image.fromarray(np.rint(values / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floats"
        raise DataError(
            f"{name} has pixels of {kind}, whose range is not known; save it with 8 or 16 bits a channel"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def upright(image: "Image", name: str = "a picture") -> tuple[int, int]:
    """Width and height as a viewer shows the picture; see :func:`crop` for errors."""
    with readable(name):
        turned = image.getexif().get(_ORIENTATION, 1) >= 5
    return (image.height, image.width) if turned else image.size


@contextmanager
def readable(name: str) -> Generator[None]:
    """Turns Pillow's errors about a damaged file into one that names it."""
    try:
        yield
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{name} is damaged ({error}); remove it or replace it") from error


def centre_box(width: int, height: int, share: float = 1.0) -> Crop:
    """The centred square whose side is ``share`` of the shorter side."""
    side = share * min(width, height)
    across, down = side / width / 2, side / height / 2
    return Crop(0.5 - across, 0.5 - down, 0.5 + across, 0.5 + down)


def random_box(width: int, height: int, least: float, chance: np.ndarray) -> Crop:
    """A random part of ``least`` to all of the area, stretched by up to RATIO.

    ``chance`` f64[4] in [0, 1): area, stretch, place across, place down. A part that would stick
    out is made narrower or lower, where others draw again.
    """
    area = (least + (1 - least) * chance[0]) * width * height
    stretch = RATIO ** (2 * chance[1] - 1)
    across = min(1.0, (area * stretch) ** 0.5 / width)
    down = min(1.0, (area / stretch) ** 0.5 / height)
    left, top = (1 - across) * chance[2], (1 - down) * chance[3]
    return Crop(left, top, left + across, top + down)


def centre(
    image: "Image", size: int, channels: int, share: float = 1.0, name: str = "a picture"
) -> np.ndarray:
    """The centred square as uint8[size, size, channels]; see :func:`crop` for errors."""
    return crop(image, centre_box(*upright(image, name), share), size, channels, name)


def check_picture(content: bytes, most_pixels: int, name: str) -> None:
    """Refuses a stranger's picture by its header, before its pixels take memory.

    Raises:
        DataError: it is none of :data:`SAFE_FORMATS`, damaged, or has more pixels.
        MissingExtraError: Pillow is not installed.
    """
    with extra("reading pictures", "image"):
        from PIL import Image
    try:
        width, height = Image.open(io.BytesIO(content), formats=SAFE_FORMATS).size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            f"{name} has too many pixels, and at most {most_pixels} are taken; send a smaller one"
        ) from error
    except Exception as error:  # a stranger's bytes: readers raise many kinds
        raise DataError(
            f"{name} is not a picture that can be read; give {', '.join(SAFE_FORMATS)}"
        ) from error
    if width * height > most_pixels:
        raise DataError(
            f"{name} has {width} x {height} pixels, and at most {most_pixels} are taken; send a smaller one"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """Augmentation of training pictures. Evaluation uses the centre crop, unchanged.

    Raises:
        OptionError: a number outside its range.
    """

    crop: Annotated[float, Range(above=0, most=1)] = 0.08
    """The smallest share of a picture's area that a training example shows (Szegedy et al. 2015)."""
    flip: bool = True
    """Mirror half of the examples left to right."""
    jitter: Annotated[float, SHARE] = 0.0
    """Brightness, contrast and saturation are scaled by a factor from 1 - jitter to 1 + jitter each; 0 leaves colours alone."""
    erase: Annotated[float, Range(least=0, most=1)] = 0.0
    """Share of the examples in which a random rectangle takes the picture's mean colour."""

    def __post_init__(self) -> None:
        check(self, "augmentation")

    def apply(self, pixels: "np.ndarray", chance: "np.ndarray") -> "np.ndarray":
        """Applies the changes after cropping.

        Args:
            pixels: uint8[side, side, channels].
            chance: float64[CHANCES] in [0, 1), of which the first four chose the part.
        """
        if self.flip and chance[4] < 0.5:
            pixels = pixels[:, ::-1]
        if self.jitter:
            pixels = recoloured(pixels, 1 + self.jitter * (2 * chance[5:8] - 1))
        if chance[8] < self.erase:
            pixels = erased(pixels, chance[9:13])
        return pixels


def recoloured(pixels: "np.ndarray", factors: "np.ndarray") -> "np.ndarray":
    """uint8[height, width, channels] with brightness, contrast and saturation scaled by float64[3].

    Contrast is the distance from the picture's mean grey, saturation that from each pixel's own grey.
    """
    import numpy as np

    weights = np.array(LUMA if pixels.shape[-1] == 3 else (1.0,))
    brightness, contrast, saturation = factors
    wide = pixels * brightness
    mean = (wide @ weights).mean()
    wide = mean + contrast * (wide - mean)
    grey = (wide @ weights)[..., None]
    wide = grey + saturation * (wide - grey)
    return np.clip(np.rint(wide), 0, 255).astype(np.uint8)


def erased(pixels: "np.ndarray", chance: "np.ndarray") -> "np.ndarray":
    """uint8[height, width, channels] with a rectangle of the mean colour; float64[4] choose area, aspect and place."""
    import numpy as np

    height, width = pixels.shape[:2]
    area = height * width * (ERASED_AREA[0] + chance[0] * (ERASED_AREA[1] - ERASED_AREA[0]))
    low, high = np.log(ERASED_ASPECT)
    aspect = np.exp(low + chance[1] * (high - low))
    tall = min(height, max(1, round(float(np.sqrt(area * aspect)))))
    wide = min(width, max(1, round(float(np.sqrt(area / aspect)))))
    top, left = int(chance[2] * (height - tall + 1)), int(chance[3] * (width - wide + 1))
    changed = pixels.copy()
    changed[top : top + tall, left : left + wide] = np.rint(pixels.mean(axis=(0, 1)))
    return changed


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
        if self.resize and max(image.size) > MOST_ASPECT * min(image.size):
            raise DataError(
                f"{name} has {image.width} x {image.height} pixels, and one side may be {MOST_ASPECT} times the other; crop it"
            )
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
