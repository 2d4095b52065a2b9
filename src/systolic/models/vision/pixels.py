"""Common to image models, without jax: checks of sizes and layouts, counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from systolic.core.errors import LayoutError, OptionError
from systolic.core.ranges import COUNT, POSITIVE, Range, check
from systolic.job import Axis, Field, Layout

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's training images per channel, on the scale 0 to 1 (torchvision's reference values)."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of ImageNet's training images per channel, same scale and source."""
HALF = (0.5,)
"""Mean and standard deviation that scale the bytes of any channel to -1 to 1, the default of transformers' ViT and MobileNetV2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pixels:
    """The images a model takes, and how their bytes become numbers: (byte / 255 - mean) / std.

    Raises:
        OptionError: a size below 1, or a mean or std that is not one number per channel.
    """

    size: Annotated[int, Range(least=1, most=2**14)] = 224
    """Height and width in pixels."""
    channels: Annotated[int, COUNT] = 3
    mean: Annotated[tuple[float, ...], Range()] = IMAGENET_MEAN
    """Per channel, or one number for all of them."""
    std: Annotated[tuple[float, ...], POSITIVE] = IMAGENET_STD
    """Like mean."""

    def __post_init__(self) -> None:
        check(self, "model.pixels")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise OptionError(
                    f"model.pixels.{name} has {len(values)} numbers for {self.channels} channels; give 1 or {self.channels}"
                )


def refuse_axes(layout: Layout, model: str, *axes: Axis) -> None:
    """Raises LayoutError when one of ``axes`` is used, which ``model`` has nothing to split over."""
    for axis in axes:
        if layout.size(axis) > 1:
            raise LayoutError(
                f"layout.{axis.value} is {layout.size(axis)} but {model} has nothing to split that way; set it to 1 and use layout.data or layout.fsdp"
            )


def image_size(fields: Mapping[str, Field], pixels: Pixels) -> tuple[int, int]:
    """Height and width of the images of ``fields``, or the model's own when they don't name an image."""
    if "image" not in fields:
        return pixels.size, pixels.size
    height, width = fields["image"].shape[:2]
    return height, width


def strided(size: tuple[int, int], stride: int) -> tuple[int, int]:
    """Height and width after a convolution or pooling that pads so that only the stride shrinks them."""
    return -(-size[0] // stride), -(-size[1] // stride)


def conv_flops(out: tuple[int, int], kernel: int, conv_in: int, conv_out: int) -> int:
    """FLOPs of a convolution with ``out`` positions.

    Taps on the padding count, as in published counts (ResNet-50 at 224 x 224: 4.09 GMACs in torchvision's table of
    weights, 3.8 in He et al. 2016, whose stride sits in another layer), and in the executed FLOPs of a forecast.
    """
    return 2 * out[0] * out[1] * kernel * kernel * conv_in * conv_out
