"""Advice in terms of a recipe's options, as typed on the command line."""

import inspect
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from systolic import recipes
from systolic.core.ranges import dashed
from systolic.runs.paths import located
from systolic.runs.record import RunRecord

TRAINING = (
    *("steps", "batch", "batch_per_device", "seed", "sample", "prompt", "precision", "optimizer"),
    *("schedule", "dtypes", "layout", "evaluation", "checkpoints", "guard"),
)
"""Options of recipes that say nothing of the data."""
_LACKS = "(the recipe has no option for it; change it there)"


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice whose text has ``{}`` in place of each option of the recipe."""

    text: str
    options: tuple[str, ...]
    """``layout.fsdp``, ``precision``."""
    plain: str = ""
    """The same for a program that no recipe made; empty where there is nothing to say then."""


def advise(text: str, *options: str, plain: str = "") -> Advice:
    """Advice with these options: ``advise("a smaller {} with more {}", "layout.tensor", "layout.fsdp")``."""
    return Advice(text, options, plain)


def settings_of(run: RunRecord) -> "Settings":
    """Settings of the recipe that a run trains."""
    return Settings(run.job.options, run.job.job)


def inspecting(run: RunRecord) -> str:
    """Command that shows a run's data, with the options that its data was made with; "" of a run without a recipe."""
    recipe = run.job.recipe
    if not recipe:
        return ""
    recorded = run.job.options
    shared = dict(_flat(recorded, ""))
    if recipe in recipes.shipped():
        # Its types tell which options are paths, and its defaults what need not be given.
        shipped = recipes.find(recipe)
        options = located(recipes.typed(shipped, recorded), run.path, run.job.directory)
        parameters = inspect.signature(shipped.function).parameters
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        usual = dict(_flat(recipes.plain(defaults), ""))
        shared = dict(_flat(recipes.plain(options), ""))
        shared = {n: v for n, v in shared.items() if n not in usual or v != usual[n]}
    words = [
        word
        for name, value in shared.items()
        if name.partition(".")[0] not in TRAINING and value not in (None, "", [])
        for word in _option(name, value)
    ]
    return shlex.join(["systolic", "data", "inspect", recipe, *words])


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        part, dot, last = dashed(name).rpartition(".")
        return [f"--{part}{dot}{'' if value else 'no-'}{last}"]
    return [f"--{dashed(name)}", *map(str, value if isinstance(value, list) else [value])]


class Settings:
    """The options that a run was made with.

    Args:
        options: Arguments of the recipe as ``job.json`` keeps them, nested by part.
        job: The job made from them: what an option is that was left to the recipe.
    """

    def __init__(self, options: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> None:
        settled = dict(_flat(job or {}, ""))
        chosen = dict(_flat(options, ""))
        self._flat = {n: settled.get(n) if v is None else v for n, v in chosen.items()}

    def render(self, advice: Advice | str) -> str:
        """Text of advice: options as typed where the recipe has them, else their names."""
        if isinstance(advice, str):
            return advice
        lacking = [name for name in advice.options if name not in self._flat]
        text = advice.text.format(*(_typed(name, name in lacking) for name in advice.options))
        return f"{text} {_LACKS}" if lacking else text

    def get(self, *names: str) -> Any:
        """The value of the first of these options that the recipe has; ``None`` where it has none."""
        return next((self._flat[name] for name in names if name in self._flat), None)

    def change(self, *names: str, value: float | int | str) -> str:
        """An option with a new value: ``--optimizer.learning-rate 0.0003``; "" where it has that value already.

        Args:
            names: Names of the option in recipes, most usual first; ``optimizer.learning_rate``.
            value: The new value; floats are shown with three significant digits.
        """
        text = _text(value)
        for name in names:
            if name in self._flat:
                return "" if text == _text(self._flat[name]) else f"{_typed(name)} {text}"
        what = names[0].rpartition(".")[2].replace("_", " ")
        return f"{what} {text} {_LACKS}"

    def higher(self, *names: str, value: float) -> str:
        """Raises an option as :meth:`change`; "" where it is as high already."""
        now = self.get(*names)
        return (
            ""
            if isinstance(now, int | float) and now >= value
            else self.change(*names, value=value)
        )

    def lower(self, *names: str, value: float) -> str:
        """Lowers an option as :meth:`change`; "" where it is as low already. 0 is no limit, and above all."""
        now = self.get(*names)
        return (
            ""
            if isinstance(now, int | float) and 0 < now <= value
            else self.change(*names, value=value)
        )

    def has(self, *names: str) -> bool:
        """Whether the recipe has one of these options."""
        return any(name in self._flat for name in names)

    def learning_rate(self, value: float) -> str:
        """The peak learning rate."""
        return self.change("optimizer.learning_rate", "learning_rate", value=value)

    def batch(self, value: int, now: int) -> str:
        """Examples a step, through the batch option that the run was made with."""
        if self.get("batch") is None and self.get("batch_per_device") is not None:
            each = float(self.get("batch_per_device")) * value / now
            return self.change("batch_per_device", value=each)
        return self.change("batch", value=value)


def render(advice: Advice | str, settings: Settings | None, foreign: bool = False) -> str:
    """Renders as :meth:`Settings.render`; without settings as if the recipe had every option, of a foreign program without options."""
    if isinstance(advice, str):
        return advice
    if foreign:
        return advice.plain
    if settings is not None:
        return settings.render(advice)
    return advice.text.format(*map(_typed, advice.options))


def changes(advice: Iterable[str]) -> list[str]:
    """Advice that changes something: without texts that are empty, and each once."""
    return list(dict.fromkeys(text for text in advice if text))


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _typed(name: str, lacking: bool = False) -> str:
    return f"{'' if lacking else '--'}{dashed(name)}"


def _flat(options: Mapping[str, Any], prefix: str) -> Any:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
