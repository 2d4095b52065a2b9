"""Search space: options of the recipe with a range or choices, as ``--search`` gives them.

``log:1e-4..1e-2`` is a logarithmic range, ``0..0.3`` a range, ``128..512:64`` a range with a step, ``4,6,8`` a list of choices.
A range is of integers if the option takes integers.
"""

import contextlib
import enum
import inspect
import math
import shlex
import typing
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from decimal import Decimal
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

from systolic.core.errors import OptionError, OutOfRangeError, extra
from systolic.core.option_words import nearest_option
from systolic.core.ranges import complaint, dashed, ranged
from systolic.recipes import Recipe

FORMS = "a range such as 1..8, 128..512:64 or log:1e-4..1e-2, or choices such as 4,6,8"
DIGITS = 4
"""Significant digits that numbers drawn from a range keep, of the number and of the range's width, so that commands stay short."""

Typed = Callable[[str, str], Any]
"""Parses the text of an option's value; raises OptionError."""
Value = str | int | float | bool | None
"""A choice as the study stores it: a number or boolean, or otherwise the text as typed."""

_SWITCH: Mapping[str, bool] = {"yes": True, "true": True, "no": False, "false": False}
_TYPE_TEXTS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    bool: "yes or no",
}


@dataclass(frozen=True, kw_only=True)
class Searched:
    """A searched option with either ``choices`` or a range from ``low`` to ``high``."""

    name: str
    """Name as typed, without leading dashes: ``optimizer.learning-rate``."""
    spec: str
    """Text after the equals sign."""
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False
    choices: Mapping[str, Any] | None = None
    """Choice as typed, to value."""

    @property
    def is_range(self) -> bool:
        """Whether values are numbers of a range."""
        return self.choices is None

    @property
    def text(self) -> str:
        """The option as given: ``model.layers=4,6,8``."""
        return f"{self.name}={self.spec}"

    @property
    def words(self) -> tuple[Value, ...]:
        """Choices as the study stores them."""
        assert self.choices is not None
        return tuple(
            value if type(value) in (int, float, bool) else word
            for word, value in self.choices.items()
        )

    @property
    def distribution(self) -> Any:
        """Optuna's distribution."""
        kinds = optuna().distributions
        if self.choices is not None:
            return kinds.CategoricalDistribution(list(self.words))
        if self.whole:
            low, high = int(self.low), int(self.high)
            return kinds.IntDistribution(low, high, step=int(self.step or 1), log=self.log)
        return kinds.FloatDistribution(self.low, self.high, step=self.step, log=self.log)

    def suggest(self, trial: Any) -> Any:
        """Value in a trial; Optuna draws it once and stores it."""
        if self.choices is not None:
            return self.typed(trial.suggest_categorical(self.name, list(self.words)))
        if self.whole:
            low, high = int(self.low), int(self.high)
            return trial.suggest_int(self.name, low, high, step=int(self.step or 1), log=self.log)
        return self.typed(
            trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)
        )

    def typed(self, kept: Value) -> Any:
        """Value for the recipe from the value that the study stores."""
        if self.choices is not None:
            return list(self.choices.values())[self.words.index(kept)]
        return self.shown(kept)

    def rounded(self, value: float) -> float:
        """A number rounded to few digits within the range, or to the nearest step of a range with steps."""
        if self.step is not None:
            first, step = (Decimal(str(each)) for each in (self.low, self.step))
            return float(first + round((value - self.low) / self.step) * step)
        places = max(_places(value), _places(self.high - self.low))
        return min(max(round(value, places), self.low), self.high)

    def grid(self) -> Sequence[Value]:
        """All values, for a grid.

        Raises:
            OptionError: the range has no step.
        """
        if self.choices is not None:
            return self.words
        if self.log or (not self.whole and self.step is None):
            raise OptionError(
                f"--search {self.text} is a range without a step, and a grid needs values; list them as {self.name}=a,b,c, or give a step as a..b:step"
            )
        step = self.step or 1
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        values = [self.low + step * place for place in range(count)]
        return [int(value) if self.whole else self.rounded(value) for value in values]

    @property
    def count(self) -> int | None:
        """Number of values; None for a continuous range."""
        if self.choices is not None:
            return len(self.choices)
        if self.whole and self.step is None:
            return int(self.high) - int(self.low) + 1
        return None if self.step is None else len(self.grid())

    def at(self, place: int) -> Value:
        """Value at an index below :attr:`count`."""
        return int(self.low) + place if self.whole and self.step is None else self.grid()[place]

    def place(self, value: Any) -> float:
        """Position of a value between the first (0) and the last (1)."""
        if self.choices is not None:
            kept = list(self.words)
            return kept.index(value) / max(len(kept) - 1, 1)
        if self.high == self.low:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def shown(self, value: Any) -> Any:
        """Value that a trial trains with, from the value that the study stores."""
        return self.rounded(value) if self.is_range and not self.whole else value


def _places(value: float) -> int:
    """Decimal places that leave a number :data:`DIGITS` significant digits."""
    return DIGITS - 1 - math.floor(math.log10(abs(value))) if value else 0


def combinations(searched: Sequence[Searched]) -> int | None:
    """Number of distinct settings; None if an option has a continuous range, or nothing is searched."""
    counts = [option.count for option in searched]
    known = [count for count in counts if count is not None]
    return math.prod(known) if known and len(known) == len(counts) else None


def parse(texts: Sequence[str], typed: Typed) -> list[Searched]:
    """Parses the options of ``--search``.

    Args:
        texts: Options, each as ``NAME=SPEC``.
        typed: Parses a value as the recipe's option does.

    Raises:
        OptionError: an option is unknown or given twice, or its values are not of its type.
    """
    searched: dict[str, Searched] = {}
    for text in texts:
        name, equals, spec = text.removeprefix("--").partition("=")
        name = ".".join(map(dashed, name.split(".")))
        if not equals or not spec:
            raise OptionError(
                f"--search is {text!r}; it takes an option with {FORMS}: --search optimizer.learning-rate=log:1e-4..1e-2"
            )
        if name in searched:
            raise OptionError(f"--search names {name} twice; give all of its values in one")
        searched[name] = _searched(name, spec, typed)
    return list(searched.values())


def _searched(name: str, spec: str, typed: Typed) -> Searched:
    log = spec.startswith("log:")
    body = spec.removeprefix("log:")
    if ".." not in body:
        if log:
            raise OptionError(f"--search {name}={spec} has no range; it takes log:LOW..HIGH")
        return _choices(name, spec, typed)
    before, colon, _ = body.partition("..")[0].partition(":")
    if colon:
        raise OptionError(
            f"--search {name}={spec} begins with {before}:; a logarithmic range is log:LOW..HIGH"
        )
    bounds, colon, by = body.partition(":")
    low_word, _, high_word = bounds.partition("..")
    ends = [typed(name, word) for word in (low_word, high_word)]
    for word, value in zip((low_word, high_word), ends, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise OptionError(
                f"--search {name}={spec} is a range, and --{name} takes no numbers ({word!r}); list its values with commas"
            )
    whole = all(isinstance(value, int) for value in ends)
    low, high = ends
    if not -math.inf < high - low < math.inf:
        raise OptionError(
            f"--search {name}={spec} has the bounds {low:g} and {high:g}; a range needs finite numbers"
        )
    if low == high:
        raise OptionError(
            f"--search {name}={spec} begins and ends at {low:g}; give a range, or set --{name} {high_word}"
        )
    if not low < high:
        raise OptionError(
            f"--search {name}={spec} begins at {low:g} and ends at {high:g}; give the smaller one first"
        )
    if log and low <= 0:
        raise OptionError(
            f"--search {name}={spec} begins at {low:g}; a logarithmic range must begin above 0"
        )
    return Searched(
        name=name,
        spec=spec,
        low=low,
        high=high,
        log=log,
        whole=whole,
        step=_step(name, spec, by, high - low, whole=whole, log=log) if colon else None,
    )


def _step(name: str, spec: str, by: str, width: float, *, whole: bool, log: bool) -> float:
    if log:
        raise OptionError(
            f"--search {name}={spec} has a step in a logarithmic range; list the values with commas, or leave :{by} out"
        )
    try:
        step = int(by) if whole else float(by)
    except ValueError:
        step = 0
    if not 0 < step < math.inf:
        what = "a whole number" if whole else "a number"
        raise OptionError(f"--search {name}={spec} has the step {by!r}; it takes {what} above 0")
    if step > width:
        raise OptionError(
            f"--search {name}={spec} has a step of {by}, and the range is {width:g} wide; give a smaller step"
        )
    return step


def _choices(name: str, spec: str, typed: Typed) -> Searched:
    words = spec.split(",")
    choices = {word: typed(name, word) for word in words}
    # Equal in value too: 1e-3 and 0.001 are one setting.
    if len({repr(value) for value in choices.values()}) < len(words):
        raise OptionError(f"--search {name}={spec} has a value twice; give each once")
    if len(words) < 2:
        raise OptionError(
            f"--search {name}={spec} has one value; give {FORMS}, or set --{name} {spec}"
        )
    return Searched(name=name, spec=spec, choices=choices)


def reader(recipe: Recipe) -> Callable[[str, str], Any]:
    """A parser of values of a recipe's options: from the option's name, as typed without dashes, and the text.

    It raises OptionError for an unknown option, OptionError or OutOfRangeError for a wrong value.
    """
    hints = _option_types(recipe.function, "")

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
    kinds = _kinds(hint)
    for kind in kinds:
        try:
            value = _converted(kind, word)
        except ValueError:
            continue
        limit = ranged(hint)
        if limit is not None and (problem := complaint(named, limit, value)) is not None:
            raise OutOfRangeError(problem)
        return value
    takes = list(dict.fromkeys(_type_text(kind) for kind in kinds if kind is not NoneType))
    raise OptionError(f"{named} is {word!r}; it takes {' or '.join(takes)}")


def _kinds(hint: Any) -> list[Any]:
    """Types of which an option takes one, None before those that any text is."""
    plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    if typing.get_origin(plain) not in (typing.Union, UnionType):
        return [plain]
    kinds = [kind for part in typing.get_args(plain) for kind in _kinds(part)]
    return sorted(kinds, key=lambda kind: kind is not NoneType)


def _option_types(function: Callable[..., Any], prefix: str) -> dict[str, Any]:
    """Option as typed, without dashes before it, to its annotated type."""
    hints = typing.get_type_hints(function, include_extras=True)
    types: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, parameter.annotation)
        plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        typed = f"{prefix}{dashed(name)}"
        if isinstance(plain, type) and is_dataclass(plain):
            types |= _option_types(plain, f"{typed}.")
        else:
            types[typed] = hint
    return types


def _converted(kind: Any, word: str) -> Any:
    """A text as a type.

    Raises:
        ValueError: it is none of the type.
    """
    if kind is bool:
        if word.lower() not in _SWITCH:
            raise ValueError
        return _SWITCH[word.lower()]
    if kind is NoneType and word == "None":
        return None
    if typing.get_origin(kind) is tuple:
        return _several(typing.get_args(kind), shlex.split(word))
    if choices := _members(kind):
        if word not in choices:
            raise ValueError
        return choices[word]
    if kind in (int, float, str, Path):
        return kind(word)
    raise ValueError


def _several(kinds: tuple[Any, ...], words: Sequence[str]) -> tuple[Any, ...]:
    """Words as the parts of a tuple.

    Raises:
        ValueError: there are more or fewer, or one is of no type that its part takes.
    """
    if kinds[-1:] == (...,):
        kinds = kinds[:1] * len(words)
    parts = []
    for hint, word in zip(kinds, words, strict=True):
        try:
            parts.append(read_value(hint, word, word))
        except OptionError as error:
            raise ValueError from error
    return tuple(parts)


def _members(kind: Any) -> dict[str, Any]:
    """Choices of an enum or a Literal by their text; {} of another type."""
    if typing.get_origin(kind) is Literal:
        return {str(choice): choice for choice in typing.get_args(kind)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {str(choice.value): choice for choice in kind}
    return {}


def _type_text(kind: Any) -> str:
    if names := sorted(_members(kind)):
        return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    if typing.get_origin(kind) is tuple:
        inner = dict.fromkeys(_type_text(part) for part in typing.get_args(kind) if part is not ...)
        return f"values with spaces between, each {' or '.join(inner)}"
    if typing.get_origin(kind) in (typing.Union, UnionType, Annotated):
        return " or ".join(_type_text(part) for part in _kinds(kind) if part is not NoneType)
    return _TYPE_TEXTS.get(kind, f"no text, but a {inspect.formatannotation(kind)}")


@cache
def optuna() -> Any:
    """Optuna, with its own logging off.

    Raises:
        MissingExtraError: it is not installed.
    """
    with extra("systolic tune", "tune"):
        module = import_module("optuna")
    module.logging.set_verbosity(module.logging.ERROR)
    return module


@contextlib.contextmanager
def settled() -> Generator[None]:
    """Suppresses Optuna's warnings about experimental features; its version is pinned by an upper bound."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna().exceptions.ExperimentalWarning)
        yield


def sqlalchemy() -> Any:
    """SQLAlchemy, which Optuna's storage uses."""
    return import_module("sqlalchemy")
