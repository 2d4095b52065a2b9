"""Values of a recipe's options from text, by the types of its signature: what ``tune`` searches."""

import enum
import inspect
import shlex
import typing
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any

from systolic.core.errors import OptionError, OutOfRangeError
from systolic.core.ranges import complaint, dashed, ranged
from systolic.core.spelling import nearest_option
from systolic.recipes import Recipe

_WORDS: Mapping[str, bool] = {"yes": True, "true": True, "no": False, "false": False}
_TAKES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    bool: "yes or no",
}


def reader(recipe: Recipe) -> Callable[[str, str], Any]:
    """A parser of values of a recipe's options: from the option's name, as typed without dashes, and the text.

    It raises OptionError for an unknown option, OptionError or OutOfRangeError for a wrong value.
    """
    hints = _hints(recipe.function, "")

    def read(name: str, word: str) -> Any:
        if name not in hints:
            near = nearest_option(name, [f"--{each}" for each in hints]).replace("--", "")
            raise OptionError(
                f"--search names {name}, which is no option of {recipe.target}{near}; systolic recipes {recipe.target} lists its options"
            )
        return read_value(hints[name], word, f"--search {name}")

    return read


def read_value(hint: Any, word: str, named: str) -> Any:
    """A value of an option's type from its text; of a switch from yes or no.

    Args:
        hint: The annotated type.
        word: Its text; several words for an option that takes several.
        named: What messages call the option.

    Raises:
        OptionError: it does not parse.
        OutOfRangeError: it is out of its range.
    """
    plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    union = typing.get_origin(plain) in (typing.Union, UnionType)
    kinds = list(typing.get_args(plain)) if union else [plain]
    if NoneType in kinds and word == "None":
        return None
    kinds = [kind for kind in kinds if kind is not NoneType]
    for kind in kinds:
        try:
            value = _converted(kind, word)
        except ValueError:
            continue
        limit = ranged(hint)
        if limit is not None and (told := complaint(named, limit, value)) is not None:
            raise OutOfRangeError(told)
        return value
    raise OptionError(f"{named} is {word!r}; it takes {' or '.join(map(_takes, kinds))}")


def _hints(function: Callable[..., Any], prefix: str) -> dict[str, Any]:
    """Option as typed, without dashes before it, to its annotated type."""
    hints = typing.get_type_hints(function, include_extras=True)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, parameter.annotation)
        plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        typed = f"{prefix}{dashed(name)}"
        if isinstance(plain, type) and is_dataclass(plain):
            found |= _hints(plain, f"{typed}.")
        else:
            found[typed] = hint
    return found


def _converted(kind: Any, word: str) -> Any:
    """A text as a type.

    Raises:
        ValueError: it is none of the type.
    """
    if kind is bool:
        if word.lower() not in _WORDS:
            raise ValueError
        return _WORDS[word.lower()]
    if typing.get_origin(kind) is tuple:
        (inner, *_) = typing.get_args(kind)
        return tuple(_converted(inner, each) for each in shlex.split(word))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(word)
    if kind in (int, float, str, Path):
        return kind(word)
    raise ValueError


def _takes(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        names = sorted(str(each.value) for each in kind)
        return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return _TAKES.get(kind, f"no text, but a {inspect.formatannotation(kind)}")
