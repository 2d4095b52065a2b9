"""Pictures of more than 8 bits, and transparent ones."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from systolic.core.errors import DataError
from systolic.data.image.pictures import Preparation, centre, decode


def both(file: Path, channels: int) -> list[np.ndarray]:
    """The picture as an imported model and as a recipe reads it."""
    return [
        Preparation(side=2, resize=False).apply(file, channels),
        centre(decode(file), 2, channels),
    ]


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_16_bits_are_scaled(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"deep.{suffix}"
    Image.fromarray(np.array([[0, 257], [25_700, 65_535]], np.uint16)).save(file)
    for found in both(file, 1):
        np.testing.assert_array_equal(found[..., 0], [[0, 1], [100, 255]])
    for found in both(file, 3):
        np.testing.assert_array_equal(found[..., 1], [[0, 1], [100, 255]])


@pytest.mark.parametrize(("dtype", "says"), [(np.float32, "floats"), (np.int32, "32-bit integers")])
def test_pixels_of_no_known_range_are_refused(tmp_path: Path, dtype: type, says: str) -> None:
    file = tmp_path / "deep.tiff"
    Image.fromarray(np.full((2, 2), 0.5 if dtype is np.float32 else 7, dtype)).save(file)
    with pytest.raises(DataError, match=f"has pixels of {says}"):
        Preparation(side=2, resize=False).apply(file, 1)
    with pytest.raises(DataError, match=f"has pixels of {says}"):
        centre(decode(file), 2, 1)


def test_transparency_lies_on_white(tmp_path: Path) -> None:
    """Red, hidden red, half-transparent black, blue."""
    pixels = [[[255, 0, 0, 255], [255, 0, 0, 0]], [[0, 0, 0, 128], [0, 0, 255, 255]]]
    file = tmp_path / "clear.png"
    Image.fromarray(np.array(pixels, np.uint8)).save(file)
    for found in both(file, 3):
        np.testing.assert_array_equal(
            found, [[[255, 0, 0], [255, 255, 255]], [[127, 127, 127], [0, 0, 255]]]
        )


def test_a_picture_that_would_be_resized_to_gigabytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "long.png"
    Image.new("RGB", (1, 101)).save(file)
    with pytest.raises(DataError, match="1 x 101 pixels, and one side may be 100 times the other"):
        Preparation(side=224, shorter=256).apply(file, 3)
    assert Preparation(side=1, resize=False).apply(file, 3).shape == (1, 1, 3)
