"""Groups of a decoder's switches: latent attention, the router of a mixture, growth of the width; imports without jax."""

import enum
from dataclasses import dataclass
from typing import Annotated

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
