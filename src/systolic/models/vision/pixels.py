"""Common to image models, without jax: checks of sizes and layouts, counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, POSITIVE, Range, check
from systolic.job import Axis, Field, Layout, Model, Remat
from systolic.job.layout import refuse_axes

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


class ConvNet(Model):
    """Base of convolutional networks with batch norm over groups of ``norm_examples`` (0: of a whole pass)."""

    def quantizable(self, path: str) -> bool:
        """See :meth:`systolic.job.Model.quantizable`."""
        return path.endswith("/kernel") and not path.startswith(("stem/", "head/"))

    def check(self, layout: Layout) -> None:
        """Data and fsdp."""
        axes = (Axis.tensor, Axis.context, Axis.expert, Axis.pipeline)
        refuse_axes(layout, f"a {type(self).__name__}", *axes)

    def check_batch(self, examples: int) -> None:
        """Groups of batch norm must divide the examples of a pass."""
        group: int = self.norm_examples  # ty: ignore[missing-attribute]  a field of each network
        if group and examples % group:
            raise OptionError(
                f"model.norm-examples {group} does not divide the {examples} examples of a pass; use a divisor of {examples}, or change the batch"
            )

    def policies(self) -> frozenset[Remat]:
        """Policies without names: each block can be recomputed."""
        return frozenset((Remat.none, Remat.minimal, Remat.full))


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
