"""What goes wrong with a request, and the error body of each protocol."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from systolic.core.errors import DataError, NotFoundError, OptionError, SystolicError
from systolic.serving.refused import ExpiredError, RefusedError

KINDS: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""Status to ``error.type`` of OpenAI's body; all others are ``invalid_request_error``."""
FINAL = (500, 504)
"""Statuses after which the official client would try again by itself, and gets the same answer."""


class Dialect(Enum):
    """Whose error body a path has."""

    openai = "openai"
    plain = "plain"
    """``{"error": "text"}``: the Open Inference Protocol and TensorFlow Serving."""

    @classmethod
    def of(cls, path: str) -> "Dialect":
        """The dialect of a path."""
        if path == "/v2" or path.startswith("/v2/"):
            return cls.plain
        rest = path.removeprefix("/v1/models/")
        own = rest != path and (":" in rest or "/versions/" in rest or "/labels/" in rest)
        return cls.plain if own or path.endswith("/metadata") else cls.openai


@dataclass(kw_only=True, eq=False)
class ProblemError(Exception):
    """A request that gets an error.

    Attributes:
        status: HTTP status.
        message: One line.
        param: Field of the request that is to blame.
        code: OpenAI's short name of the error.
        retry_seconds: When to come back.
        allow: Methods that the path takes, for status 405.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_seconds: float | None = None
    allow: str | None = None

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """The JSON object of the answer."""
        if dialect is Dialect.plain:
            return {"error": self.message}
        kind = KINDS.get(self.status, "invalid_request_error")
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def headers(self) -> dict[str, str]:
        """Headers of the answer, ``Retry-After`` in whole seconds."""
        found = {}
        if self.retry_seconds is not None:
            found["retry-after"] = str(max(math.ceil(self.retry_seconds), 1))
            found["x-should-retry"] = "true"
        elif self.status in FINAL:
            found["x-should-retry"] = "false"
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        if self.allow is not None:
            found["allow"] = self.allow
        return found


def bad(message: str, param: str | None = None, code: str | None = None) -> ProblemError:
    """A request that is wrong: 400."""
    return ProblemError(status=400, message=message, param=param, code=code)


def problem_of(error: SystolicError) -> ProblemError:
    """What a model's refusal or a user's mistake is on the wire."""
    text = str(error)
    if isinstance(error, RefusedError):
        if error.retry_seconds is None:
            return bad(text, error.parameter)
        return ProblemError(
            status=429, message=text, code="queue_full", retry_seconds=error.retry_seconds
        )
    if isinstance(error, ExpiredError):
        return ProblemError(status=504, message=text, code="deadline")
    if isinstance(error, NotFoundError):
        return ProblemError(status=404, message=text, param="model", code="model_not_found")
    if isinstance(error, OptionError | DataError):
        return bad(text)
    return ProblemError(status=500, message=text)
