"""Changes of training pictures, held against Pillow's own and against what they promise."""

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from systolic.core.errors import OptionError
from systolic.data.image.pictures import CHANCES, ERASED_AREA, Augmentation, recoloured


def picture(channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(40, 200, (24, 32, channels)).astype(np.uint8)


@pytest.mark.parametrize(
    "factors", [(1.2, 1.0, 1.0), (1.0, 0.7, 1.0), (1.0, 1.0, 0.4), (1.1, 0.9, 1.2)]
)
def test_colours_change_as_pillow_changes_them(factors: tuple[float, float, float]) -> None:
    image = Image.fromarray(picture())
    for enhance, factor in zip(
        (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), factors, strict=True
    ):
        image = enhance(image).enhance(factor)
    ours = recoloured(picture(), np.array(factors)).astype(int)
    assert np.abs(ours - np.asarray(image).astype(int)).max() <= 3  # Pillow rounds after each


def test_one_rectangle_is_erased_as_often_and_as_large_as_promised() -> None:
    change = Augmentation(flip=False, erase=0.4)
    chances = np.random.default_rng(1).random((400, CHANCES))
    shares = []
    for chance in chances:
        differs = (change.apply(picture(), chance) != picture()).any(axis=-1)
        if differs.any():
            rows, columns = np.where(differs)
            box = differs[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            assert box.mean() > 0.9  # a pixel of the mean colour looks unchanged
            shares.append(box.size / differs.size)
    assert 0.33 < len(shares) / 400 < 0.47
    assert min(shares) > ERASED_AREA[0] / 2
    assert max(shares) < ERASED_AREA[1] * 1.1


def test_what_is_off_changes_nothing_and_the_mirror_is_half() -> None:
    chances = np.random.default_rng(2).random((200, CHANCES))
    none = Augmentation(flip=False)
    assert all((none.apply(picture(), chance) == picture()).all() for chance in chances)
    mirrored = [
        (Augmentation().apply(picture(), chance) == picture()[:, ::-1]).all() for chance in chances
    ]
    assert 70 < sum(mirrored) < 130


def test_grey_pictures_have_no_saturation_and_keep_their_shape() -> None:
    grey = recoloured(picture(1), np.array([1.0, 1.0, 0.2]))
    assert (grey == picture(1)).all()


def test_a_number_outside_its_range_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"augmentation\.erase is 1\.5; it must be at least 0 and"
    ):
        Augmentation(erase=1.5)
