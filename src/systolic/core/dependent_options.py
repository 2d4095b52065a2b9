"""Options that have an effect only beside another one, stated once at the field.

``ngram_rows: Annotated[int, Needs("model.ngrams", "model.ngrams is 0", lambda m: m.ngrams)]`` says that a value other than
the default is a mistake in a record whose ``ngrams`` is 0; :func:`check_needs` in ``__post_init__`` refuses it.
"""

import enum
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

from systolic.core.errors import OptionError


@dataclass(frozen=True, slots=True)
class Needs:
    """The option that a field depends on."""

    partner: str
    """The option to set, as it is typed."""
    lacking: str
    """Why the field has no effect, for the message."""
    given: Callable[[Any], Any]
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
            if need.given(record):
                continue
            for option, value in _changed(record, name):
                raise OptionError(
                    f"{prefix}.{option.replace('_', '-')} is {value} but {need.lacking}, so that it has no effect; leave it out, or set {need.partner}"
                )


@lru_cache
def _needs(kind: type) -> dict[str, list[Needs]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    found = {
        name: [extra for extra in typing.get_args(hint)[1:] if isinstance(extra, Needs)]
        for name, hint in hints.items()
        if typing.get_origin(hint) is typing.Annotated
    }
    return {name: needs for name, needs in found.items() if needs}


def _changed(record: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The field, or the fields of the record that it holds, that are not at their default, with their values."""
    field = next(one for one in fields(record) if one.name == name)
    value = getattr(record, name)
    default = field.default if field.default is not MISSING else None
    if is_dataclass(value) and not isinstance(value, type):
        for inner in fields(value):
            for option, one in _changed(value, inner.name):
                yield f"{name}.{option}", one
    elif value != default:
        yield name, value.value if isinstance(value, enum.Enum) else value
