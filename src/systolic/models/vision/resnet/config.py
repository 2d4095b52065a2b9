"""The sizes of a residual network; imports without jax."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from systolic.core.errors import OptionError
from systolic.core.ranges import NOT_NEGATIVE, Range, check
from systolic.job import Field, Layout, Target
from systolic.models.vision.pixels import (
    ConvNet,
    Pixels,
    conv_flops,
    image_size,
    strided,
)

if TYPE_CHECKING:
    from flax import nnx


class Depth(enum.Enum):
    """Layers with weights; 14, 26, 50, 101 and 152 are made of bottlenecks."""

    d10 = "10"
    """One block per stage, for small images and small machines."""
    d14 = "14"
    """One bottleneck per stage."""
    d18 = "18"
    d26 = "26"
    """Two bottlenecks per stage."""
    d34 = "34"
    d50 = "50"
    d101 = "101"
    d152 = "152"

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """Residual blocks of the four stages (He et al. 2016, table 1)."""
        return {
            "10": (1, 1, 1, 1),
            "14": (1, 1, 1, 1),
            "18": (2, 2, 2, 2),
            "26": (2, 2, 2, 2),
            "34": (3, 4, 6, 3),
            "50": (3, 4, 6, 3),
            "101": (3, 4, 23, 3),
            "152": (3, 8, 36, 3),
        }[self.value]

    @property
    def expansion(self) -> int:
        """Channels out of a block over its inner width: 4 for a bottleneck, else 1."""
        return 4 if self in BOTTLENECKS else 1


BOTTLENECKS = frozenset((Depth.d14, Depth.d26, Depth.d50, Depth.d101, Depth.d152))
"""Depths whose blocks are bottlenecks."""


class Stem(enum.Enum):
    """Layers before the stages."""

    imagenet = "imagenet"
    """7x7 convolution of stride 2 and 3x3 max pooling of stride 2: a quarter of the resolution is left."""
    paired = "paired"
    """The same network, its first convolution of stride 2 computed as one of stride 1 on blocks of 2x2 pixels (space to depth)."""
    half = "half"
    """3x3 convolution of stride 2."""
    small = "small"
    """3x3 convolution of stride 1, for images of about 32 pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNet(ConvNet):
    """A residual network with batch norm, images [height, width, channels] to logits.

    Raises:
        OptionError: a size below 1.
    """

    depth: Depth = Depth.d50
    width: Annotated[int, Range(least=1, most=2**16)] = 64
    """Channels of the first stage; each later stage has twice as many."""
    stem: Stem = Stem.imagenet
    norm_examples: Annotated[int, NOT_NEGATIVE] = 0
    """Consecutive examples of a batch that share batch norm's statistics, a divisor of a pass's batch; 0: all."""
    num_classes: Annotated[int, Range(least=1, most=2**24)] = 1000
    pixels: Pixels = field(default_factory=Pixels)

    def __post_init__(self) -> None:
        check(self, "model")
        if self.stem is Stem.paired and self.pixels.size % 2:
            raise OptionError(
                f"model.stem is paired and the image size {self.pixels.size} is odd; use an even size, or the stem imagenet"
            )

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """A :class:`~systolic.models.vision.resnet.module.ResNetModule` in float32."""
        from systolic.models.vision.resnet.module import ResNetModule

        return ResNetModule(self, rngs, target)

    def lasting(self) -> frozenset[str]:
        """All fields but the scaling of pixels and the examples that share statistics."""
        return frozenset(self.__dataclass_fields__) - {"pixels", "norm_examples"}

    def flops(self, fields: Mapping[str, Field]) -> float:
        """FLOPs of the convolutions and the head for one image."""
        size, total = self._stem(fields)
        if self.stem in (Stem.imagenet, Stem.paired):
            size = strided(size, 2)
        conv_in = self.width
        for stage, num_blocks in enumerate(self.depth.blocks):
            inner = self.width * 2**stage
            conv_out = inner * self.depth.expansion
            for index in range(num_blocks):
                stride = 2 if stage and not index else 1
                out = strided(size, stride)
                if self.depth.expansion > 1:
                    total += conv_flops(size, 1, conv_in, inner)
                    total += conv_flops(out, 3, inner, inner)
                    total += conv_flops(out, 1, inner, conv_out)
                else:
                    total += conv_flops(out, 3, conv_in, inner)
                    total += conv_flops(out, 3, inner, inner)
                if stride > 1 or conv_in != conv_out:
                    total += conv_flops(out, 1, conv_in, conv_out)
                size, conv_in = out, conv_out
        return float(total + 2 * conv_in * self.num_classes)

    def input_flops(self, fields: Mapping[str, Field]) -> float:
        """The first convolution."""
        return float(self._stem(fields)[1])

    def _stem(self, fields: Mapping[str, Field]) -> tuple[tuple[int, int], int]:
        """Height and width after the first convolution, and its FLOPs."""
        size = image_size(fields, self.pixels)
        if self.stem is not Stem.small:
            size = strided(size, 2)
        kernel = 7 if self.stem in (Stem.imagenet, Stem.paired) else 3
        return size, conv_flops(size, kernel, self.pixels.channels, self.width)

    def shrink(self, layout: Layout) -> "ResNet":
        """The same blocks, 8 channels (or one per fsdp shard) wide at first."""
        return replace(self, width=min(self.width, max(8, layout.fsdp)))
