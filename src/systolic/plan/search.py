"""Best first: the analytic model ranks, the quick compile tells what fits and how fast, whole compiles settle the end.

Every compile is in the store, so a search that was stopped goes over what it knew in seconds.
"""

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace

import psutil

from systolic.aot import Compiler, JobProgram, Outcome
from systolic.aot.compile import Pool
from systolic.chips import Slice
from systolic.core.errors import NotFoundError, SystolicError
from systolic.core.units import duration, gibibytes
from systolic.forecasting.run import of_outcome
from systolic.plan.analytic import Analysis, analyse, capacity
from systolic.plan.candidate import Candidate
from systolic.plan.facts import Facts
from systolic.plan.goal import Goal, days
from systolic.plan.learned import Correction, likely
from systolic.plan.plan import Plan, Tried
from systolic.plan.space import Freedom, Refused, candidates
from systolic.plan.variants import changes, like, together

KEEP = 300
"""Layouts of a slice that are kept by their estimate."""
WORKER_BYTES = 4 * 2**30
"""Memory that a compile of a large program takes."""
OPTIMISM = 0.5
"""Standard deviations below the expected time at which a layout is still given a chance."""
HOPELESS = 1.15
"""The search ends when even the most hopeful layout left scores so many times the best one."""
TIGHT = 0.8
"""Share of the memory above which settings that save it are worth trying."""
HELPS = 0.995
"""A setting that makes the score so many times smaller is kept."""
NEW_SLICE = 1.5
"""A slice's first layout is compiled when it may score so many times the best one: what is learned there counts for others."""
PATIENCE = 10
"""Compiles without a better score after which the search is done, when each slice worth it had its turn."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to stop."""

    programs: int = 24
    """Quick compiles, those from the store included."""
    seconds: float | None = None
    workers: int = 0
    """Compiles at once; 0: as many as cores and memory allow."""
    finalists: int = 2
    """Candidates that get a whole compile, with the compiler's own cycles."""

    @property
    def at_once(self) -> int:
        """Workers, made definite."""
        if self.workers:
            return self.workers
        room = int(psutil.virtual_memory().available // WORKER_BYTES)
        return max(1, min(os.cpu_count() or 1, room))


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate in the queue."""

    candidate: Candidate
    analysis: Analysis


@dataclass
class Progress:
    """Where the search is, for whoever watches."""

    stage: str
    compiled: int
    of: int
    running: Sequence[str]
    best: Tried | None
    seconds: float
    latest: Tried | None = None


Watch = Callable[[Progress], None]


@dataclass
class Search:
    """One search; :meth:`run` gives its answer, :meth:`answer` the answer so far."""

    facts: Facts
    slices: Sequence[Slice]
    goal: Goal
    freedom: Freedom = field(default_factory=Freedom)
    limits: Limits = field(default_factory=Limits)
    compiler: Compiler = field(default_factory=Compiler)
    watch: Watch = lambda _: None
    only: Sequence[Candidate] | None = None
    """The space, where it is not all that a slice allows."""
    tried: list[Tried] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    searched: int = 0
    stopped: str = ""
    queue: list[Ranked] = field(default_factory=list)
    time_off: Correction = field(default_factory=Correction)
    bytes_off: Correction = field(default_factory=Correction)
    _began: float = field(default_factory=time.monotonic)
    _running: dict[Future[Outcome], Ranked] = field(default_factory=dict)
    _since: int = 0
    _over: Counter[str] = field(default_factory=Counter)

    def run(self) -> Plan:
        """The plan; after Ctrl-C the best so far, marked so."""
        try:
            self.survey()
            with Pool(self.limits.at_once) as pool:
                if self.only is not None:
                    self._compile_best_first(pool, self.limits.programs)
                else:
                    most = self.limits.programs
                    self._compile_best_first(pool, most - most // 2)
                    plain = self.best()
                    self._refine(pool, most - most // 4)
                    leader = self.best()
                    if leader is not plain:
                        self._spread(pool, most - most // 8)
                    if self.best() is not leader:
                        self._refine(pool, most)
                    self._compile_best_first(pool, most)
                self._settle(pool)
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        return self.answer()

    def answer(self) -> Plan:
        """The plan as it stands."""
        left = Counter(ranked.candidate.on.name for ranked in self.queue)
        by_name = {one.name: one for one in self.slices}
        nearest: dict[str, Ranked] = {}
        for ranked in sorted(self.queue, key=self._estimated):
            nearest.setdefault(ranked.candidate.on.name, ranked)
        waiting = [
            Refused(
                on=by_name[name],
                layout=f"{number:,} layouts",
                rule="not compiled",
                reason=self._not_compiled(nearest[name]),
            )
            for name, number in left.items()
        ]
        return Plan(
            facts=self.facts,
            goal=self.goal,
            tried=tuple(self.tried),
            refused=(*self.refused, *waiting),
            searched=self.searched,
            seconds=time.monotonic() - self._began,
            stopped=self.stopped,
        )

    def _not_compiled(self, ranked: Ranked) -> str:
        """Why a slice's most promising layout was left."""
        ratio = self.time_off.ratio(ranked.candidate)
        seconds = ranked.analysis.seconds_estimate * ratio
        total = self.goal.total(ranked.candidate.on, self._units(ranked.candidate), seconds)
        price = "" if total.usd is None else f" and ${total.usd:,.2f}"
        text = f"estimated at {days(total.seconds)}{price} at best ({ranked.candidate.text})"
        best = self.best()
        if best is not None and self._estimated(ranked) <= self._score(best):
            return f"{text}, which {self.limits.programs} programs did not reach: raise --programs"
        return text

    # Before any compile

    def survey(self) -> None:
        """Analyses every layout of every slice and refuses what cannot be."""
        for on in self.slices:
            self._say(f"looking at {on.name}")
            try:
                kept = list(self._possible(on))
            except (NotFoundError, SystolicError) as error:
                self._refuse(on, "all layouts", "unknown chip", str(error))
                continue
            kept.sort(key=self._estimated)
            self.queue += kept[:KEEP]
            if len(kept) > KEEP:
                last = duration(kept[KEEP].analysis.seconds_estimate)
                self._refuse(
                    on,
                    f"{len(kept) - KEEP:,} layouts",
                    "estimate",
                    f"estimated at {last} a step or more, {KEEP} others of the slice at less",
                )
        if not self.queue and not self.refused:
            self.stopped = "no layout divides the model, the batch and the devices"

    def _possible(self, on: Slice) -> Iterator[Ranked]:
        have = capacity(on)
        over: Counter[str] = Counter()
        least: dict[str, tuple[float, str]] = {}
        seen = set()
        space = candidates(self.facts.job, on, self.freedom)
        if self.only is not None:
            space = (one for one in self.only if one.on == on)
        for candidate in space:
            if candidate in seen:
                continue
            seen.add(candidate)
            self.searched += 1
            found = analyse(self.facts, candidate)
            rule, size, text = "", 0.0, ""
            if found.bytes_bound > have:
                rule, size = "memory bound", found.bytes_bound
                text = f"weights, optimizer state and layer inputs alone are {gibibytes(found.bytes_bound)} of {gibibytes(have)} or more"
            elif problem := self._broken(candidate, found.seconds_bound):
                rule, size = "goal", found.seconds_bound
                text = f"at the chip's peak rate it {problem}"
            if not rule:
                yield Ranked(candidate=candidate, analysis=found)
                continue
            over[rule] += 1
            if rule not in least or size < least[rule][0]:
                least[rule] = (size, f"{text} (nearest: {candidate.text})")
        for rule, number in over.items():
            self._refuse(on, f"{number:,} layouts", rule, least[rule][1])
        if not seen:
            self._refuse(on, "all layouts", "divisibility", self._indivisible(on))

    def _indivisible(self, on: Slice) -> str:
        from systolic.plan.space import global_batch

        batch = global_batch(self.facts.job, on)
        return f"no mesh of {on.num_devices} devices divides the model and a batch of {batch}; change the batch or let it go with --free batch"

    def _broken(self, candidate: Candidate, seconds: float) -> str | None:
        return self.goal.broken(self.goal.total(candidate.on, self._units(candidate), seconds))

    def _units(self, candidate: Candidate) -> float:
        return candidate.batch * self.facts.units_per_example

    def _estimated(self, ranked: Ranked, optimism: float = 0.0) -> float:
        """The goal's score by the estimate as corrected so far, worse for what may not fit."""
        candidate, found = ranked.candidate, ranked.analysis
        ratio = self.time_off.ratio(candidate, optimism)
        seconds = max(found.seconds_estimate * ratio, found.seconds_bound)
        need = found.bytes_estimate * self.bytes_off.ratio(candidate)
        fits = likely(need, capacity(candidate.on))
        penalty = 1 + 0.4 * (1 - fits) + (20 if fits < 0.03 else 0)
        total = self.goal.total(candidate.on, self._units(candidate), seconds)
        limit = 1.0 if self.goal.broken(total) is None else 3.0
        return self.goal.score(total) * penalty * limit

    def _hopeful(self, ranked: Ranked) -> float:
        """The same, as good as it may plausibly be."""
        return self._estimated(ranked, OPTIMISM)

    # Compiling

    def _compile_best_first(self, pool: Pool, most: int) -> None:
        """Until so many were compiled in all."""
        for ranked in self._turns(min(most, self.limits.programs) - len(self.tried)):
            self._submit(pool, ranked)
            while len(self._running) >= self.limits.at_once:
                self._take()
        while self._running:
            self._take()

    def _turns(self, quota: int) -> Iterator[Ranked]:
        """The next candidate to compile: each promising slice once, then whatever may score best."""
        asked = 0
        visited = {one.candidate.on.name for one in self.tried}
        while asked < quota and self.queue and not self._late():
            self.queue.sort(key=self._hopeful)
            best = self.best()
            pick = self.queue[0]
            fresh = next((r for r in self.queue if r.candidate.on.name not in visited), None)
            if (
                fresh is not None
                and asked < max(2, quota * 2 // 3)
                and self._worth(fresh, best, NEW_SLICE)
            ):
                pick = fresh
            elif not self._worth(pick, best, HOPELESS) or self._since >= PATIENCE:
                return
            self.queue.remove(pick)
            if (why := self._dominated(pick.candidate)) is not None:
                self._refuse(pick.candidate.on, pick.candidate.text, "more memory", why)
                continue
            visited.add(pick.candidate.on.name)
            asked += 1
            yield pick

    def _worth(self, ranked: Ranked, best: Tried | None, margin: float) -> bool:
        if best is None or best.total is None:
            return True
        return self._hopeful(ranked) <= margin * self.goal.score(best.total)

    def _dominated(self, candidate: Candidate) -> str | None:
        """A candidate that did not fit and asks for no more memory than this one."""
        for one in self.tried:
            if one.forecast is None or one.forecast.fits:
                continue
            other = one.candidate
            same = replace(
                candidate.layout,
                remat=other.layout.remat,
                remat_names=other.layout.remat_names,
                saved_names=other.layout.saved_names,
                accumulate=other.layout.accumulate,
            )
            if same != other.layout or candidate.batch != other.batch or candidate.on != other.on:
                continue
            if candidate.layout.accumulate > other.layout.accumulate:
                continue
            mine, theirs = (
                sum(self.facts.outline(c.layout).kept.get(c.layout.remat, (0, 0)))
                for c in (candidate, other)
            )
            if mine >= theirs:
                need = (one.forecast.rejected or {}).get("need_bytes", 0)
                return f"keeps no less than {other.text}, which needs {gibibytes(need)}"
        return None

    def _refine(self, pool: Pool, most: int) -> None:
        """Attention blocks, loss tiles and flag sets on the best, two at a time; what helps stays."""
        first = self.best()
        if first is None:
            return
        memory = first.forecast.memory if first.forecast is not None else None
        tight = memory is not None and memory.peak_bytes > TIGHT * capacity(first.candidate.on)
        wanted = changes(self.facts.job, first.candidate, tight)
        for index in range(0, len(wanted), 2):
            base = self.best()
            assert base is not None
            made = {change: change.on(base.candidate) for change in wanted[index : index + 2]}
            self._try(pool, made.values(), most)
            known = {one.candidate: self._score(one) for one in self.tried}
            helped = [
                change
                for change, candidate in made.items()
                if known.get(candidate, math.inf) < HELPS * self._score(base)
            ]
            helped.sort(key=lambda change: known[made[change]])
            if len(helped) > 1:
                self._try(pool, [together(base.candidate, helped)], most)

    def _spread(self, pool: Pool, most: int) -> None:
        """What helped the best layout on the next best ones, and on those that were not compiled."""
        leader = self.best()
        assert leader is not None
        plain = [one.candidate for one in self.ranking() if one.candidate.on == leader.candidate.on]
        self.queue.sort(key=self._hopeful)
        waiting = [r.candidate for r in self.queue if r.candidate.on == leader.candidate.on]
        # In turns: a layout that was good without the settings, then one that was never compiled.
        turns = (c for pair in itertools.zip_longest(plain, waiting) for c in pair if c is not None)
        self._try(pool, (like(leader.candidate, one) for one in turns), most)

    def _score(self, one: Tried) -> float:
        return float("inf") if one.total is None else self.goal.score(one.total)

    def _try(self, pool: Pool, wanted: Iterable[Candidate], most: int) -> None:
        """Compiles what is new of these until so many were compiled in all."""
        known = {one.candidate for one in self.tried}
        for candidate in wanted:
            if len(self.tried) + len(self._running) >= most or self._late():
                break
            if candidate in known:
                continue
            known.add(candidate)
            self.searched += 1
            analysis = analyse(self.facts, candidate)
            self._submit(pool, Ranked(candidate=candidate, analysis=analysis))
            while len(self._running) >= self.limits.at_once:
                self._take()
        while self._running:
            self._take()

    def _settle(self, pool: Pool) -> None:
        """Whole compiles of the best few: their order may change, so each time the best that has none."""
        for _ in range(self.limits.finalists):
            ranking = self.ranking()
            leaders = ranking[: self.limits.finalists]
            one = next((one for one in leaders if one.compile == "schedule"), None)
            if one is None or self._late():
                return
            program = JobProgram(job=one.candidate.job(self.facts.job))
            compiler = replace(self.compiler, flags=one.candidate.flags.flags)
            began = time.monotonic()
            future = pool.submit(program, one.candidate.on, compiler)
            while not future.done():
                wait([future], timeout=1.0)
                self._say(f"whole compile of {one.candidate.name}")
                if self._late():
                    self.stopped = "time limit"
                    return
            made = self._tried(one.candidate, future, one.analysis, time.monotonic() - began, True)
            if made.forecast is not None:
                self.tried[self.tried.index(one)] = made
            self._say("whole compile done", made)

    def _submit(self, pool: Pool, ranked: Ranked) -> None:
        program = JobProgram(job=ranked.candidate.job(self.facts.job))
        compiler = replace(self.compiler, flags=ranked.candidate.flags.flags).quick()
        self._running[pool.submit(program, ranked.candidate.on, compiler)] = ranked
        self._say("compiling")

    def _take(self) -> None:
        """Waits for the next answer and learns from it."""
        done, _ = wait(list(self._running), timeout=0.5, return_when=FIRST_COMPLETED)
        if self._late():
            self.stopped = "time limit"
        for future in done:
            ranked = self._running.pop(future)
            before = self.best()
            one = self._tried(ranked.candidate, future, ranked.analysis, 0.0, False)
            self.tried.append(one)
            made = one.forecast
            if made is not None:
                need = made.memory.peak_bytes if made.memory else 0
                need = need or (made.rejected or {}).get("need_bytes", 0)
                if need:
                    self.bytes_off.learn(ranked.candidate, need / ranked.analysis.bytes_estimate)
                if made.step_seconds:
                    ratio = made.step_seconds / ranked.analysis.seconds_estimate
                    self.time_off.learn(ranked.candidate, ratio)
            self._since = 0 if self.best() is not before else self._since + 1
            self._say("compiling", one)
        if not done:
            self._say("compiling")

    def _tried(
        self,
        candidate: Candidate,
        future: "Future[Outcome]",
        analysis: Analysis,
        seconds: float,
        whole: bool,
    ) -> Tried:
        try:
            outcome = future.result()
            made = of_outcome(outcome, self.facts.job.name, candidate.on, seconds)
        except SystolicError as error:
            return Tried(candidate=candidate, analysis=analysis, problem=str(error), whole=whole)
        total = None
        if made.step_seconds:
            total = self.goal.total(candidate.on, self._units(candidate), made.step_seconds)
        return Tried(
            candidate=candidate,
            analysis=analysis,
            forecast=made,
            total=total,
            broken=self.goal.broken(total) if total is not None else None,
            whole=whole,
        )

    # What is known

    def ranking(self) -> list[Tried]:
        """What fits and keeps the goal's limits, best first."""
        good = [one for one in self.tried if one.total is not None and one.broken is None]
        return sorted(good, key=lambda one: self.goal.score(one.total))  # ty: ignore[invalid-argument-type]

    def best(self) -> Tried | None:
        """The best so far."""
        return next(iter(self.ranking()), None)

    def _late(self) -> bool:
        limit = self.limits.seconds
        return limit is not None and time.monotonic() - self._began > limit

    def _refuse(self, on: Slice, layout: str, rule: str, reason: str) -> None:
        self.refused.append(Refused(on=on, layout=layout, rule=rule, reason=reason))

    def _say(self, stage: str, latest: Tried | None = None) -> None:
        self.watch(
            Progress(
                stage=stage,
                compiled=len(self.tried),
                of=self.limits.programs,
                running=[r.candidate.name for r in self._running.values()],
                best=self.best(),
                seconds=time.monotonic() - self._began,
                latest=latest,
            )
        )
