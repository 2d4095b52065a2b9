"""Best-first search: analytic ranking, then compiles up to the schedule, then full compiles of the best.

Every compile is in the store, so a stopped search repeats its known part in seconds. Answers are taken in the order
of the requests: with the same number of workers the search does not depend on which compile ends first.
"""

import abc
import enum
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from systolic.chips import Slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler, JobProgram, Outcome
from systolic.compiling.compile import Pool
from systolic.core.errors import MissingExtraError, SystolicError
from systolic.core.units import gibibytes, plural
from systolic.forecasting import Forecast
from systolic.forecasting.run import of_outcome
from systolic.job import Job
from systolic.job.layout import Group
from systolic.planning.analytic import Analysis, Facts, analyse, capacity
from systolic.planning.candidate import Candidate, ChangedPart, joined
from systolic.planning.enumeration import (
    Judge,
    Kind,
    Neighbour,
    Ranked,
    Survey,
    margin_of,
    neighbours,
)
from systolic.planning.goal import Goal, Limits, days
from systolic.planning.plan import CompileDepth, Plan, SearchStop, Trial, ranking, simplest_first
from systolic.planning.space import Freedom, RefusalRule, Refused, check
from systolic.planning.variants import like
from systolic.sim.incomplete import NOTHING, Given

HOPELESS = 1.15
"""Ratio of the best remaining optimistic score to the best score at which the search ends."""
TIGHT = 0.8
"""Share of the memory above which settings that save memory are tried."""
HELPS = 0.995
"""Ratio of the new score to the old below which a setting is kept."""
NEW_SLICE = 1.5
"""Ratio to the best score up to which a slice's first layout is compiled: its result corrects other estimates."""
NEAR = 1.5
"""Ratio to a limit within which flags or a full compile may still meet it."""
UNKNOWN = 0.97
"""Ratio to the best score that a change is expected to reach whose effect no estimate knows."""
MAY_GAIN = 1.05
"""Ratio to the best score, by estimates, up to which a neighbour is compiled."""
REPEAT_PENALTY = 1.02
"""Factor on the expected score for each compile with the same mesh, or of a kind of change that did not gain."""
CLIMB_PATIENCE = 8
"""Neighbours without a gain after which a climb ends."""
FEW_UNFIT = 3
"""Compiles without one that fits after which every second one is the layout of the least memory."""
POLL_SECONDS = 0.5
"""Interval between progress reports while a compile runs."""
PATIENCE = 10
"""Compiles without a better score after which the search ends, once each promising slice was tried."""


class PendingForecast(Protocol):
    """Forecast in progress."""

    def wait(self, seconds: float) -> bool:
        """Waits at most ``seconds``; returns whether :meth:`result` is ready."""
        ...

    def result(self) -> Forecast:
        """The forecast, after waiting for it.

        Raises:
            SystolicError: it failed, with the reason.
        """
        ...


class CandidateEvaluator(abc.ABC):
    """Context that forecasts candidates; leaving it ends the forecasts in progress."""

    @abc.abstractmethod
    def submit(self, job: Job, candidate: Candidate, *, full: bool) -> PendingForecast:
        """Begins a forecast of a job under a candidate's settings.

        Args:
            job: The job; the candidate's layout, batch and precision replace its own.
            candidate: What to forecast, with its compiler flags.
            full: Whether to compile to the end; else up to the schedule.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        return None


OpenEvaluator = Callable[[int], CandidateEvaluator]
"""Makes an evaluator from the number of candidates to forecast at once."""


class CompilingEvaluator(CandidateEvaluator):
    """Compiles candidates, each in a child process, and simulates their schedules.

    Args:
        workers: Compiles at once.
        compiler: How to compile; flags come from the candidates.
        given: Trips and costs that programs leave open; a candidate's program need not have all of the names.
    """

    def __init__(
        self, workers: int, compiler: Compiler | None = None, given: Given = NOTHING
    ) -> None:
        self._given = replace(given, strict=False)
        self._pool = Pool(workers)
        self._compiler = compiler or Compiler()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._pool.__exit__(kind, error, trace)

    def submit(self, job: Job, candidate: Candidate, *, full: bool) -> PendingForecast:
        """Submits a candidate; see :meth:`CandidateEvaluator.submit`."""
        compiler = replace(self._compiler, flags=candidate.compiler_flags)
        program = JobProgram(job=candidate.job(job))
        how = compiler if full else compiler.quick()
        clock = _CompileClock()
        outcome = self._pool.submit(program, candidate.on, how, clock.start)
        return _Compiling(
            outcome=outcome, name=job.name, candidate=candidate, clock=clock, given=self._given
        )


@dataclass
class _CompileClock:
    began: float | None = None
    """When the compile reported its first stage; None of one that waits, or was in the store."""

    def start(self, _: str) -> None:
        if self.began is None:
            self.began = time.monotonic()


@dataclass
class _Compiling:
    outcome: "Future[Outcome]"
    name: str
    candidate: Candidate
    clock: _CompileClock
    given: Given = NOTHING
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.outcome.add_done_callback(self._end)

    def _end(self, _: "Future[Outcome]") -> None:
        began = self.clock.began
        self.seconds = 0.0 if began is None else time.monotonic() - began

    def wait(self, seconds: float) -> bool:
        return bool(futures.wait([self.outcome], timeout=seconds).done)

    def result(self) -> Forecast:
        outcome = self.outcome.result()
        forecast = of_outcome(outcome, self.name, self.candidate.on, self.seconds, self.given)
        return replace(forecast, schedules=())  # a search has hundreds


class SearchStage(enum.Enum):
    """Stage of a search."""

    analysing = "analysing"
    """Analysis of a slice's layouts, before any compile."""
    compiling = "compiling"
    """Compiles up to the schedule."""
    settling = "settling"
    """Full compiles of the best."""


@dataclass(kw_only=True)
class SearchProgress:
    """Progress of a search, for its watcher."""

    stage: SearchStage
    subject: str = ""
    """The slice being analysed, or the candidates in full compiles."""
    compiled: int
    of: int
    running: Sequence[str]
    best: Trial | None
    seconds: float
    latest: Trial | None = None
    answer: Callable[[], Plan]
    """Makes the plan as of now."""


Watch = Callable[[SearchProgress], None]


def _mesh(candidate: Candidate) -> tuple[str, tuple[int, ...]]:
    """The slice and the axes of a candidate."""
    return candidate.on.name, tuple(candidate.layout.mesh_shape.values())


def shared(on: Slice) -> tuple[str, ...]:
    """Compiler flags that all jobs on a slice's chip share."""
    return resolved("", on.chip)


@dataclass
class Search:
    """Search for a plan; :meth:`run` returns its answer, :meth:`answer` the answer so far."""

    facts: Facts
    slices: Sequence[Slice]
    goal: Goal
    limits: Limits
    freedom: Freedom = field(default_factory=Freedom)
    evaluator: OpenEvaluator = CompilingEvaluator
    flags: Callable[[Slice], tuple[str, ...]] = shared
    """Compiler flags of every program on a slice; sets under trial are added to them."""
    watch: Watch = lambda _: None
    only: Sequence[Candidate] | None = None
    """The search space; None for all that the slices allow."""
    first: bool = False
    """Whether it ends once one fits and keeps the goal's limits; what is being compiled then is taken too."""
    tried: list[Trial] = field(default_factory=list)
    stopped: SearchStop | None = None
    _judge: Judge = field(init=False)
    _survey: Survey = field(init=False)
    _began: float = field(default_factory=time.monotonic)
    _running: deque[tuple[Ranked, PendingForecast]] = field(default_factory=deque)
    _finalists: deque[tuple[Trial, PendingForecast]] = field(default_factory=deque)
    _since: int = 0
    _ended: bool = False

    def __post_init__(self) -> None:
        self._judge = Judge(facts=self.facts, goal=self.goal)
        self._survey = Survey(
            judge=self._judge, freedom=self.freedom, base=self.flags, only=self.only
        )
        for known in self.tried:
            self._judge.learn(Ranked(candidate=known.candidate, analysis=known.analysis), known)
        # Ties must not depend on the order of the command line.
        self.slices = sorted(self.slices, key=lambda on: (on.chip.name, on.num_chips, on.name))

    def run(self) -> Plan:
        """Runs the search to its plan; after Ctrl-C the plan so far, marked as interrupted."""
        try:
            self._survey.analyse_all(
                self.slices, lambda on: self._report(SearchStage.analysing, subject=on.name)
            )
            with self.evaluator(self.limits.at_once) as pool:
                try:
                    self._compile(pool)
                except KeyboardInterrupt:
                    self.stopped = SearchStop.interrupted
                    # Leaving the pool ends its compiles.
                    self._collect()
        except KeyboardInterrupt:
            self.stopped = SearchStop.interrupted
        self._ended = True
        return self.answer()

    @property
    def not_compiled(self) -> list[Ranked]:
        """Candidates that a compile may still show to be better than their estimates."""
        return [*self._survey.queue, *self._survey.left]

    def climb(self, pool: CandidateEvaluator) -> None:
        """Moves the best of what was tried to better neighbours, without a survey of the space first."""
        self._climb(pool, self.limits.programs)

    def answer(self) -> Plan:
        """The plan so far."""
        queue = self._survey.queue
        left = Counter(ranked.candidate.on.name for ranked in queue)
        by_name = {on.name: on for on in self.slices}
        nearest: dict[str, Ranked] = {}
        for ranked in sorted(queue, key=self._judge.estimated):
            nearest.setdefault(ranked.candidate.on.name, ranked)
        waiting = [
            Refused(
                on=by_name[name],
                layouts=left[name],
                rule=RefusalRule.not_compiled,
                reason=self._not_compiled(ranked),
            )
            for name, ranked in nearest.items()
        ]
        plan = Plan(
            facts=self.facts,
            goal=self.goal,
            tried=tuple(self.tried),
            refused=(*self._survey.refused, *waiting),
            searched=self._survey.searched,
            seconds=time.monotonic() - self._began,
            stopped=self.stopped,
        )
        if plan.best is None or not self._ended:
            return plan
        return replace(plan, margin=margin_of(self._judge, plan.best, self.not_compiled))

    def _not_compiled(self, ranked: Ranked) -> str:
        """Reason that a slice's most promising layout was not compiled."""
        total = self._judge.expected(ranked)
        price = "" if total.usd is None else f" and ${total.usd:,.2f}"
        text = f"estimated at {days(total.seconds)}{price} ({ranked.candidate.text})"
        best = self.best()
        if self.first or best is None:
            return text
        if self._judge.estimated(ranked) <= self._judge.score(best):
            if self.stopped:
                return f"{text}, which was not reached"
            return f"{text}, which {plural(self.limits.programs, 'program')} did not reach: raise --programs"
        return text

    # Compiling

    def _compile(self, pool: CandidateEvaluator) -> None:
        """Compiles the most promising candidates, then those with settings that helped, then the best in full."""
        most = self.limits.programs
        if self.only is None:
            self._compile_best_first(pool, most - most // 2)
            plain = self.leader()
            rivals = self._rivals()
            self._climb(pool, most - (most // 3 if rivals else most // 8))
            leader = self.leader()
            self._refine_rivals(pool, rivals, most - most // 6)
            if leader is not plain:
                self._spread(pool, most - (0 if rivals else most // 16))
            if self.leader() is not leader:
                self._climb(pool, most)
        self._compile_best_first(pool, most)
        self._compile_finalists(pool)

    def _compile_best_first(self, pool: CandidateEvaluator, most: int) -> None:
        """Compiles candidates best first, up to ``most`` in the whole search."""
        for ranked in self._turns(min(most, self.limits.programs) - len(self.tried)):
            self._submit(pool, ranked)
            while len(self._running) >= self.limits.at_once:
                self._take()
        while self._running:
            self._take()

    def _turns(self, quota: int) -> Iterator[Ranked]:
        """Candidates to compile: one for each promising slice, then by the optimistic score."""
        count = 0
        visited = {trial.candidate.on.name for trial in self.tried}
        chips = {trial.candidate.on.chip.name for trial in self.tried}
        queue = self._survey.queue
        while count < quota and queue and not self._over() and not self._fruitless():
            meshes = Counter(_mesh(trial.candidate) for trial in self.tried)
            meshes.update(_mesh(ranked.candidate) for ranked, _ in self._running)
            queue.sort(
                key=lambda r: self._judge.hopeful(r) * REPEAT_PENALTY ** meshes[_mesh(r.candidate)]
            )
            best = self.best()
            pick = queue[0]
            if self._unfit() >= FEW_UNFIT and len(self.tried) % 2:
                pick = min(queue, key=lambda r: self._judge.need(r) / capacity(r.candidate.on))
            # A chip's first compile corrects the estimates of all its slices.
            fresh = next(
                (r for r in queue if r.candidate.on.chip.name not in chips),
                next((r for r in queue if r.candidate.on.name not in visited), None),
            )
            if (
                fresh is not None
                and count < max(2, quota * 2 // 3)
                and self._worth(fresh, best, NEW_SLICE)
            ):
                pick = fresh
            elif not self._worth(pick, best, HOPELESS) or self._since >= PATIENCE:
                return
            queue.remove(pick)
            if (why := self._dominated(pick.candidate)) is not None:
                self._survey.refused.append(
                    Refused(
                        on=pick.candidate.on,
                        candidate=pick.candidate,
                        rule=RefusalRule.more_memory,
                        reason=why,
                    )
                )
                continue
            visited.add(pick.candidate.on.name)
            chips.add(pick.candidate.on.chip.name)
            count += 1
            yield pick

    def _over(self) -> bool:
        """Whether nothing more is compiled: there is no time, or one that fits is enough."""
        return self._late() or (self.first and self.best() is not None)

    def _fruitless(self) -> bool:
        """Whether as many compiles as the limits allow have ended without one that fits."""
        most = self.limits.fruitless
        return most is not None and self._unfit() + len(self._running) >= most

    def _unfit(self) -> int:
        """Compiles without one that fits; 0 once one does."""
        return 0 if any(trial.total is not None for trial in self.tried) else len(self.tried)

    def _worth(self, ranked: Ranked, best: Trial | None, margin: float) -> bool:
        if best is None or best.total is None:
            return True
        return self._judge.hopeful(ranked) <= margin * self._judge.score(best)

    def _dominated(self, candidate: Candidate) -> str | None:
        """Reason to skip a candidate: another that keeps no more memory did not fit; None if there is none."""
        for trial in self.tried:
            if trial.forecast is None or trial.forecast.fits:
                continue
            other = trial.candidate
            if candidate.precision is not other.precision:
                continue
            if candidate.compiler_flags != other.compiler_flags:
                continue
            same = candidate.layout.take(other.layout, Group.remat, Group.passes)
            if same != other.layout or candidate.batch != other.batch or candidate.on != other.on:
                continue
            if candidate.layout.accumulate > other.layout.accumulate:
                continue
            mine, theirs = (
                sum(self.facts.outline(c.layout).kept.get(c.layout.remat, (0, 0)))
                for c in (candidate, other)
            )
            if mine >= theirs:
                need = trial.forecast.need_bytes
                return f"keeps no less than {other.text}, which needs {gibibytes(need)}"
        return None

    def _rivals(self) -> list[Trial]:
        """The best trial of each other TPU slice, best first; they are tuned like the leader to compare fairly."""
        leader = self.leader()
        best: dict[str, Trial] = {}
        for trial in self.leaders():
            best.setdefault(trial.candidate.on.name, trial)
        return [
            trial
            for trial in best.values()
            if leader is not None
            and trial.candidate.on != leader.candidate.on
            and trial.candidate.on.platform == "tpu"
        ]

    def _refine_rivals(self, pool: CandidateEvaluator, rivals: Sequence[Trial], most: int) -> None:
        """Applies the leader's settings to the best of each other slice, then climbs from these in equal shares."""
        leader = self.leader()
        if leader is None:
            return
        wanted = [like(leader.candidate, rival.candidate) for rival in rivals]
        possible = [candidate for candidate in wanted if check(self.facts.job, candidate) is None]
        self._try(pool, possible, most)
        for number, rival in enumerate(rivals):
            share = (most - len(self.tried)) // (len(rivals) - number)
            self._climb(pool, len(self.tried) + share, rival.candidate.on)

    def _climb(self, pool: CandidateEvaluator, most: int, on: Slice | None = None) -> None:
        """Moves the best (of a slice) to a better neighbour until none is likely to gain, up to ``most`` compiles.

        Neighbours are compiled by their estimated scores. A kind of change that did not gain waits behind
        others; settings that no estimate knows are expected to gain :data:`UNKNOWN`.
        """
        failures: Counter[Kind] = Counter()
        moves: list[tuple[Neighbour, Ranked]] = []
        around: Trial | None = None
        gained = 0
        while len(self.tried) < most and not self._over():
            base = self.leader(on)
            if base is None:
                return
            if base is not around:
                moves, around = self._moves(base), base
            ranked = self._promising(moves, base, failures)
            if not ranked or sum(failures.values()) - gained >= CLIMB_PATIENCE:
                return
            picked = ranked[: self.limits.at_once]
            self._try(pool, [neighbour.candidate for neighbour in picked], most)
            known = {trial.candidate: self._judge.score(trial) for trial in self.tried}
            before = self._judge.score(base)
            for neighbour in picked:
                if known.get(neighbour.candidate, math.inf) >= HELPS * before:
                    failures[neighbour.kind] += 1
            helped = [
                neighbour
                for neighbour in picked
                if known.get(neighbour.candidate, math.inf) < HELPS * before
            ]
            if helped:
                gained = sum(failures.values())
            if len(helped) > 1:
                self._try_together(pool, base, helped, most)

    def _try_together(
        self, pool: CandidateEvaluator, base: Trial, helped: Sequence[Neighbour], most: int
    ) -> None:
        """Compiles neighbours that helped alone as one, where they change different settings."""
        joint, plain = base.candidate, base.candidate.layout
        touched: frozenset[Group | ChangedPart] = frozenset()
        for neighbour in helped:
            if touched & neighbour.kind - {ChangedPart.flags}:
                return
            touched |= neighbour.kind
            new = neighbour.candidate.layout
            groups = [group for group in Group if plain.differs(new, group)]
            flags = joined(joint.flags, neighbour.candidate.flags)
            joint = replace(joint, layout=joint.layout.take(new, *groups), flags=flags)
        if check(self.facts.job, joint) is None:
            self._try(pool, [joint], most)

    def _moves(self, base: Trial) -> list[tuple[Neighbour, Ranked]]:
        """Neighbours of a trial that its memory may hold and whose bound is below its score."""
        memory = base.forecast.memory if base.forecast is not None else None
        have = capacity(base.candidate.on)
        tight = memory is not None and memory.peak_bytes > TIGHT * have
        best, moves = self._judge.score(base), []
        for neighbour in neighbours(self.facts, base.candidate, self.freedom, tight):
            analysis = analyse(self.facts, neighbour.candidate)
            bound = self._judge.total(neighbour.candidate, analysis.seconds_bound)
            if analysis.bytes_bound <= have and self.goal.score(bound) < best:
                moves.append((neighbour, Ranked(candidate=neighbour.candidate, analysis=analysis)))
        return moves

    def _promising(
        self,
        moves: Sequence[tuple[Neighbour, Ranked]],
        base: Trial,
        failures: Mapping[Kind, int],
    ) -> list[Neighbour]:
        """Neighbours not compiled yet that may beat a trial, the most promising first."""
        known = {trial.candidate for trial in self.tried}
        before = self._judge.score(base)
        hopeful: list[tuple[float, Neighbour]] = []
        for neighbour, ranked in moves:
            if neighbour.candidate in known or self._dominated(neighbour.candidate) is not None:
                continue
            expected = (
                UNKNOWN * before if not neighbour.estimated else self._judge.beside(ranked, base)
            )
            expected *= REPEAT_PENALTY ** failures.get(neighbour.kind, 0)
            if expected < MAY_GAIN * before:
                hopeful.append((expected, neighbour))
        hopeful.sort(key=lambda pair: pair[0])
        return [neighbour for _, neighbour in hopeful]

    def _spread(self, pool: CandidateEvaluator, most: int) -> None:
        """Applies the leader's settings to the next best layouts and to those not compiled yet."""
        leader = self.leader()
        assert leader is not None
        plain = [
            trial.candidate for trial in self.leaders() if trial.candidate.on == leader.candidate.on
        ]
        queue = sorted(self._survey.queue, key=self._judge.hopeful)
        waiting = [r.candidate for r in queue if r.candidate.on == leader.candidate.on]
        # Alternates layouts that were good without the settings with layouts not compiled yet.
        turns = (c for pair in itertools.zip_longest(plain, waiting) for c in pair if c is not None)
        self._try(pool, (like(leader.candidate, candidate) for candidate in turns), most)

    def _try(self, pool: CandidateEvaluator, wanted: Iterable[Candidate], most: int) -> None:
        """Compiles the new ones of these, up to ``most`` in the whole search."""
        known = {trial.candidate for trial in self.tried}
        for candidate in wanted:
            if len(self.tried) + len(self._running) >= most or self._over():
                break
            if candidate in known:
                continue
            known.add(candidate)
            self._survey.searched += 1
            analysis = analyse(self.facts, candidate)
            self._submit(pool, Ranked(candidate=candidate, analysis=analysis))
            while len(self._running) >= self.limits.at_once:
                self._take()
        while self._running:
            self._take()

    def _compile_finalists(self, pool: CandidateEvaluator) -> None:
        """Compiles the best few in full, as many at once as there are workers, the best without one first."""
        submitted: set[Candidate] = set()
        began = time.monotonic()
        running, most = self._finalists, self.limits.finalists
        while True:
            simplest = simplest_first(self.tried, self.goal) or self.leaders()
            for trial in simplest[:most]:
                room = len(submitted) < most and len(running) < self.limits.at_once
                new = trial.depth is CompileDepth.schedule and trial.candidate not in submitted
                if new and room and not self._late():
                    submitted.add(trial.candidate)
                    pending = pool.submit(self.facts.job, trial.candidate, full=True)
                    running.append((trial, pending))
            if not running:
                return
            names = " and ".join(trial.candidate.name for trial, _ in running)
            self._report(SearchStage.settling, subject=names)
            if running[0][1].wait(POLL_SECONDS):
                self._settled()
            elif self._late():
                self.stopped = SearchStop.time_limit
                return self._collect()
            elif (
                self.limits.seconds is None
                and time.monotonic() - began > self.limits.finalist_seconds
            ):
                return self._collect()

    def _settled(self) -> None:
        """Replaces the trial of the earliest full compile, whose answer is ready."""
        trial, pending = self._finalists[0]
        settled = self._tried(trial.candidate, pending, trial.analysis, full=True)
        self._finalists.popleft()  # only now: an interrupt loses no answer
        if settled.forecast is not None and trial.forecast is not None:
            settled = replace(settled, schedule_seconds=trial.forecast.step_seconds)
            self.tried[self.tried.index(trial)] = settled
        self._report(SearchStage.settling, settled, subject=trial.candidate.name)

    def _collect(self) -> None:
        """Learns from all answers that are ready, in the order of the requests; drops the other requests."""
        for running, learn in ((self._running, self._learn), (self._finalists, self._settled)):
            while running:
                if running[0][1].wait(0.0):
                    learn()
                else:
                    running.popleft()

    def _submit(self, pool: CandidateEvaluator, ranked: Ranked) -> None:
        pending = pool.submit(self.facts.job, ranked.candidate, full=False)
        self._running.append((ranked, pending))
        self._report(SearchStage.compiling)

    def _take(self) -> None:
        """Waits for the earliest request."""
        ready = self._running[0][1].wait(POLL_SECONDS)
        if self._late():
            self.stopped = SearchStop.time_limit
        if not ready:
            self._report(SearchStage.compiling)
            return
        self._learn()

    def _learn(self) -> None:
        """Learns from the earliest request, whose answer is ready."""
        ranked, pending = self._running[0]
        before = self.best()
        trial = self._tried(ranked.candidate, pending, ranked.analysis, full=False)
        self._running.popleft()  # only now: an interrupt loses no answer
        self.tried.append(trial)
        self._judge.learn(ranked, trial)
        self._since = 0 if self.best() is not before else self._since + 1
        self._report(SearchStage.compiling, trial)

    def _tried(
        self, candidate: Candidate, pending: PendingForecast, analysis: Analysis, *, full: bool
    ) -> Trial:
        try:
            forecast = pending.result()
        except MissingExtraError:
            raise  # no other layout would compile either
        except SystolicError as error:
            return Trial(candidate=candidate, analysis=analysis, problem=str(error), full=full)
        total = None
        if forecast.step_seconds:
            total = self._judge.total(candidate, forecast.step_seconds)
        return Trial(
            candidate=candidate,
            analysis=analysis,
            forecast=forecast,
            total=total,
            broken=self.goal.broken(total) if total is not None else None,
            full=full,
        )

    # Ranking

    def ranking(self) -> list[Trial]:
        """Trials that fit and meet the goal's limits, best first."""
        return ranking(self.tried, self.goal)

    def best(self) -> Trial | None:
        """The best trial so far."""
        return next(iter(self.ranking()), None)

    def leaders(self) -> list[Trial]:
        """The ranking; where no trial meets the limits, those nearest to them, nearest first."""
        if ranked := self.ranking():
            return ranked
        near = [
            (self.goal.excess(trial.total), trial)
            for trial in self.tried
            if trial.total is not None
        ]
        near = [(excess, trial) for excess, trial in near if excess <= NEAR]
        return [trial for _, trial in sorted(near, key=lambda pair: pair[0])]

    def leader(self, on: Slice | None = None) -> Trial | None:
        """The first of the leaders, of one slice where it is given."""
        return next((trial for trial in self.leaders() if on in (None, trial.candidate.on)), None)

    def _late(self) -> bool:
        limit = self.limits.seconds
        return limit is not None and time.monotonic() - self._began > limit

    def _report(
        self, stage: SearchStage, latest: Trial | None = None, *, subject: str = ""
    ) -> None:
        self.watch(
            SearchProgress(
                stage=stage,
                subject=subject,
                compiled=len(self.tried),
                of=self.limits.programs,
                running=[ranked.candidate.name for ranked, _ in self._running],
                best=self.best(),
                seconds=time.monotonic() - self._began,
                latest=latest,
                answer=self.answer,
            )
        )
