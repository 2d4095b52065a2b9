"""Requests that get no answer: refused at the door, or too late."""

from systolic.core.errors import SystolicError


class RefusedError(SystolicError):
    """A request that is not taken now.

    Attributes:
        retry_seconds: When to come back; None where it can never be taken.
        parameter: Field of the request that is to blame, if one is.
    """

    def __init__(
        self, message: str, *, retry_seconds: float | None = None, parameter: str | None = None
    ) -> None:
        super().__init__(message)
        self.retry_seconds, self.parameter = retry_seconds, parameter


class ExpiredError(SystolicError):
    """A request whose deadline passed before its answer was known."""
