"""The sizes of a vision transformer; imports without jax."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, POSITIVE, Range, check
from systolic.job import Axis, Field, Layout, Model, Remat, Target
from systolic.job.layout import check_divides, refuse_axes
from systolic.models.vision.pixels import Pixels, image_size

if TYPE_CHECKING:
    from flax import nnx

MATRICES = frozenset(("project", "out", "up", "down"))
"""Last names of the paths of matrices that may be quantized."""


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
        """A :class:`~systolic.models.vision.vit.module.ViTModule` in float32."""
        from systolic.models.vision.vit.module import ViTModule

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
