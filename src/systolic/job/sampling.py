"""How generated tokens are picked."""

from dataclasses import dataclass
from typing import Annotated

from systolic.core.ranges import NOT_NEGATIVE, Range, check


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is picked from the logits.

    Raises:
        OptionError: a value out of its range.
    """

    temperature: Annotated[float, NOT_NEGATIVE] = 0.8
    """0 always takes the most likely token; larger is more varied."""
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    """Only the k most likely tokens; 0 is all."""
    top_p: Annotated[float, Range(above=0, most=1)] = 0.95
    """Only the most likely tokens that together have this probability; 1 is all."""

    def __post_init__(self) -> None:
        check(self)
