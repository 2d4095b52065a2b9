"""Changes of settings for a slow step, each compiled and simulated again: the gain is found, not guessed."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from systolic.chips import Slice
from systolic.core.errors import SystolicError
from systolic.core.units import gibibytes
from systolic.forecasting import Forecast
from systolic.job import Axis, Layout, Precision, Remat
from systolic.job.layout import Group
from systolic.planning import variants
from systolic.planning.analytic import analyse, capacity
from systolic.planning.candidate import Candidate
from systolic.planning.change import Change, ChangedPart, compatible, layout_change, together
from systolic.planning.evaluator import CandidateEvaluator, PendingForecast
from systolic.planning.facts import Facts
from systolic.planning.space import NAMED, check, narrower

GAIN = 0.005
"""Share of the step below which a change counts as no gain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change that was compiled."""

    text: str
    """``remat full -> minimal``."""
    candidate: Candidate
    same_result: bool = True
    """Whether the trained model stays the same but for rounding."""
    step_seconds: float | None = None
    units_per_second: float | None = None
    need_bytes: int = 0
    have_bytes: int
    gain: float | None = None
    """Units a second over the present ones, less 1; None when it does not fit or compile."""
    problem: str = ""

    @property
    def verdict(self) -> str:
        """``+11 % (fits, 13.9 of 15.7 GiB)``."""
        if self.problem:
            return self.problem
        size = f"{gibibytes(self.need_bytes)} of {gibibytes(self.have_bytes)}"
        if self.gain is None:
            return f"does not fit: {size}"
        if abs(self.gain) < GAIN:
            return f"no gain (fits, {size})"
        return f"{self.gain:+.1%} (fits, {size})"

    def to_json(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Plain values; ``settings`` are the options that make it."""
        return {
            "change": self.text,
            "settings": settings,
            "flags": list(self.candidate.compiler_flags),
            "same_result": self.same_result,
            "fits": self.gain is not None,
            "step_seconds": self.step_seconds,
            "gain": self.gain,
            "need_bytes": self.need_bytes,
            "have_bytes": self.have_bytes,
            "verdict": self.verdict,
        }


def changes(facts: Facts, base: Candidate) -> list[Change]:
    """Single changes of a candidate, the likeliest gains by the analytic model first."""
    have = capacity(base.on)
    speeds: dict[Change, float] = {}
    for one in _all(facts, base):
        after = one.on(base)
        if check(facts.job, after) is None:
            found = analyse(facts, after)
            if found.bytes_bound <= have:
                over = found.bytes_estimate > 1.3 * have
                speeds[one] = found.seconds_estimate / after.batch * (10 if over else 1)
    # Not five meshes in a row: the first of each kind, then the second …
    kinds: Counter[frozenset[Group | ChangedPart]] = Counter()
    turns: dict[Change, int] = {}
    for one in sorted(speeds, key=lambda change: speeds[change]):
        kinds[one.touches] += 1
        turns[one] = kinds[one.touches] + (0 if one.same_result else 2)
    return sorted(turns, key=lambda change: turns[change])


def _all(facts: Facts, base: Candidate) -> Iterator[Change]:
    layout = base.layout
    yield from _policies(facts, layout)
    for accumulate in (layout.accumulate // 2, layout.accumulate * 2):
        if accumulate >= 1:
            yield layout_change(accumulate=accumulate)
    yield from _meshes(facts, layout)
    yield from variants.changes(facts.job, base)
    # What the training itself would notice:
    yield Change(batch=2 * base.batch)
    if base.precision is Precision.bf16:
        for precision in narrower(facts.job, base.on):
            yield Change(precision=precision)
    if base.precision is Precision.f32:
        yield Change(precision=Precision.bf16)


def _policies(facts: Facts, layout: Layout) -> Iterator[Change]:
    known = facts.job.model.policies()
    for remat in (Remat.none, Remat.minimal, Remat.save_names, Remat.full):
        for names in NAMED if remat is Remat.save_names else (layout.remat_names,):
            same = remat is layout.remat
            if remat is Remat.save_names:
                same = same and names == layout.remat_names
            if remat in known and not same:
                yield layout_change(remat=remat, remat_names=names, saved_names=())


def _meshes(facts: Facts, layout: Layout) -> Iterator[Change]:
    """Half of one axis given to another."""
    axes = [axis for axis in Axis if axis in facts.job.model.axes() and axis is not Axis.pipeline]
    for source, target in itertools.permutations(axes, 2):
        size = layout.size(source)
        if size % 2 == 0:
            yield layout_change(**{source.value: size // 2, target.value: 2 * layout.size(target)})


RemedyWatch = Callable[[Remedy, int, int], None]
"""Is given each remedy in the order of the changes, how many are compiled, and of how many."""


def try_all(
    facts: Facts,
    made: Forecast,
    base: Candidate,
    wanted: Sequence[Change],
    evaluator: CandidateEvaluator,
    watch: RemedyWatch = lambda *_: None,
) -> list[Remedy]:
    """Each change compiled up to its schedule and simulated, the largest gain first.

    Then, when several helped, all of them together.

    Args:
        facts: Of the job.
        made: Forecast of ``base``, which gains are measured against.
        base: What is changed.
        wanted: Changes to try.
        evaluator: Forecasts what is tried.
        watch: Is given each remedy as it comes.
    """

    def start(candidate: Candidate) -> PendingForecast:
        return evaluator.submit(facts.job, candidate, full=False)

    found: dict[Change, Remedy] = {}
    # Answers are taken in the order of the changes, whichever compile ends first.
    for one, pending in [(one, start(one.on(base))) for one in wanted]:
        text = one.text(base)
        found[one] = _remedy(made, one.on(base), pending, text, same_result=one.same_result)
        watch(found[one], len(found), len(wanted))
    joint = compatible(_helped(found))
    after = together(base, joint)
    last = []
    if len(joint) > 1 and check(facts.job, after) is None:
        text = "together: " + "; ".join(found[one].text for one in joint)
        last.append(_remedy(made, after, start(after), text, same_result=True))
        watch(last[0], len(found) + 1, len(wanted) + 1)
    return sorted((*found.values(), *last), key=lambda one: -_gain(one))


def _gain(one: Remedy) -> float:
    return -9.0 if one.gain is None else one.gain


def _helped(found: Mapping[Change, Remedy]) -> list[Change]:
    """Changes that gain something and train the same, the largest gain first."""
    good = [one for one in found if one.same_result and _gain(found[one]) > GAIN]
    return sorted(good, key=lambda one: -_gain(found[one]))


def _remedy(
    base: Forecast, candidate: Candidate, pending: PendingForecast, text: str, *, same_result: bool
) -> Remedy:
    have = int(capacity(candidate.on))
    try:
        found = pending.result()
    except SystolicError as error:
        return Remedy(
            text=text,
            candidate=candidate,
            same_result=same_result,
            have_bytes=have,
            problem=str(error),
        )
    need = found.memory.peak_bytes if found.memory is not None else 0
    need = need or int((found.rejected or {}).get("need_bytes", 0))
    speed, before = found.units_per_second, base.units_per_second
    gain = speed / before - 1 if speed and before and found.fits else None
    return Remedy(
        text=text,
        candidate=candidate,
        same_result=same_result,
        step_seconds=found.step_seconds,
        units_per_second=speed,
        need_bytes=need,
        have_bytes=have,
        gain=gain,
    )


def base_of(facts: Facts, on: Slice, flags: tuple[str, ...] = ()) -> Candidate:
    """The job's own layout as a candidate, compiled with these flags.

    Raises:
        LayoutError: it does not divide the slice, the model or the batch.
    """
    job = facts.job.settle(on)
    return Candidate(
        on=on,
        layout=job.layout,
        batch=job.batch.resolve(job.layout),
        precision=job.precision,
        base=flags,
    )
