"""Augmentation of training pictures: crop, mirror, colours, erased rectangle."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from systolic.core.ranges import SHARE, Range, check

if TYPE_CHECKING:
    import numpy as np

CHANCES = 13
"""Random numbers a picture: 5 for crop and mirroring, 3 for colours, 5 for erasing."""
ERASED_AREA = (0.02, 0.33)
"""Share of the picture's area, least and most (Zhong, Zheng, Kang, Li, Yang 2020, table 1)."""
ERASED_ASPECT = (0.3, 3.3)
"""Height over width of the erased rectangle, least and most; same source."""
LUMA = (0.299, 0.587, 0.114)
"""Grey from red, green and blue (ITU-R BT.601)."""


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
