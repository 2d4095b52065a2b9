"""Groups of a decoder's switches: latent attention, the router of a mixture, growth of the width, stretched rotary embeddings; imports without jax."""

import enum
import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Needs, Range, check, check_needs

LATENT = Needs(
    "model.latent.kv-lora-rank",
    "model.latent.kv-lora-rank is 0",
    lambda latent: latent.kv_lora_rank,
)
MUP = Needs("model.mup.base-width", "model.mup.base-width is 0", lambda mup: mup.base_width)
WIDTH = Range(least=0, most=2**20)
CLAMP_LIMIT = 7.0
"""Largest gate, and largest magnitude of up, of Mlp.swiglu_clamped (gpt-oss: swiglu_limit)."""
CLAMP_SLOPE = 1.702
"""Slope inside the sigmoid of Mlp.swiglu_clamped (gpt-oss: swiglu_alpha)."""
ALL_DIM = Needs(
    "model.rope-scaling.mscale-all-dim",
    "model.rope-scaling.mscale-all-dim is 0",
    lambda scaling: scaling.mscale_all_dim,
)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention (MLA; DeepSeek-V2, section 2.1), by their names on Hugging Face.

    Raises:
        OptionError: a size outside its range, or sizes that contradict each other.
    """

    kv_lora_rank: Annotated[int, WIDTH] = 0
    """Width of the latent of keys and values, which the cache stores; 0 for plain attention."""
    q_lora_rank: Annotated[int, WIDTH, LATENT] = 0
    """Width of the latent of queries; 0 projects them from the residual stream."""
    qk_nope_head_dim: Annotated[int, Range(least=1, most=2**14), LATENT] = 128
    """Width of a head's query and key without position."""
    qk_rope_head_dim: Annotated[int, Range(least=2, most=2**14), LATENT] = 64
    """Width of the part with rotary embeddings, an even number; all heads share its key."""
    v_head_dim: Annotated[int, Range(least=1, most=2**14), LATENT] = 128
    """Width of a head's value."""
    norm_eps: Annotated[float, NOT_NEGATIVE, LATENT] = 0.0
    """Epsilon of the norms of latents; 0 takes model.norm-eps."""

    def __post_init__(self) -> None:
        check(self, "model.latent")
        check_needs(self, "model.latent")
        if self.qk_rope_head_dim % 2:
            raise OptionError(
                f"model.latent.qk-rope-head-dim {self.qk_rope_head_dim} is odd; rotary embeddings rotate pairs of dims, use an even one"
            )

    def __bool__(self) -> bool:
        """Whether attention is latent."""
        return self.kv_lora_rank > 0

    @property
    def query_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def shrunk(self) -> "Latent":
        """Small sizes with the same switches on, for rehearsals."""
        if not self:
            return self
        return Latent(
            kv_lora_rank=min(self.kv_lora_rank, 32),
            q_lora_rank=min(self.q_lora_rank, 48),
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        )


class Score(enum.Enum):
    """Function from a router's logits to the scores of experts."""

    softmax = "softmax"
    """Scores of a token add up to 1."""
    sigmoid = "sigmoid"
    """Scores of experts are independent (DeepSeek-V3)."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """Choice and weights of the experts of a token.

    Raises:
        OptionError: a number outside its range, or more groups chosen than there are.
    """

    score: Score = Score.softmax
    """Score function."""
    normalise: bool = True
    """Whether the weights of a token's experts are divided by their sum (Hugging Face: norm_topk_prob)."""
    scale: Annotated[float, POSITIVE] = 1.0
    """Factor of the weights (routed_scaling_factor)."""
    groups: Annotated[int, COUNT] = 1
    """Equal groups of neighbouring experts (n_group)."""
    top_groups: Annotated[int, COUNT] = 1
    """Groups whose experts a token may choose (topk_group): softmax ranks groups by their best expert (DeepSeek-V2), sigmoid by the sum of their best two (DeepSeek-V3)."""
    bias: bool = False
    """A bias per expert that affects its choice but not its weight (e_score_correction_bias), moved by router-bias-rate."""
    logit_bias: bool = False
    """A bias per expert of the router's logits, a parameter (gpt-oss)."""

    def __post_init__(self) -> None:
        check(self, "model.router")
        if self.top_groups > self.groups:
            raise OptionError(
                f"model.router.top-groups {self.top_groups} is more than its {self.groups} groups; lower one or raise the other"
            )


@dataclass(frozen=True, kw_only=True)
class Mup:
    """Maximal update parametrisation (muP; Tensor Programs V, Yang et al. 2022): the best learning rate stays the same as d-model grows.

    Raises:
        OptionError: a size outside its range.
    """

    base_width: Annotated[int, WIDTH] = 0
    """d-model that learning rates were tuned for: at another d-model, initial weights and updates are rescaled to match. 0 for the standard parametrisation."""
    base_head_dim: Annotated[int, Range(least=0, most=2**14), MUP] = 0
    """head-dim at base-width, if heads grow with d-model instead of their number; 0 if head-dim is fixed."""

    def __post_init__(self) -> None:
        check(self, "model.mup")
        check_needs(self, "model.mup")

    def __bool__(self) -> bool:
        """Whether a base width is set."""
        return self.base_width > 0


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
