"""Random JSON Schemas, small enough that random answers to them end."""

import random
from typing import Any

WORDS = ("id", "name", "größe", "a b", "x-1", 'q"q')


def random_schema(draw: random.Random) -> dict[str, Any]:
    """An object with parts of every kind, some of them in definitions."""
    schema = _object(draw, 3)
    schema["$defs"] = {"part": _part(draw, 1), "leaf": _leaf(draw)}
    return schema


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: _part(draw, depth - 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _part(draw: random.Random, depth: int) -> dict[str, Any]:
    if depth <= 0 or draw.random() < 0.4:
        return _leaf(draw)
    kind = draw.randrange(4)
    if kind == 0:
        return _object(draw, depth)
    if kind == 1:
        least = draw.randrange(3)
        items = _part(draw, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
    if kind == 2:
        return {"anyOf": [_part(draw, depth - 1), {"type": "null"}]}
    return {"$ref": draw.choice(("#/$defs/part", "#/$defs/leaf")) if depth > 1 else "#/$defs/leaf"}


def _leaf(draw: random.Random) -> dict[str, Any]:
    least = draw.randrange(-20, 20)
    leaves: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": ["null", "boolean"]},
        {"enum": ["x", 'y"z', 3, None, 1.5, ["é"], {"k": 1}]},
        {"const": draw.choice(("é\n", 0, True, "\U0001f600"))},
        {"type": "integer", "minimum": least, "maximum": least + draw.randrange(200)},
        {"type": "number", "exclusiveMinimum": least, "maximum": least + 3},
        {"type": "string", "minLength": draw.randrange(3), "maxLength": 5},
        {"type": "string", "pattern": "^[a-f]{2,4}(-[0-9]+)?$", "maxLength": 9},
        {"type": "string", "format": draw.choice(("date", "uuid", "ipv4"))},
    ]
    return draw.choice(leaves)
