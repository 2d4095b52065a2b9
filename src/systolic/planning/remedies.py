"""Changes of settings for a slow step, each compiled and simulated for its gain."""

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
"""Relative gain below which a change counts as no gain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Compiled change."""

    text: str
    """``remat full -> minimal``."""
    candidate: Candidate
    same_result: bool = True
    """Whether training gives the same model but for rounding."""
    step_seconds: float | None = None
    units_per_second: float | None = None
    need_bytes: int = 0
    have_bytes: int
    gain: float | None = None
    """Units a second over those of the base, minus 1; None when it does not fit or compile."""
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
        """Plain values; ``settings`` are the options of the change."""
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
    # In turns, so that meshes don't crowd out the rest: the first of each kind, then the second …
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
    # Changes that change training:
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
    """Meshes with half of one axis moved to another."""
    axes = [axis for axis in Axis if axis in facts.job.model.axes() and axis is not Axis.pipeline]
    for source, target in itertools.permutations(axes, 2):
        size = layout.size(source)
        if size % 2 == 0:
            yield layout_change(**{source.value: size // 2, target.value: 2 * layout.size(target)})


RemedyWatch = Callable[[Remedy, int, int], None]
"""Called with each remedy in the order of the changes, the number compiled so far and the total."""


def try_all(
    facts: Facts,
    made: Forecast,
    base: Candidate,
    wanted: Sequence[Change],
    evaluator: CandidateEvaluator,
    watch: RemedyWatch = lambda *_: None,
) -> list[Remedy]:
    """Remedies: each change compiled up to its schedule and simulated, largest gain first.

    When several helped, they are also compiled together.

    Args:
        facts: Facts of the job.
        made: Forecast of ``base``, the reference for gains.
        base: The candidate to change.
        wanted: Changes to try.
        evaluator: Forecasts the changes.
        watch: Called with each remedy when it is known.
    """

    def start(candidate: Candidate) -> PendingForecast:
        return evaluator.submit(facts.job, candidate, full=False)

    remedies: dict[Change, Remedy] = {}
    # Answers are taken in the order of the changes, whichever compile ends first.
    for change, pending in [(change, start(change.on(base))) for change in wanted]:
        text, same = change.text(base), change.same_result
        remedies[change] = _remedy(made, change.on(base), pending, text, same_result=same)
        watch(remedies[change], len(remedies), len(wanted))
    joint = compatible(_helped(remedies))
    after = together(base, joint)
    last = []
    if len(joint) > 1 and check(facts.job, after) is None:
        text = "together: " + "; ".join(remedies[change].text for change in joint)
        last.append(_remedy(made, after, start(after), text, same_result=True))
        watch(last[0], len(remedies) + 1, len(wanted) + 1)
    return sorted((*remedies.values(), *last), key=lambda remedy: -_gain(remedy))


def _gain(one: Remedy) -> float:
    return -9.0 if one.gain is None else one.gain


def _helped(found: Mapping[Change, Remedy]) -> list[Change]:
    """Changes with a gain that do not change training, largest gain first."""
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
