"""Options of sampling."""

from dataclasses import dataclass
from typing import Annotated

from systolic.core.ranges import NOT_NEGATIVE, Range, check


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling of the next token from the logits.

    Raises:
        OptionError: a value out of its range.
    """

    temperature: Annotated[float, NOT_NEGATIVE] = 0.8
    """Softmax temperature; 0 is greedy, larger is more varied."""
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    """Sample from the k most likely tokens; 0 samples from all."""
    top_p: Annotated[float, Range(above=0, most=1)] = 0.95
    """Sample from the most likely tokens that together have this probability; 1 samples from all."""

    def __post_init__(self) -> None:
        check(self)
