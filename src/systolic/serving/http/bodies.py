"""Bodies of requests: JSON into typed records, with the field to blame in each error."""

import math
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from systolic.serving.http.problems import ProblemError, bad

T = TypeVar("T")

SHOWN = 40
"""Characters of a value that an error shows."""
_WHERE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_BOUND = re.compile(r"Expected `(?:int|float)(?: \| null)?` (>=|<=|>|<) (\S+)")
_KIND = re.compile(r"Expected `([^`]+)`, got `[^`]+`")
_STEP = re.compile(r"([^.\[\]]+)|\[([0-9]+|\.\.\.)\]")
_BOUNDS = {
    ">=": "{:.15g} or more",
    "<=": "{:.15g} or less",
    ">": "more than {:.15g}",
    "<": "less than {:.15g}",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
"""Types as msgspec names them, in the words of this server's messages."""


async def read(request: Request, kind: type[T]) -> T:
    """The body of a request as a record.

    Raises:
        ProblemError: it is no JSON, or a field has the wrong type.
    """
    return decode(await request.body(), kind)


def decode(raw: bytes, kind: type[T]) -> T:
    """Some JSON as a record; errors as :func:`read`."""
    try:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            raise _judged(str(error), raw) from error
    except RecursionError as error:
        raise bad("the body is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise bad(f"the body is not JSON ({error}); send a JSON object") from error


def _judged(text: str, raw: bytes) -> ProblemError:
    """The answer to a body of another type than asked for, by msgspec's message."""
    at = _WHERE.search(text)
    path = at[1] if at else ""
    reason = _WHERE.sub("", text)
    if missing := _MISSING.fullmatch(reason):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return bad(f"{param} is missing; send it", param)
    given = f"{path or 'the body'} is {_shown(raw, path)}"
    if bound := _BOUND.fullmatch(reason):
        return bad(f"{given}; ask for {_BOUNDS[bound[1]].format(float(bound[2]))}", path)
    if kind := _KIND.fullmatch(reason):
        names = [_KINDS.get(one, one) for one in kind[1].split(" | ") if one != "null"]
        return bad(f"{given}; send {' or '.join(names)}", path or None)
    if reason.startswith("Invalid enum value"):
        return bad(f"{given}, which is not supported; leave it out", path)
    return bad(f"{path or 'the body'}: {reason}", path or None)


def _shown(raw: bytes, path: str) -> str:
    """The value at a path of some JSON, cut to a few characters."""
    value = msgspec.json.decode(raw)
    for name, index in _STEP.findall(path):
        if index == "...":
            return "out of range"  # Which one of an object's values is not known.
        value = value[int(index)] if index else value[name]
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


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
