"""Ranges of numbers, choices of words, and options that need another one: stated once beside their field or parameter.

``learning_rate: Annotated[float, Range(above=0)] = 3e-4`` says what the field takes; :func:`check` in
the record's ``__post_init__`` enforces it, and the command line checks the parameters of its verbs
alike. Every number is finite, and a whole number fits the 32 bits that devices count in. A field or parameter of an
enum takes a member or its text, as on the command line: ``Layout(remat="full")``.
"""

import enum
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar

from systolic.core.errors import OptionError, OutOfRangeError, nearest

P = ParamSpec("P")
R = TypeVar("R")

LARGEST_INT = 2**31 - 1
"""Steps, token ids and seeds are int32 on the devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The numbers that a field takes. ``None`` leaves a side open.

    ``only`` are values that are allowed beside the range, such as a 0 that turns something off.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    only: tuple[float, ...] = ()

    def __contains__(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return value in self.only or (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """``0, or above 1``, ``at least 0 and below 1``."""
        sides = [
            f"{word} {_digits(value)}"
            for word, value in (
                ("at least", self.least),
                ("above", self.above),
                ("at most", self.most),
                ("below", self.below),
            )
            if value is not None
        ]
        text = " and ".join(sides) or "finite"
        return ", or ".join([*(_digits(value) for value in self.only), text])


COUNT = Range(least=1)
"""Number of things, at least one."""
NOT_NEGATIVE = Range(least=0)
POSITIVE = Range(above=0)
CONTEXT = Range(least=2, only=(0,))
"""Tokens of a text, one of a prompt and one of its answer at least; 0 takes the model's own."""
SHARE = Range(least=0, below=1)
"""Part of a whole that is less than all of it, or the decay of a moving average."""


class Ranged(typing.NamedTuple):
    """Type and range of one field or parameter."""

    range: Range
    whole: bool
    """Whether it takes whole numbers only."""
    optional: bool
    """Whether it takes ``None``."""
    several: bool
    """Whether it is a tuple of such numbers."""


def dashed(name: str) -> str:
    """A parameter as its option is typed: ``batch-per-device``; ``from`` of ``from_``, which Python does not take."""
    return name.rstrip("_").replace("_", "-")


def check(record: Any, prefix: str = "", error: type[Exception] = OutOfRangeError) -> None:
    """Checks the ranged fields of a dataclass instance, and puts the member of an enum in place of its text.

    Args:
        record: The instance; its class annotates fields with :class:`Range`.
        prefix: What the options of its fields begin with, as in ``model`` for ``--model.layers``.
        error: Type of the exception.

    Raises:
        OutOfRangeError: or ``error``, for the first value out of its range: the value and the range.
        OptionError: or ``error``, for a value that is no member of its field's enum.
    """
    # A search makes a hundred thousand layouts, nearly all of them valid.
    for name, choice in choices_of(type(record)).items():
        held = getattr(record, name)
        if type(held) is choice.kind and not choice.several:
            continue
        try:
            member = choice.member(_option(f"{prefix}.{name}" if prefix else name), held)
        except OptionError as invalid:
            raise (invalid if error is OutOfRangeError else error(str(invalid))) from invalid
        if member is not held:
            object.__setattr__(record, name, member)  # the record is frozen, and not made yet
    for name, ranged in ranges_of(type(record)).items():
        value = getattr(record, name)
        if complaint(name, ranged, value) is not None:
            option = _option(f"{prefix}.{name}" if prefix else name)
            raise error(str(complaint(option, ranged, value)))


def check_arguments(
    function: Callable[..., Any], values: Mapping[str, Any], spell: Callable[[str], str]
) -> None:
    """Checks the ranged parameters of a function against the values that it is to be called with.

    Raises:
        OutOfRangeError: for the first one out of its range; ``spell`` gives the option as the user typed it.
    """
    for name, ranged in ranges_of(function).items():
        if name in values:
            invalid = complaint(spell(name), ranged, values[name])
            if invalid is not None:
                raise OutOfRangeError(invalid)


class EnumChoice(typing.NamedTuple):
    """Enum of one field or parameter."""

    kind: type[enum.Enum]
    optional: bool
    """Whether it takes ``None``."""
    several: bool
    """Whether it is a tuple of members."""

    def member(self, name: str, value: Any) -> Any:
        """The member that a value is or names, or several of them.

        Raises:
            OptionError: there is no such member; ``name`` is what the message calls the option.
        """
        if self.several and not isinstance(value, str):
            members = tuple(self._member(name, part) for part in value)
            return value if members == value else members
        if self.several:
            return (self._member(name, value),)
        return None if value is None and self.optional else self._member(name, value)

    def _member(self, name: str, value: Any) -> enum.Enum:
        if isinstance(value, self.kind):
            return value
        known = {str(choice.value): choice for choice in self.kind}
        plain = str(value.value if isinstance(value, enum.Enum) else value)
        named = known.get(plain) or known.get(plain.lower().replace("_", "-"))
        if named is None or isinstance(value, bool):
            near = nearest(value, known) if isinstance(value, str) else ""
            raise OptionError(f"{name} is {value!r}{near}; it takes {', '.join(known)}")
        return named


@lru_cache
def choices_of(annotated: Any) -> Mapping[str, EnumChoice]:
    """Name to choice of the fields of a class or the parameters of a function that take members of an enum."""
    hints = typing.get_type_hints(annotated)
    choices = {name: _choice(hint) for name, hint in hints.items() if name != "return"}
    return {name: choice for name, choice in choices.items() if choice is not None}


def _choice(hint: Any) -> EnumChoice | None:
    kinds = [kind for kind in _alternatives(hint) if kind is not NoneType]
    if len(kinds) != 1:
        return None
    several = typing.get_origin(kinds[0]) is tuple
    kind = typing.get_args(kinds[0])[0] if several and typing.get_args(kinds[0]) else kinds[0]
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return None
    return EnumChoice(kind=kind, optional=NoneType in _alternatives(hint), several=several)


def complaint(name: str, ranged: Ranged, value: Any) -> str | None:
    """Describes in one line why a value is invalid; ``None`` if it is valid."""
    if value is None and ranged.optional:
        return None
    for number in value if ranged.several else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            return (
                f"{name} is {number!r}; it takes {'a whole number' if ranged.whole else 'a number'}"
            )
        if ranged.whole and not isinstance(number, int):
            return f"{name} is {number!r}; it takes a whole number"
        if not math.isfinite(number):
            return f"{name} is {number}, not a finite number; it must be {ranged.range}"
        if number not in ranged.range:
            return f"{name} is {number}; it must be {ranged.range}"
        if ranged.whole and number > LARGEST_INT:
            return f"{name} is {number}; it must be at most {LARGEST_INT}"
    return None


@lru_cache
def ranges_of(annotated: Any) -> Mapping[str, Ranged]:
    """Name to range of the fields of a class or the parameters of a function that have one."""
    hints = typing.get_type_hints(annotated, include_extras=True)
    limits = {name: ranged(hint) for name, hint in hints.items()}
    return {name: limit for name, limit in limits.items() if limit is not None}


def ranged(hint: Any) -> Ranged | None:
    """Range of a hint, beside the type or, as in ``Annotated[float, POSITIVE] | None``, beside an alternative."""
    if typing.get_origin(hint) is not typing.Annotated:
        parts = _alternatives(hint)
        limit = next(filter(None, map(ranged, parts)), None) if len(parts) > 1 else None
        return limit and limit._replace(optional=limit.optional or NoneType in parts)
    inner, *extras = typing.get_args(hint)
    for extra in extras:
        if isinstance(extra, Range):
            kinds = _alternatives(inner)
            several = any(typing.get_origin(kind) is tuple for kind in kinds)
            numbers = {
                part for kind in kinds for part in (typing.get_args(kind) if several else (kind,))
            }
            return Ranged(
                range=extra, whole=float not in numbers, optional=NoneType in kinds, several=several
            )
    return None


def _digits(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, UnionType)
    return typing.get_args(hint) if union else (hint,)


def _option(name: str) -> str:
    """Name of a field's option, without the leading dashes."""
    return re.sub("_", "-", name)


@dataclass(frozen=True, slots=True)
class Needs:
    """The option that a field depends on.

    ``ngram_rows: Annotated[int, Needs("model.ngrams", "model.ngrams is 0", lambda m: m.ngrams)]`` says that a value other than
    the default is a mistake in a record whose ``ngrams`` is 0; :func:`check_needs` in ``__post_init__`` refuses it.
    """

    partner: str
    """The option to set, as it is typed."""
    lacking: str
    """Why the field has no effect, for the message."""
    holds: Callable[[Any], Any]
    """Whether the field has an effect, from the record that has it."""


def check_needs(record: Any, prefix: str) -> None:
    """Refuses values that differ from the default and have no effect.

    Args:
        record: A dataclass instance whose class annotates fields with :class:`Needs`.
        prefix: What the options of its fields begin with, as ``model``.

    Raises:
        OptionError: for the first of them: the option, its value and the partner that it needs.
    """
    for name, needs in _needs(type(record)).items():
        for need in needs:
            if need.holds(record):
                continue
            for option, value in _changed(record, name):
                raise OptionError(
                    f"{prefix}.{option.replace('_', '-')} is {value} but {need.lacking}, so that it has no effect; leave it out, or set {need.partner}"
                )


@lru_cache
def _needs(kind: type) -> dict[str, list[Needs]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    needs_of = {
        name: [extra for extra in typing.get_args(hint)[1:] if isinstance(extra, Needs)]
        for name, hint in hints.items()
        if typing.get_origin(hint) is typing.Annotated
    }
    return {name: needs for name, needs in needs_of.items() if needs}


def _changed(record: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The field, or the fields of the record that it holds, that are not at their default, with their values."""
    field = next(declared for declared in fields(record) if declared.name == name)
    value = getattr(record, name)
    default = field.default if field.default is not MISSING else None
    if is_dataclass(value) and not isinstance(value, type):
        for inner in fields(value):
            for option, inner_value in _changed(value, inner.name):
                yield f"{name}.{option}", inner_value
    elif value != default:
        yield name, value.value if isinstance(value, enum.Enum) else value
