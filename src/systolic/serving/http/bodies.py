"""Bodies of requests: JSON into typed records, with the field to blame in each error."""

import math
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from systolic.serving.http.problems import bad

T = TypeVar("T")

_WHERE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")


async def read(request: Request, kind: type[T]) -> T:
    """The body of a request as a record.

    Raises:
        ProblemError: it is no JSON, or a field has the wrong type.
    """
    return decode(await request.body(), kind)


def decode(raw: bytes, kind: type[T]) -> T:
    """Some JSON as a record; errors as :func:`read`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _WHERE.search(text)
        path = found[1] if found else None
        reason = _WHERE.sub("", text)
        raise bad(f"{path or 'the body'}: {reason}", path or _missing(reason)) from error
    except RecursionError as error:
        raise bad("the body is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise bad(f"the body is not JSON ({error}); send a JSON object") from error


def _missing(reason: str) -> str | None:
    found = re.search(r"missing required field `([^`]+)`", reason)
    return found[1] if found else None


def encode(value: Any) -> bytes:
    """A value as JSON; numbers that JSON has no form for become null."""
    return msgspec.json.encode(value)


def with_infinities(value: Any, written: bytes) -> Any:
    """A value of lists, objects, texts and numbers that :func:`encode` writes with its infinities, which JSON has no form for.

    Args:
        value: The value.
        written: Infinity as its readers take it: ``Infinity``, or ``1e999``, a number of JSON beyond all floats.
    """
    if isinstance(value, float) and math.isinf(value):
        return msgspec.Raw(written if value > 0 else b"-" + written)
    if isinstance(value, list):
        return [with_infinities(one, written) for one in value]
    if isinstance(value, dict):
        return {name: with_infinities(one, written) for name, one in value.items()}
    return value
