"""Picture files to arrays with Pillow: decoding, cropping, resizing."""

import io
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from systolic.core.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

EVALUATION_SHARE = 0.875
"""Side of the centre crop over the shorter side: 224 of 256, as ImageNet is usually evaluated."""

RATIO = 4 / 3
"""Most stretch of a training crop either way (Szegedy et al. 2015)."""

_ORIENTATION = 0x0112
"""EXIF tag of a camera's orientation."""


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
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("reading pictures", "image") from error
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
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("resizing pictures", "image") from error
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


SAFE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats of pictures from strangers: Pillow's readers of others start programs, or are rarely looked at."""


def check_picture(content: bytes, most_pixels: int, name: str) -> None:
    """Refuses a stranger's picture by its header, before its pixels take memory.

    Raises:
        DataError: it is none of :data:`SAFE_FORMATS`, damaged, or has more pixels.
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("reading pictures", "image") from error
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
