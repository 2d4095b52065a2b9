"""How far an offline batch is."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchProgress:
    """How far a batch is; numbers of tokens and seconds are of this process."""

    lines: int
    """Of the input."""
    earlier: int
    """Those that an earlier process answered."""
    answered: int
    """Those with a result, earlier ones included."""
    failed: int
    """Results whose status is not 200."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """Since the model was ready."""
    stopped: bool = False
    """Whether it was told to end."""

    @property
    def generated_per_second(self) -> float:
        """Tokens of answers."""
        return self.completion_tokens / max(self.seconds, 1e-9)

    @property
    def prompts_per_second(self) -> float:
        """Tokens of prompts."""
        return self.prompt_tokens / max(self.seconds, 1e-9)

    @property
    def left_seconds(self) -> float | None:
        """Until the end at the rate so far."""
        here = self.answered - self.earlier
        return self.seconds / here * (self.lines - self.answered) if here else None
