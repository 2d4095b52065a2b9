"""Rotary embeddings that are stretched to longer texts than a model was trained on; imports without jax."""

import enum
import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Needs, Range, check, check_needs


class Stretching(enum.Enum):
    """Rule that lowers the frequencies of rotary embeddings."""

    none = "none"
    """Frequencies as they are."""
    linear = "linear"
    """All frequencies over the factor (position interpolation, Chen et al. 2023)."""
    llama3 = "llama3"
    """Low frequencies over the factor, high ones as they are, a line between (Llama 3.1)."""
    yarn = "yarn"
    """Dims of few rotations over the factor, dims of many as they are, a ramp between; attention is scaled (YaRN, Peng et al. 2023)."""


def _only(*kinds: Stretching) -> Needs:
    names = " or ".join(kind.value for kind in kinds)
    return Needs(
        f"model.rope-scaling.kind {names}",
        f"model.rope-scaling.kind is not {names}",
        lambda scaling: scaling.kind in kinds,
    )


ANY = Needs(
    "model.rope-scaling.kind",
    "model.rope-scaling.kind is none",
    lambda scaling: scaling.kind is not Stretching.none,
)
ORIGINAL = _only(Stretching.llama3, Stretching.yarn)
LLAMA3, YARN = _only(Stretching.llama3), _only(Stretching.yarn)
ALL_DIM = Needs(
    "model.rope-scaling.mscale-all-dim",
    "model.rope-scaling.mscale-all-dim is 0",
    lambda scaling: scaling.mscale_all_dim,
)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretching of rotary embeddings, by the names of a config.json (rope_scaling, rope_parameters).

    Raises:
        OptionError: a number outside its range, or a kind whose factor is 1.
    """

    kind: Stretching = Stretching.none
    """Rule (rope_type)."""
    factor: Annotated[float, Range(least=1), ANY] = 1.0
    """Ratio of the longest text to the longest that the model was trained on."""
    original_positions: Annotated[int, COUNT, ORIGINAL] = 8192
    """Longest text before the stretching (original_max_position_embeddings)."""
    low_freq_factor: Annotated[float, POSITIVE, LLAMA3] = 1.0
    """llama3: rotations within original-positions up to which a frequency is divided by the whole factor."""
    high_freq_factor: Annotated[float, POSITIVE, LLAMA3] = 4.0
    """llama3: rotations within original-positions from which a frequency stays."""
    beta_fast: Annotated[float, POSITIVE, YARN] = 32.0
    """yarn: rotations within original-positions from which a frequency stays."""
    beta_slow: Annotated[float, POSITIVE, YARN] = 1.0
    """yarn: rotations within original-positions up to which a frequency is divided by the whole factor."""
    attention_factor: Annotated[float | None, POSITIVE, YARN] = None
    """yarn: factor of rotated queries and of rotated keys; by default from factor, mscale and mscale-all-dim."""
    mscale: Annotated[float, NOT_NEGATIVE, YARN, ALL_DIM] = 0.0
    """yarn: weight of log(factor) in the factor of rotated queries and keys, beside mscale-all-dim (DeepSeek)."""
    mscale_all_dim: Annotated[float, NOT_NEGATIVE, YARN] = 0.0
    """yarn: weight of log(factor) in the scale of latent attention's softmax, which rotated queries and keys are divided by."""
    truncate: Annotated[bool, YARN] = True
    """yarn: whether the ramp begins and ends at whole dims."""

    def __post_init__(self) -> None:
        check(self, "model.rope-scaling")
        check_needs(self, "model.rope-scaling")
        if self and self.factor == 1:
            raise OptionError(
                f"model.rope-scaling.kind is {self.kind.value} but model.rope-scaling.factor is 1, so that it has no effect; set the factor, or leave both out"
            )
        if self.kind is Stretching.llama3 and self.high_freq_factor <= self.low_freq_factor:
            raise OptionError(
                f"model.rope-scaling.high-freq-factor {self.high_freq_factor} is not above low-freq-factor {self.low_freq_factor}; raise it"
            )
        if self.kind is Stretching.yarn and self.beta_fast < self.beta_slow:
            raise OptionError(
                f"model.rope-scaling.beta-fast {self.beta_fast} is below beta-slow {self.beta_slow}; raise it"
            )

    def __bool__(self) -> bool:
        """Whether frequencies are stretched."""
        return self.kind is not Stretching.none

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and of rotated keys (YaRN, section 3.4; DeepSeek-V2's with mscale)."""
        if self.kind is not Stretching.yarn:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor of the scale of latent attention's products (DeepSeek-V2)."""
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0


class Rotary(NamedTuple):
    """Rotary embeddings of a layer."""

    theta: float
    """Base of the wavelengths."""
    scaling: RopeScaling

    def ramp(self, size: int) -> tuple[float, float]:
        """YaRN: the pairs of ``size`` dims, by number, between which frequencies go from as they are to all of the factor."""
        scaling = self.scaling

        def pair(rotations: float) -> float:
            turns = scaling.original_positions / (rotations * 2 * math.pi)
            return size * math.log(turns) / (2 * math.log(self.theta))

        low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        return low, high if high != low else high + 0.001
