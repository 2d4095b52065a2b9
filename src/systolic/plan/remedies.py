"""Changes of settings for a slow step, each compiled and simulated again: the gain is found, not guessed."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, replace
from typing import Any

from systolic.aot import Compiler, JobProgram, Outcome
from systolic.aot.compile import Pool
from systolic.chips import Slice
from systolic.core.errors import SystolicError
from systolic.core.units import gibibytes
from systolic.forecasting import Forecast
from systolic.forecasting.run import of_outcome
from systolic.job import Axis, Precision, Remat
from systolic.plan import variants
from systolic.plan.analytic import analyse, capacity
from systolic.plan.candidate import Candidate
from systolic.plan.facts import Facts
from systolic.plan.flags import joined
from systolic.plan.space import NAMED, check, narrower

GAIN = 0.005
"""Share of the step below which a change is said to gain nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A candidate and what is different in it."""

    text: str
    """``remat full -> minimal``."""
    candidate: Candidate
    same_result: bool = True
    """Whether the trained model stays the same but for rounding; a batch or a precision changes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change that was compiled."""

    change: Change
    step_seconds: float | None
    units_per_second: float | None
    need_bytes: int
    have_bytes: int
    gain: float | None
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
            "change": self.change.text,
            "settings": settings,
            "flags": list(self.change.candidate.compiler_flags),
            "same_result": self.change.same_result,
            "fits": self.gain is not None,
            "step_seconds": self.step_seconds,
            "gain": self.gain,
            "need_bytes": self.need_bytes,
            "have_bytes": self.have_bytes,
            "verdict": self.verdict,
        }


def changes(facts: Facts, base: Candidate) -> list[Change]:
    """Single changes of a candidate, the likeliest gains by the analytic model first."""
    found = [
        change
        for change in (*_single(facts, base), *_numeric(facts, base))
        if check(facts.job, change.candidate) is None
    ]
    have = capacity(base.on)
    possible = [c for c in found if analyse(facts, c.candidate).bytes_bound <= have]

    def speed(change: Change) -> float:
        one = change.candidate
        over = analyse(facts, one).bytes_estimate > 1.3 * have
        return analyse(facts, one).seconds_estimate / one.batch * (10 if over else 1)

    kinds: dict[str, int] = {}
    ordered = []
    # Not five meshes in a row: the first of each kind, then the second …
    for change in sorted(possible, key=speed):
        kind = _kind(change)
        kinds[kind] = kinds.get(kind, 0) + 1
        ordered.append((kinds[kind] + (0 if change.same_result else 2), change))
    return [change for _, change in sorted(ordered, key=lambda pair: pair[0])]


def _single(facts: Facts, base: Candidate) -> Iterator[Change]:
    layout = base.layout
    yield from _policies(facts, base)
    for accumulate in (layout.accumulate // 2, layout.accumulate * 2):
        if accumulate >= 1 and accumulate != layout.accumulate:
            yield Change(
                text=f"accumulate {layout.accumulate} -> {accumulate}",
                candidate=replace(base, layout=replace(layout, accumulate=accumulate)),
            )
    yield from _meshes(facts, base)
    for change in variants.changes(facts.job, base):
        one = change.on(base)
        yield Change(text=_variant(base, one), candidate=one)


def _policies(facts: Facts, base: Candidate) -> Iterator[Change]:
    layout = base.layout
    known = facts.job.model.policies()
    for remat in (Remat.none, Remat.minimal, Remat.save_names, Remat.full):
        if remat not in known:
            continue
        for names in NAMED if remat is Remat.save_names else (layout.remat_names,):
            to = replace(layout, remat=remat, remat_names=names, saved_names=())
            if remat is layout.remat and (
                remat is not Remat.save_names or names == layout.remat_names
            ):
                continue
            which = f" ({'+'.join(names)})" if remat is Remat.save_names else ""
            yield Change(
                text=f"remat {layout.remat.value} -> {remat.value}{which}",
                candidate=replace(base, layout=to),
            )


def _meshes(facts: Facts, base: Candidate) -> Iterator[Change]:
    """Half of one axis given to another."""
    axes = [axis for axis in Axis if axis in facts.job.model.axes() and axis is not Axis.pipeline]
    for source in axes:
        for target in axes:
            size = base.layout.size(source)
            if source is target or size % 2:
                continue
            other = base.layout.size(target) * 2
            to = replace(base.layout, **{source.value: size // 2, target.value: other})
            yield Change(
                text=f"{source.value} {size} -> {size // 2}, {target.value} {other // 2} -> {other}",
                candidate=replace(base, layout=to),
            )


def _numeric(facts: Facts, base: Candidate) -> Iterator[Change]:
    """Changes that the training itself would notice."""
    yield Change(
        text=f"batch {base.batch} -> {2 * base.batch}",
        candidate=replace(base, batch=2 * base.batch),
        same_result=False,
    )
    if base.precision is Precision.bf16:
        for precision in narrower(facts.job, base.on):
            yield Change(
                text=f"precision bf16 -> {precision.value}",
                candidate=replace(base, precision=precision),
                same_result=False,
            )
    if base.precision is Precision.f32:
        yield Change(
            text="precision f32 -> bf16",
            candidate=replace(base, precision=Precision.bf16),
            same_result=False,
        )


def _variant(base: Candidate, one: Candidate) -> str:
    if one.flags is not base.flags:
        return f"flags {one.flags.name}"
    if one.layout.attention_block != base.layout.attention_block:
        return f"attention block {base.layout.attention_block} -> {one.layout.attention_block}"
    if one.layout.residual is not base.layout.residual:
        return f"residual {base.layout.residual.value} -> {one.layout.residual.value}"
    if one.layout.placement is not base.layout.placement:
        return f"placement {base.layout.placement.value} -> {one.layout.placement.value}"
    return f"loss tiles {base.layout.loss_tiles} -> {one.layout.loss_tiles}"


Told = Callable[[Remedy, int, int], None]


def try_all(
    facts: Facts,
    base: Forecast,
    wanted: Sequence[Change],
    compiler: Compiler,
    workers: int,
    told: Told = lambda *_: None,
) -> list[Remedy]:
    """Each change compiled up to its schedule and simulated, the largest gain first; ``told`` as they come.

    Then, when several helped, all of them together.
    """
    made: list[Remedy] = []
    with Pool(workers) as pool:

        def run(todo: Sequence[Change], of: int) -> None:
            futures = {}
            for change in todo:
                flags = change.candidate.compiler_flags
                program = JobProgram(job=change.candidate.job(facts.job))
                how = replace(compiler, flags=flags).quick()
                futures[pool.submit(program, change.candidate.on, how)] = change
            while futures:
                done, _ = wait(futures, return_when=FIRST_COMPLETED)
                for future in done:
                    change = futures.pop(future)
                    made.append(_remedy(facts, base, change, future.result))
                    told(made[-1], len(made), of)

        run(wanted, len(wanted))
        helped = sorted(
            (
                one
                for one in made
                if one.gain is not None and one.gain > GAIN and one.change.same_result
            ),
            key=lambda one: -(one.gain or 0.0),
        )
        joined = _joined(facts, helped)
        if joined is not None:
            run([joined], len(wanted) + 1)
    return sorted(made, key=lambda one: -(one.gain if one.gain is not None else -9.0))


def _joined(facts: Facts, helped: Sequence[Remedy]) -> Change | None:
    """The changes that helped, as far as they touch different settings."""
    if len(helped) < 2:
        return None
    first = helped[0].change
    candidate, texts, touched = first.candidate, [first.text], {_kind(first)}
    for one in helped[1:]:
        kind = _kind(one.change)
        if kind in touched and kind != "flags":
            continue
        other = one.change.candidate
        match kind:
            case "flags":  # sets add up; of a flag in two of them, the value that gained more
                flags = joined(other.flags, candidate.flags)
                if set(flags.flags) == set(candidate.flags.flags):
                    continue
                candidate = replace(candidate, flags=flags)
            case "attention":
                layout = replace(candidate.layout, attention_block=other.layout.attention_block)
                candidate = replace(candidate, layout=layout)
            case "loss":
                layout = replace(candidate.layout, loss_tiles=other.layout.loss_tiles)
                candidate = replace(candidate, layout=layout)
            case "remat":
                layout = replace(
                    candidate.layout,
                    remat=other.layout.remat,
                    remat_names=other.layout.remat_names,
                    saved_names=other.layout.saved_names,
                )
                candidate = replace(candidate, layout=layout)
            case "placement":
                layout = replace(candidate.layout, placement=other.layout.placement)
                candidate = replace(candidate, layout=layout)
            case "residual":
                layout = replace(candidate.layout, residual=other.layout.residual)
                candidate = replace(candidate, layout=layout)
            case "accumulate":
                layout = replace(candidate.layout, accumulate=other.layout.accumulate)
                candidate = replace(candidate, layout=layout)
            case _:
                continue
        touched.add(kind)
        texts.append(one.change.text)
    if len(texts) < 2 or check(facts.job, candidate) is not None:
        return None
    return Change(text="together: " + "; ".join(texts), candidate=candidate)


def _kind(change: Change) -> str:
    first = change.text.split()[0]
    named = ("flags", "attention", "loss", "remat", "accumulate", "batch", "precision")
    return first if first in (*named, "placement", "residual") else "mesh"


def _remedy(facts: Facts, base: Forecast, change: Change, outcome: Callable[[], Outcome]) -> Remedy:
    have = int(capacity(change.candidate.on))
    try:
        found = of_outcome(outcome(), facts.job.name, change.candidate.on, 0.0)
    except SystolicError as error:
        return Remedy(
            change=change,
            step_seconds=None,
            units_per_second=None,
            need_bytes=0,
            have_bytes=have,
            gain=None,
            problem=str(error),
        )
    need = found.memory.peak_bytes if found.memory is not None else 0
    need = need or int((found.rejected or {}).get("need_bytes", 0))
    speed, before = found.units_per_second, base.units_per_second
    gain = speed / before - 1 if speed and before and found.fits else None
    return Remedy(
        change=change,
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
    job = facts.job.on(on.num_devices, on.num_slices)
    return Candidate(
        on=on,
        layout=job.layout,
        batch=job.batch.resolve(job.layout),
        precision=job.precision.resolve(on.platform),
        base=flags,
    )
