"""Changes of a run's settings, as they are typed."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from systolic.artifact.record import RunRecord
from systolic.explaining.cause import Cause

_OPTION = re.compile(
    r"--((?:layout|model|optimizer|evaluation)\.[a-z-]+|precision|batch|sequence)\b"
)
"""An option that recipes have; the verbs' own, such as --flags, are always there."""
_LACKS = "(the recipe has no option for it; change it there)"


def settings_of(run: RunRecord) -> "Settings":
    """Settings of the recipe that a run trains."""
    return Settings(run.job.get("options") or {})


class Settings:
    """The options that a run was made with.

    Args:
        options: Arguments of the recipe as ``job.json`` keeps them, nested by part.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._flat = dict(_flat(options, ""))

    def named(self, causes: Iterable[Cause]) -> list[Cause]:
        """Causes whose advice has options as they are typed only where the recipe has them."""
        return [replace(one, advice=[self._named(text) for text in one.advice]) for one in causes]

    def _named(self, text: str) -> str:
        names = {name.replace("_", "-") for name in self._flat}
        lacking = {found[1] for found in _OPTION.finditer(text)} - names
        if not lacking:
            return text
        words = _OPTION.sub(lambda found: found[1] if found[1] in lacking else found[0], text)
        return f"{words} {_LACKS}"

    def get(self, *names: str) -> Any:
        """The value of the first of these options that the recipe has; ``None`` where it has none."""
        return next((self._flat[name] for name in names if name in self._flat), None)

    def change(self, *names: str, value: float | int | str) -> str:
        """An option with a new value: ``--optimizer.learning-rate 0.0003``.

        Args:
            names: Where recipes keep it, most usual first; ``optimizer.learning_rate``.
            value: Of floats three significant digits are shown.
        """
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        for name in names:
            if name in self._flat:
                return f"--{name.replace('_', '-')} {text}"
        what = names[0].rpartition(".")[2].replace("_", " ")
        return f"{what} {text} {_LACKS}"

    def learning_rate(self, value: float) -> str:
        """The peak learning rate."""
        return self.change("optimizer.learning_rate", "learning_rate", value=value)

    def batch(self, value: int, now: int) -> str:
        """Examples a step, by whichever option the run was made with."""
        if self.get("batch") is None and self.get("batch_per_device") is not None:
            each = float(self.get("batch_per_device")) * value / now
            return self.change("batch_per_device", value=each)
        return self.change("batch", value=value)


def _flat(options: Mapping[str, Any], prefix: str) -> Any:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
