"""Survey before any compile: analyses every layout of every slice and refuses impossible ones with figures."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from systolic.chips import Slice
from systolic.core.errors import NotFoundError, SystolicError
from systolic.core.units import duration, gibibytes, plural
from systolic.planning.analytic import analyse, capacity
from systolic.planning.candidate import Candidate
from systolic.planning.scoring import Judge, Ranked
from systolic.planning.space import Freedom, RefusalRule, Refused, candidates, global_batch

KEEP = 300
"""Fewest layouts of a slice that are kept, by their estimates."""
KEEP_ALL = 6000
"""Layouts of all slices that are kept where there are fewer than this over :data:`KEEP` slices."""


@dataclass
class Survey:
    """Survey of the search space: candidates to compile in ``queue``, the others in ``refused``."""

    judge: Judge
    freedom: Freedom
    base: Callable[[Slice], tuple[str, ...]] = lambda _: ()
    """Compiler flags of all candidates on a slice."""
    only: Sequence[Candidate] | None = None
    queue: list[Ranked] = field(default_factory=list)
    left: list[Ranked] = field(default_factory=list)
    """The next :data:`KEEP` of each slice, which the search does not look at."""
    refused: list[Refused] = field(default_factory=list)
    searched: int = 0

    def analyse_all(self, slices: Iterable[Slice], begin: Callable[[Slice], None]) -> None:
        """Analyses every layout of every slice; calls ``begin`` with each slice first."""
        slices = list(slices)
        most = max(KEEP, KEEP_ALL // max(len(slices), 1))
        for on in slices:
            begin(on)
            try:
                kept = list(self._possible(on))
            except (NotFoundError, SystolicError) as error:
                self._refuse(on, None, RefusalRule.unknown_chip, str(error))
                continue
            kept.sort(key=self.judge.estimated)
            self.queue += kept[:most]
            self.left += kept[most : most + KEEP]
            if len(kept) > most:
                last = duration(kept[most].analysis.seconds_estimate)
                self._refuse(
                    on,
                    len(kept) - most,
                    RefusalRule.estimate,
                    f"estimated at {last} a step or more, slower than {plural(most, 'other')} of the slice; an estimate and no bound",
                )

    def _possible(self, on: Slice) -> Iterator[Ranked]:
        have = capacity(on)
        over: Counter[RefusalRule] = Counter()
        least: dict[RefusalRule, tuple[float, str]] = {}
        """Rule to the ratio of its nearest miss to the limit, and the message."""
        seen = set()
        base = self.base(on)
        space = (replace(c, base=base) for c in candidates(self.judge.facts.job, on, self.freedom))
        if self.only is not None:
            space = (one for one in self.only if one.on == on)
        for candidate in space:
            if candidate in seen:
                continue
            seen.add(candidate)
            self.searched += 1
            analysis = analyse(self.judge.facts, candidate)
            rule, miss, text = None, 0.0, ""
            if analysis.bytes_bound > have:
                rule, miss = RefusalRule.memory_bound, analysis.bytes_bound / have
                text = f"weights, optimizer state and layer inputs alone need at least {gibibytes(analysis.bytes_bound)} of {gibibytes(have)}"
            elif problem := self.judge.broken(candidate, analysis.seconds_bound):
                total = self.judge.total(candidate, analysis.seconds_bound)
                rule, miss = RefusalRule.goal, self.judge.goal.excess(total)
                text = f"at the chip's peak rate it {problem}"
            if rule is None:
                yield Ranked(candidate=candidate, analysis=analysis)
                continue
            over[rule] += 1
            if rule not in least or miss < least[rule][0]:
                least[rule] = (miss, f"{text} (nearest: {candidate.text})")
        for rule, number in over.items():
            miss, text = least[rule]
            self._refuse(on, number, rule, text, miss)
        if not seen:
            batch = global_batch(self.judge.facts.job, on)
            self._refuse(
                on,
                None,
                RefusalRule.divisibility,
                f"no mesh of {plural(on.num_devices, 'device')} divides the model and a batch of {batch}; change the batch, or let the search choose it with --free batch",
            )

    def _refuse(
        self,
        on: Slice,
        layouts: int | None,
        rule: RefusalRule,
        reason: str,
        miss: float | None = None,
    ) -> None:
        """Records layouts of a slice (all with None) that are not searched."""
        refused = Refused(on=on, layouts=layouts, rule=rule, reason=reason, miss=miss)
        self.refused.append(refused)
