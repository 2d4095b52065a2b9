"""Results of a study: its trials as rows, the best ones, and those at an end of their range with the wider range to search."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from systolic.core.units import plural
from systolic.job import Mode, Task
from systolic.report.notebook import notebook_html
from systolic.tuning.objective import Aim
from systolic.tuning.search import Searched
from systolic.tuning.study import SharedStudy, TrialNotes, notes_of

NEAR = 0.02
"""Share of a range, of its logarithm if it is logarithmic, within which a value is at an end."""
WIDER = 10
"""Factor by which a logarithmic range grows."""
HALVES = 4
"""Times that the growth is halved where the recipe refuses the new end."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A best value at an end of its range."""

    option: str
    value: float
    search: str
    """Wider range: ``log:1e-4..1e-1``."""


def edge(option: Searched, value: float, accepts: Callable[[float], bool]) -> Edge | None:
    """The end of a range that a value is at; None if it is at none, or if the end is the option's own limit.

    Args:
        option: The option.
        value: Its best value.
        accepts: Whether the recipe takes a value beyond the range.
    """
    if not option.is_range:
        return None
    place = option.place(value)
    if NEAR < place < 1 - NEAR:
        return None
    upper = place > 0.5
    for end in _ends(option, upper=upper):
        if accepts(end):
            return Edge(option=option.name, value=value, search=_spec(option, end, upper=upper))
    return None


def _ends(option: Searched, *, upper: bool) -> Iterator[float]:
    """New ends, the widest first."""
    low, high = option.low, option.high
    if option.log:
        factors = [WIDER ** (0.5**half) for half in range(HALVES + 1)]
        ends = [high * factor if upper else low / factor for factor in factors]
    else:
        width = high - low
        grown = [width * 0.5**half for half in range(HALVES + 1)]
        ends = [high + more if upper else low - more for more in grown]
        # A share ends at 1 and most numbers at 0, which a wider range would step over.
        limits = (1, 0) if upper else (0, 1)
        ends[1:1] = [
            limit
            for limit in limits
            if (high < limit < ends[0] if upper else ends[0] < limit < low)
        ]
    seen = {low, high}
    for end in ends:
        own = _fitted(option, end, upper=upper)
        if own not in seen:
            seen.add(own)
            yield own


def _fitted(option: Searched, end: float, *, upper: bool) -> float:
    """The end as a number that the option takes: whole, on a step, or of few digits."""
    if option.step is not None:
        start = option.high if upper else option.low
        end = (
            start
            + math.trunc((end - start) / option.step + math.copysign(1e-9, end - start))
            * option.step
        )
    if option.whole:
        return int(end) if upper else math.ceil(end)
    wide = replace(option, low=min(option.low, end), high=max(option.high, end), step=None)
    return wide.rounded(end)


def _spec(option: Searched, end: float, *, upper: bool) -> str:
    """The range with a new end in the place of one; the other as typed."""
    bounds, colon, step = option.spec.removeprefix("log:").partition(":")
    low, _, high = bounds.partition("..")
    text = _as_typed(end, high if upper else low)
    ends = f"{low}..{text}" if upper else f"{text}..{high}"
    return f"{'log:' if option.log else ''}{ends}{colon}{step}"


def _as_typed(value: float, word: str) -> str:
    """A number as the word that it replaces is written: ``1e-1`` for ``1e-2``, ``0.1`` for ``0.01``."""
    if "e" not in word.lower() or 1 <= abs(value) < WIDER:
        return f"{value:.12g}"
    mantissa, _, exponent = f"{value:.6e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial as it is reported."""

    number: int
    state: str
    """``done``, ``stopped early``, ``refused``, ``diverged``, ``failed``, ``running`` or ``waiting``."""
    values: Mapping[str, Any]
    """Option to value, as typed on the command line."""
    figures: Mapping[str, float]
    """Objective to value; the last evaluation if the trial has no result."""
    reason: str = ""
    step: int = 0
    """Step of its last evaluation, or its last step."""
    resumed: int = 0
    """Step of the checkpoint that it was last started from."""
    seconds: float | None = None
    """Time from its run's first record to the last, without pauses between sessions."""
    dollars: float | None = None
    """Forecast price of the steps that ran."""
    parameters: int | None = None
    run: str = ""
    """Folder of its run; empty if it never started."""

    @property
    def is_done(self) -> bool:
        """Whether it has a result."""
        return self.state == "done"


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """Results of a study so far."""

    name: str
    recipe: str
    rows: Sequence[TrialRow]
    total: int
    searched: Sequence[Searched]
    aims: Sequence[Aim]
    importance: Mapping[str, float]
    """Option to its share in the variance of the results, summing to 1; empty for too few results."""
    shares: Collection[str] = Task.shares
    """Metrics of the task that are shares of 1."""
    command: str = ""
    """Command that trains the best settings at full size; empty without a result."""
    stopped: str = ""
    """Why the study ended before all trials were done."""
    repeats: Mapping[str, Any] | None = None
    """Comparison of the best and the default settings over several seeds."""
    price_region: str = ""
    """Region of the price; empty without a slice or a price."""
    price_as_of: str = ""
    examples: int | None = None
    """Number of validation examples if the first objective is the share of correct ones; None otherwise."""
    edges: Sequence[Edge] = ()
    """Best values at an end of their range."""
    first_seed: int | None = None
    """Seed of the first two trials, if the trials alternate between the best and the default settings; None for a search."""

    has_repeats: bool = False
    """Whether the best and the default settings are repeated after the search."""
    page: Path | None = None
    """Page of the results, once it is written."""
    interrupted: bool = False
    """Whether a signal ended the search or its repeats."""

    def __repr__(self) -> str:
        """Trials and the best on one line; the study itself has every trial."""
        best = self.best
        outcome = "no result yet" if best is None else f"best {dict(best.values)}"
        return f"<StudyResult of {self.recipe}: {self.finished} of {plural(self.total, 'trial')}, {outcome}>"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def title(self, row: TrialRow) -> str:
        """Name of a trial: ``trial 5``; where settings are repeated, ``best settings, seed 3``."""
        if self.first_seed is None:
            return f"trial {row.number}"
        which = "default" if row.number % 2 else "best"
        return f"{which} settings, seed {self.first_seed + row.number // 2}"

    @property
    def done(self) -> list[TrialRow]:
        """Trials with a result."""
        return [row for row in self.rows if row.is_done]

    @property
    def different(self) -> list[TrialRow]:
        """Trials with a result, the earliest of each distinct setting."""
        rows: dict[tuple[Any, ...], TrialRow] = {}
        for row in self.done:
            rows.setdefault(tuple(sorted(row.values.items())) or (row.number,), row)
        return list(rows.values())

    @property
    def finished(self) -> int:
        """Number of trials that have ended, with or without a result."""
        return sum(row.state not in ("running", "waiting") for row in self.rows)

    @property
    def front(self) -> list[TrialRow]:
        """Pareto front, best by the first objective first, with the earliest of equal settings; with one objective, the best trial."""
        done = self.different
        if len(self.aims) == 1:
            return [best] if (best := self.best) is not None else []
        kept = [row for row in done if not any(self._beats(other, row) for other in done)]
        name, is_max = self.aims[0].name, self.aims[0].mode is Mode.max
        return sorted(kept, key=lambda row: row.figures[name], reverse=is_max)

    @property
    def best(self) -> TrialRow | None:
        """Best trial by the first objective; the earliest of equal ones."""
        aim, best = self.aims[0], None
        for row in self.done:
            if best is None or aim.better(row.figures[aim.name], best.figures[aim.name]):
                best = row
        return best

    @property
    def near(self) -> int:
        """Number of other settings whose result is within one example of the best."""
        best, name = self.best, self.aims[0].name
        if best is None or not self.examples:
            return 0
        # Between one and two examples, since the shares are rounded.
        most = 1.5 / self.examples
        gaps = [abs(row.figures[name] - best.figures[name]) for row in self.different]
        return sum(gap < most for gap in gaps) - 1

    @property
    def price(self) -> str:
        """Region and date of the price: ``us-central1, 2026``."""
        return ", ".join(filter(None, (self.price_region, self.price_as_of)))

    @property
    def dollars(self) -> float | None:
        """Forecast price of all steps that ran; None if no trial has one."""
        known = [row.dollars for row in self.rows if row.dollars is not None]
        return sum(known) if known else None

    def best_so_far(self) -> list[tuple[int, float]]:
        """(trial, best value so far) by the first objective, for each trial with a result."""
        aim, bests = self.aims[0], []
        for row in self.done:
            value = row.figures[aim.name]
            if bests and not aim.better(value, bests[-1][1]):
                value = bests[-1][1]
            bests.append((row.number, value))
        return bests

    def _beats(self, row: TrialRow, other: TrialRow) -> bool:
        pairs = [(aim, row.figures[aim.name], other.figures[aim.name]) for aim in self.aims]
        as_good = all(not aim.better(b, a) for aim, a, b in pairs)
        return as_good and any(aim.better(a, b) for aim, a, b in pairs)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        best = self.best
        return {
            "study": self.name,
            "recipe": self.recipe,
            "search": [option.text for option in self.searched],
            "objectives": [aim.text for aim in self.aims],
            "trials": [asdict(row) for row in self.rows],
            "total": self.total,
            "finished": self.finished,
            "best": None if best is None else asdict(best),
            "front": [row.number for row in self.front],
            "importance": dict(self.importance),
            "edges": [asdict(end) for end in self.edges],
            "dollars": self.dollars,
            "price_region": self.price_region or None,
            "price_as_of": self.price_as_of or None,
            "command": self.command or None,
            "stopped": self.stopped or None,
            "repeats": self.repeats,
        }


def rows_of(
    shared: SharedStudy,
    total: int,
    searched: Sequence[Searched],
    aims: Sequence[Aim],
    folder: Path,
) -> list[TrialRow]:
    """Rows of the study's trials, by number."""
    return [_row(trial, searched, aims, folder) for trial in shared.trials(total)]


def _row(trial: Any, searched: Sequence[Searched], aims: Sequence[Aim], folder: Path) -> TrialRow:
    notes = notes_of(trial)
    values = {
        each.name: each.shown(trial.params[each.name])
        for each in searched
        if each.name in trial.params
    }
    last = max(trial.intermediate_values, default=0)
    figures = {}
    if trial.state.name == "COMPLETE":
        figures = {aim.name: value for aim, value in zip(aims, trial.values, strict=True)}
    elif last and math.isfinite(trial.intermediate_values[last]):
        figures = {aims[0].name: trial.intermediate_values[last]}
    # The share of steps that ran; a running trial counts in full.
    share = 1.0 if trial.state.name == "RUNNING" or notes.share is None else notes.share
    dollars, run = notes.dollars, folder / f"{trial.number:04d}"
    return TrialRow(
        number=trial.number,
        state=_state(trial, notes),
        values=values,
        figures=figures,
        reason=notes.reason,
        step=max(notes.steps or 0, last),
        resumed=0 if notes.begun is None else notes.begun[0],
        seconds=notes.seconds,
        dollars=None if dollars is None or _never_ran(trial, notes) else dollars * share,
        parameters=notes.parameters,
        run=str(run) if run.is_dir() else "",
    )


def _never_ran(trial: Any, notes: TrialNotes) -> bool:
    waits = trial.state.name == "WAITING" and notes.share is None and notes.begun is None
    return waits or notes.reason.startswith("refused")


def _state(trial: Any, notes: TrialNotes) -> str:
    if trial.state.name == "PRUNED":
        first = notes.reason.partition(":")[0]
        return first if first in ("refused", "failed") else "stopped early"
    names = {"COMPLETE": "done", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
    return names[trial.state.name]
