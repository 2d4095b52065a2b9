"""Sizes of image models, and their pixels; imports without jax."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Range, check
from systolic.job import Axis, Field, Layout, Model, Remat, Target
from systolic.job.layout import check_divides, refuse_axes

if TYPE_CHECKING:
    from flax import nnx


IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's training images per channel, on the scale 0 to 1 (torchvision's reference values)."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of ImageNet's training images per channel, same scale and source."""
HALF = (0.5,)
"""Mean and standard deviation that scale the bytes of any channel to -1 to 1, the default of transformers' ViT and MobileNetV2."""
STEM, FEATURES = 32, 1280
"""Channels after the first and the last convolution."""
STAGES = ((16, 1, 1), (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1))
"""Channels, blocks and first stride of each stage (Sandler et al. 2018, table 2)."""
MATRICES = frozenset(("project", "out", "up", "down"))
"""Last names of the paths of matrices that may be quantized."""


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

    @property
    def is_convolutional(self) -> bool:
        """See :class:`systolic.job.Model`."""
        return True

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
        """A :class:`~systolic.models.vision.module.CNNModule` in float32."""
        from systolic.models.vision.module import CNNModule

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
        """A :class:`~systolic.models.vision.module.MobileNetV2Module` in float32."""
        from systolic.models.vision.module import MobileNetV2Module

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
        """A :class:`~systolic.models.vision.module.ResNetModule` in float32."""
        from systolic.models.vision.module import ResNetModule

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


class Preset(enum.Enum):
    """Published sizes (Touvron et al. 2021, table 1; Dosovitskiy et al. 2021, table 1)."""

    tiny = "ti"
    small = "s"
    base = "b"
    large = "l"


class Pooling(enum.Enum):
    """Input of the head."""

    mean = "mean"
    """The mean over patches."""
    token = "token"
    """An extra learned token."""


class Positions(enum.Enum):
    """Position embedding of patches."""

    learned = "learned"
    sincos = "sincos"
    """Fixed sines and cosines of row and column."""


class Gelu(enum.Enum):
    """Form of the MLP's activation."""

    tanh = "tanh"
    """The approximation by tanh."""
    erf = "erf"
    """By the error function, as ViT checkpoints on Hugging Face have it."""


_PRESETS = {
    Preset.tiny: (12, 192, 3),
    Preset.small: (12, 384, 6),
    Preset.base: (12, 768, 12),
    Preset.large: (24, 1024, 16),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ViT(Model):
    """A pre-norm transformer over image patches, images [height, width, channels] to logits.

    Raises:
        OptionError: sizes that contradict each other (a patch that does not divide the image, ...).
    """

    layers: Annotated[int, Range(least=1, most=10_000)] = 12
    d_model: Annotated[int, Range(least=1, most=2**20)] = 384
    """Width of the residual stream."""
    d_ff: Annotated[int, Range(least=1, most=2**22)] = 1536
    """Hidden units of the MLP."""
    heads: Annotated[int, Range(least=1, most=2**14)] = 6
    patch: Annotated[int, COUNT] = 16
    """Pixels on a side of a patch."""
    pooling: Pooling = Pooling.mean
    positions: Positions = Positions.sincos
    token_position: bool = False
    """Whether the extra token has a learned position too, as ViT checkpoints on Hugging Face have it."""
    gelu: Gelu = Gelu.tanh
    projection_bias: bool = True
    """Whether queries, keys and values have biases."""
    norm_eps: Annotated[float, POSITIVE] = 1e-6
    """Epsilon of layer norms, added to the variance."""
    num_classes: Annotated[int, Range(least=1, most=2**24)] = 1000
    pixels: Pixels = field(default_factory=Pixels)

    def __post_init__(self) -> None:
        check(self, "model")
        if self.d_model % self.heads:
            raise OptionError(
                f"model.d-model {self.d_model} is not a multiple of model.heads {self.heads}; change one"
            )
        if self.pixels.size % self.patch:
            raise OptionError(
                f"model.patch {self.patch} does not divide the image size of {self.pixels.size}; change one"
            )
        if self.token_position and not (
            self.pooling is Pooling.token and self.positions is Positions.learned
        ):
            raise OptionError(
                f"model.token-position needs an extra token and learned positions, and model.pooling is {self.pooling.value}, model.positions {self.positions.value}; set them to token and learned"
            )
        if self.positions is Positions.sincos and self.d_model % 4:
            raise OptionError(
                f"model.d-model {self.d_model} is not a multiple of 4, which sincos positions need; change one"
            )

    @classmethod
    def preset(cls, preset: Preset, **fields: Any) -> "ViT":
        """A published size; ``fields`` set the rest."""
        layers, d_model, heads = _PRESETS[preset]
        return cls(layers=layers, d_model=d_model, d_ff=4 * d_model, heads=heads, **fields)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.heads

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """A :class:`~systolic.models.vision.module.ViTModule` in float32."""
        from systolic.models.vision.module import ViTModule

        return ViTModule(self, rngs, target)

    def check(self, layout: Layout) -> None:
        """The tensor axis divides heads and hidden units, the fsdp axis the width."""
        refuse_axes(layout, "a ViT", Axis.context, Axis.expert, Axis.pipeline)
        divides = (
            (Axis.tensor, "heads", self.heads),
            (Axis.tensor, "d-ff", self.d_ff),
            (Axis.fsdp, "d-model", self.d_model),
        )
        check_divides(layout, divides)

    def quantizable(self, path: str) -> bool:
        """See :meth:`systolic.job.Model.quantizable`."""
        return path.rpartition("/")[2] in MATRICES

    def axes(self) -> frozenset[Axis]:
        """Data, fsdp and tensor."""
        return frozenset((Axis.data, Axis.fsdp, Axis.tensor))

    def lasting(self) -> frozenset[str]:
        """All fields but the scaling of pixels and the norms' epsilon."""
        return frozenset(self.__dataclass_fields__) - {"pixels", "norm_eps"}

    def policies(self) -> frozenset[Remat]:
        """Policies without names: each block can be recomputed."""
        return frozenset((Remat.none, Remat.minimal, Remat.full))

    def flops(self, fields: Mapping[str, Field]) -> float:
        """FLOPs of the matmuls for one image."""
        height, width = image_size(fields, self.pixels)
        patches = (height // self.patch) * (width // self.patch)
        tokens = patches + (self.pooling is Pooling.token)
        d = self.d_model
        embed = self.input_flops(fields)
        projections = tokens * 2 * d * (4 * d + 2 * self.d_ff)
        scores = 2 * 2 * tokens * tokens * d
        return float(embed + self.layers * (projections + scores) + 2 * d * self.num_classes)

    def input_flops(self, fields: Mapping[str, Field]) -> float:
        """The embedding of patches."""
        height, width = image_size(fields, self.pixels)
        patches = (height // self.patch) * (width // self.patch)
        return float(patches * 2 * self.patch**2 * self.pixels.channels * self.d_model)

    def shrink(self, layout: Layout) -> "ViT":
        """Two layers of one 16 wide head per tensor shard."""
        heads, size = layout.tensor, 2 * self.patch
        while heads * 16 % layout.fsdp:
            heads += layout.tensor
        return replace(
            self,
            layers=min(self.layers, 2),
            heads=heads,
            d_model=16 * heads,
            d_ff=32 * heads,
            pixels=replace(self.pixels, size=min(self.pixels.size, size)),
        )
