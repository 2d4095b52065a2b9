"""The sizes of a small convolutional network; imports without jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, Range, check
from systolic.job import Axis, Field, Layout, Model, Target
from systolic.job.layout import refuse_axes
from systolic.models.vision.pixels import (
    Pixels,
    conv_flops,
    image_size,
    strided,
)

if TYPE_CHECKING:
    from flax import nnx


@dataclass(frozen=True, kw_only=True, slots=True)
class CNN(Model):
    """Stages of two 3x3 convolutions with batch norm and 2x2 max pooling, then one linear layer.

    Raises:
        OptionError: a size below 1, or no stage.
    """

    channels: Annotated[tuple[int, ...], COUNT] = (32, 64)
    """Channels of each stage; every stage halves the resolution."""
    num_classes: Annotated[int, Range(least=1, most=2**24)] = 10
    pixels: Pixels = field(default_factory=Pixels)

    def __post_init__(self) -> None:
        if not self.channels:
            raise OptionError("model.channels is empty; give the channels of each stage")
        check(self, "model")

    def quantizable(self, path: str) -> bool:
        """See :meth:`systolic.job.Model.quantizable`."""
        return path.endswith("/kernel") and not path.startswith(("convs/0/", "head/"))

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """A :class:`~systolic.models.vision.cnn.module.CNNModule` in float32."""
        from systolic.models.vision.cnn.module import CNNModule

        return CNNModule(self, rngs, target)

    def check(self, layout: Layout) -> None:
        """Data and fsdp."""
        refuse_axes(layout, "a CNN", Axis.tensor, Axis.context, Axis.expert, Axis.pipeline)

    @property
    def features(self) -> int:
        """Inputs of the linear layer."""
        size = (self.pixels.size, self.pixels.size)
        for _ in self.channels:
            size = strided(size, 2)
        return size[0] * size[1] * self.channels[-1]

    def flops(self, fields: Mapping[str, Field]) -> float:
        """FLOPs of the convolutions and the linear layer for one image."""
        size, conv_in, total = image_size(fields, self.pixels), self.pixels.channels, 0
        for conv_out in self.channels:
            total += conv_flops(size, 3, conv_in, conv_out)
            total += conv_flops(size, 3, conv_out, conv_out)
            size, conv_in = strided(size, 2), conv_out
        return float(total + 2 * self.features * self.num_classes)

    def input_flops(self, fields: Mapping[str, Field]) -> float:
        """The first convolution."""
        size = image_size(fields, self.pixels)
        return float(conv_flops(size, 3, self.pixels.channels, self.channels[0]))

    def shrink(self, layout: Layout) -> "CNN":
        """The same stages, at most 8 channels (or one per fsdp shard) each."""
        widest = max(8, layout.fsdp)
        return replace(self, channels=tuple(min(size, widest) for size in self.channels))
