"""What is searched: an option of the recipe with its range or its choices, as ``--search`` names it.

``log:1e-4..1e-2`` is a range of logarithms, ``0..0.3`` a range, ``128..512:64`` one in steps, ``4,6,8`` a list of choices.
The option's own type says whether a range is of whole numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from systolic.core.errors import OptionError
from systolic.tuning.engine import optuna

FORMS = "a range as 1..8, 128..512:64 or log:1e-4..1e-2, or choices as 4,6,8"
DIGITS = 4
"""Digits of a number that is drawn from a range, and of the range's width, so that a command with it is read."""

Typed = Callable[[str, str], Any]
"""Value of an option from its word; raises OptionError."""
Value = str | int | float | bool | None
"""A choice as the study keeps it: a number, or the word as it is typed."""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """An option that is searched; either ``choices``, or a range from ``low`` to ``high``."""

    name: str
    """As it is typed, without dashes before it: ``optimizer.learning-rate``."""
    spec: str
    """As it was given after the equals sign."""
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False
    choices: Mapping[str, Any] | None = None
    """Word to value."""

    @property
    def is_range(self) -> bool:
        """Whether numbers are drawn from a range."""
        return self.choices is None

    @property
    def text(self) -> str:
        """As it was given: ``model.layers=4,6,8``."""
        return f"{self.name}={self.spec}"

    @property
    def words(self) -> tuple[Value, ...]:
        """Choices as the study keeps them."""
        assert self.choices is not None
        return tuple(
            value if type(value) in (int, float, bool) else word
            for word, value in self.choices.items()
        )

    @property
    def distribution(self) -> Any:
        """As Optuna has it."""
        kinds = optuna().distributions
        if self.choices is not None:
            return kinds.CategoricalDistribution(list(self.words))
        if self.whole:
            low, high = int(self.low), int(self.high)
            return kinds.IntDistribution(low, high, step=int(self.step or 1), log=self.log)
        return kinds.FloatDistribution(self.low, self.high, step=self.step, log=self.log)

    def suggest(self, trial: Any) -> Any:
        """The option's value in a trial; Optuna draws it once and keeps it."""
        if self.choices is not None:
            return self.typed(trial.suggest_categorical(self.name, list(self.words)))
        if self.whole:
            low, high = int(self.low), int(self.high)
            return trial.suggest_int(self.name, low, high, step=int(self.step or 1), log=self.log)
        return self.typed(
            trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)
        )

    def typed(self, kept: Value) -> Any:
        """The option's value from what the study keeps of it."""
        if self.choices is not None:
            return list(self.choices.values())[self.words.index(kept)]
        return self.shown(kept)

    def rounded(self, value: float) -> float:
        """A number of the range with few digits, within its bounds; of a range in steps the nearest of them."""
        if self.step is not None:
            first, step = (Decimal(str(each)) for each in (self.low, self.step))
            return float(first + round((value - self.low) / self.step) * step)
        places = max(_places(value), _places(self.high - self.low))
        return min(max(round(value, places), self.low), self.high)

    def grid(self) -> Sequence[Value]:
        """All values, for a search of every one.

        Raises:
            OptionError: the range has no steps.
        """
        if self.choices is not None:
            return self.words
        if self.log or (not self.whole and self.step is None):
            raise OptionError(
                f"--search {self.text} is a range without steps, and a grid needs values; list them as {self.name}=a,b,c or give a step as a..b:step"
            )
        step = self.step or 1
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        values = [self.low + step * place for place in range(count)]
        return [int(value) if self.whole else self.rounded(value) for value in values]

    @property
    def count(self) -> int | None:
        """Number of its values; None for a range without steps."""
        if self.choices is not None:
            return len(self.choices)
        if self.whole and self.step is None:
            return int(self.high) - int(self.low) + 1
        return None if self.step is None else len(self.grid())

    def at(self, place: int) -> Value:
        """The value at a place among :attr:`count`."""
        if self.whole and self.step is None:
            return int(self.low) + place
        return self.grid()[place]

    def place(self, value: Any) -> float:
        """Where a value lies between the first (0) and the last (1) of this option."""
        if self.choices is not None:
            kept = list(self.words)
            return kept.index(value) / max(len(kept) - 1, 1)
        if self.high == self.low:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def shown(self, value: Any) -> Any:
        """A value of the study as the trial's run has it."""
        if self.is_range and not self.whole:
            return self.rounded(value)
        return value


def _places(value: float) -> int:
    """Digits after the point at which a number has :data:`DIGITS` of them."""
    return DIGITS - 1 - math.floor(math.log10(abs(value))) if value else 0


def combinations(searched: Sequence[Searched]) -> int | None:
    """Number of different settings; None where an option is a range without steps, or nothing is searched."""
    counts = [one.count for one in searched]
    known = [count for count in counts if count is not None]
    return math.prod(known) if known and len(known) == len(counts) else None


def parse(given: Sequence[str], typed: Typed) -> list[Searched]:
    """The options of ``--search``.

    Args:
        given: Each as ``NAME=SPEC``.
        typed: Reads a value as the recipe's option takes it.

    Raises:
        OptionError: an option is unknown or given twice, or its values are not of its type.
    """
    found: dict[str, Searched] = {}
    for text in given:
        name, equals, spec = text.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if not equals or not spec:
            raise OptionError(
                f"--search is {text!r}; it takes an option with {FORMS}: --search optimizer.learning-rate=log:1e-4..1e-2"
            )
        if name in found:
            raise OptionError(f"--search has {name} twice; give all of its values once")
        found[name] = _searched(name, spec, typed)
    return list(found.values())


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
            f"--search {name}={spec} begins with {before}:; a range of logarithms is log:LOW..HIGH"
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
            f"--search {name}={spec} goes from {low:g} to {high:g}; a range needs finite numbers"
        )
    if not low < high:
        raise OptionError(
            f"--search {name}={spec} begins at {low:g} and ends at {high:g}; give the smaller one first"
        )
    if log and low <= 0:
        raise OptionError(f"--search {name}={spec} begins at {low:g}; logarithms need more than 0")
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
            f"--search {name}={spec} has steps of a logarithm; list the values with commas, or leave :{by} out"
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
            f"--search {name}={spec} has steps of {by}, and the range is {width:g} wide; give a smaller one"
        )
    return step


def _choices(name: str, spec: str, typed: Typed) -> Searched:
    words = spec.split(",")
    if len(set(words)) < len(words):
        raise OptionError(f"--search {name}={spec} has a value twice; give each once")
    if len(words) < 2:
        raise OptionError(f"--search {name}={spec} has one value; give {FORMS}, or --{name} {spec}")
    return Searched(name=name, spec=spec, choices={word: typed(name, word) for word in words})
