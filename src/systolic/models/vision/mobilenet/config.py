"""The sizes of a MobileNetV2; imports without jax."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Range, check
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

STEM, FEATURES = 32, 1280
"""Channels after the first and the last convolution."""
STAGES = ((16, 1, 1), (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1))
"""Channels, blocks and first stride of each stage (Sandler et al. 2018, table 2)."""


class Padding(enum.Enum):
    """Placement of the zeros around an image that a convolution of stride 2 adds."""

    torch = "torch"
    """The same number on all sides."""
    tf = "tf"
    """One fewer on top and left where the number is odd, as TensorFlow's SAME has it."""


class BlockSize(NamedTuple):
    """Sizes of an inverted residual block."""

    conv_in: int
    inner: int
    conv_out: int
    stride: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MobileNetV2(ConvNet):
    """Inverted residuals with batch norm and ReLU6, images [height, width, channels] to logits.

    Raises:
        OptionError: a size below 1.
    """

    multiplier: Annotated[float, POSITIVE] = 1.0
    """Factor of all channels."""
    divisor: Annotated[int, COUNT] = 8
    """Channels are rounded to multiples of this, never below 90 % of the exact number."""
    least: Annotated[int, COUNT] = 8
    """Fewest channels of a layer."""
    expansion: Annotated[float, POSITIVE] = 6.0
    """Channels inside a block over those before it."""
    scaled_features: bool = False
    """Whether a multiplier below 1 also scales the last convolution; by default it keeps 1280 channels."""
    padding: Padding = Padding.torch
    norm_eps: Annotated[float, POSITIVE] = 1e-5
    """Epsilon of batch norms, added to the variance."""
    norm_examples: Annotated[int, NOT_NEGATIVE] = 0
    """Consecutive examples of a batch that share batch norm's statistics, a divisor of a pass's batch; 0: all."""
    num_classes: Annotated[int, Range(least=1, most=2**24)] = 1000
    pixels: Pixels = field(default_factory=Pixels)

    def __post_init__(self) -> None:
        check(self, "model")

    def rounded(self, channels: float) -> int:
        """The number of channels of a layer: a multiple of ``divisor``, as Sandler et al.'s own code rounds."""
        nearest = max(self.least, int(channels + self.divisor / 2) // self.divisor * self.divisor)
        return nearest + self.divisor if nearest < 0.9 * channels else nearest

    @property
    def stem(self) -> int:
        """Channels after the first convolution."""
        return self.rounded(round(STEM * self.multiplier))

    @property
    def features(self) -> int:
        """Inputs of the linear layer."""
        if self.multiplier < 1 and not self.scaled_features:
            return FEATURES
        return self.rounded(round(FEATURES * self.multiplier))

    @property
    def blocks(self) -> tuple[BlockSize, ...]:
        """Sizes of all blocks; the first does not expand."""
        sizes, conv_in = [], self.stem
        for channels, count, first in STAGES:
            conv_out = self.rounded(round(channels * self.multiplier))
            for index in range(count):
                inner = self.rounded(round(conv_in * self.expansion)) if sizes else conv_in
                sizes.append(BlockSize(conv_in, inner, conv_out, 1 if index else first))
                conv_in = conv_out
        return tuple(sizes)

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """A :class:`~systolic.models.vision.mobilenet.module.MobileNetV2Module` in float32."""
        from systolic.models.vision.mobilenet.module import MobileNetV2Module

        return MobileNetV2Module(self, rngs, target)

    def lasting(self) -> frozenset[str]:
        """All fields but the scaling of pixels, the norms' epsilon and the examples that share statistics."""
        return frozenset(self.__dataclass_fields__) - {"pixels", "norm_eps", "norm_examples"}

    def flops(self, fields: Mapping[str, Field]) -> float:
        """FLOPs of the convolutions and the linear layer for one image."""
        size = strided(image_size(fields, self.pixels), 2)
        total = self.input_flops(fields)
        for index, block in enumerate(self.blocks):
            if index:
                total += conv_flops(size, 1, block.conv_in, block.inner)
            size = strided(size, block.stride)
            total += conv_flops(size, 3, 1, block.inner)
            total += conv_flops(size, 1, block.inner, block.conv_out)
        total += conv_flops(size, 1, self.blocks[-1].conv_out, self.features)
        return float(total + 2 * self.features * self.num_classes)

    def input_flops(self, fields: Mapping[str, Field]) -> float:
        """The first convolution."""
        size = strided(image_size(fields, self.pixels), 2)
        return float(conv_flops(size, 3, self.pixels.channels, self.stem))

    def shrink(self, layout: Layout) -> "MobileNetV2":
        """The same blocks, 8 channels (or one per fsdp shard) wide at least and half as wide at most."""
        least = max(8, layout.fsdp)
        return replace(
            self,
            multiplier=min(self.multiplier, 0.25),
            divisor=least,
            least=least,
            scaled_features=True,
        )
