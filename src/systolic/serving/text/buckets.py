"""Sizes of the compiled programs, chosen for the traffic: less padding for more programs."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from systolic.core.errors import OptionError
from systolic.steps.paged import Shape

Weights = Mapping[int, float]
"""How often each size is needed."""


def cut(needed: Weights, count: int, unit: int = 1) -> tuple[int, ...]:
    """At most ``count`` sizes, multiples of ``unit``, with the least expected padding; the largest holds all.

    Args:
        needed: Sizes that are needed, from 1, and how often.
        count: Most sizes.
        unit: What sizes are multiples of.

    Raises:
        OptionError: nothing is needed, or ``count`` is below 1.
    """
    if not needed or count < 1:
        raise OptionError(f"{count} sizes for {len(needed)} needs; give at least one of each")
    rounded: dict[int, float] = {}
    for size, often in needed.items():
        place = -(-size // unit) * unit
        rounded[place] = rounded.get(place, 0.0) + often
    sizes = sorted(rounded)
    total = [0.0]
    for size in sizes:
        total.append(total[-1] + rounded[size])
    # best[k][j]: least padded positions where k sizes serve the first j needs.
    best = [[0.0] + [math.inf] * len(sizes)]
    choice: list[list[int]] = []
    for _ in range(min(count, len(sizes))):
        row, picks = [0.0], [0]
        for j, size in enumerate(sizes, start=1):
            costs = [best[-1][i] + size * (total[j] - total[i]) for i in range(j)]
            pick = min(range(j), key=costs.__getitem__)
            row.append(costs[pick])
            picks.append(pick)
        best.append(row)
        choice.append(picks)
    found, j = [], len(sizes)
    for picks in reversed(choice):
        if j == 0:
            break
        found.append(sizes[j - 1])
        j = picks[j]
    return tuple(sorted(found))


def padding_share(needed: Weights, sizes: Sequence[int]) -> float:
    """Expected share of padding among the positions of programs of these sizes."""
    held = sum(often * sizes[bisect_left(sizes, size)] for size, often in needed.items())
    return 1 - sum(often * size for size, often in needed.items()) / held


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Requests that are expected."""

    prompts: Weights
    """Tokens of a prompt and how often."""
    answers: Weights
    """Tokens of an answer and how often."""
    measured: bool = True
    """Whether it comes from requests; else it is an assumption."""

    @classmethod
    def assumed(cls, context: int) -> "Traffic":
        """Every order of magnitude alike, where nothing is known: log-uniform up to three quarters and a quarter of the context."""

        def spread(most: int) -> dict[int, float]:
            points = sorted({max(1, round(most ** (i / 48))) for i in range(49)})
            return dict.fromkeys(points, 1.0)

        return cls(
            prompts=spread(max(1, context * 3 // 4)),
            answers=spread(max(1, context // 4)),
            measured=False,
        )

    def lengths(self, context: int) -> dict[int, float]:
        """Tokens that decode rows have behind them: each answer passes every length from its prompt on."""
        found: dict[int, float] = {}
        answers = sum(self.answers.values())
        for prompt, often in self.prompts.items():
            for answer, also in self.answers.items():
                steps = min(8, answer)
                for step in range(steps):
                    length = min(prompt + 1 + answer * step // steps, context)
                    share = often * also / answers * answer / steps
                    found[length] = found.get(length, 0.0) + share
        return found


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Sizes of all programs."""

    rows: tuple[int, ...]
    """Texts of a decode step."""
    lengths: tuple[int, ...]
    """Prompt tokens of a prefill step."""
    pages: tuple[int, ...]
    """Pages of a text."""
    mixed: bool
    """Whether one program reads tokens of texts and a part of a prompt."""
    padding: Mapping[str, float]
    """Expected share of padding by what is padded."""

    @classmethod
    def of(
        cls,
        traffic: Traffic,
        *,
        rows: int,
        chunk: int,
        context: int,
        page_size: int,
        mixed: bool,
        counts: tuple[int, int, int] = (5, 3, 3),
    ) -> "Buckets":
        """Buckets for a traffic.

        Args:
            traffic: What is expected.
            rows: Texts that run at once.
            chunk: Most prompt tokens of a step, a multiple of the page size.
            context: Tokens that a text may have.
            page_size: Positions of a page.
            mixed: Whether a step may do both.
            counts: Most sizes of rows, of lengths and of pages.
        """
        parts: dict[int, float] = {}
        for prompt, often in traffic.prompts.items():
            whole, rest = divmod(min(prompt, context), chunk)
            for size, times in ((chunk, whole), (rest, 1)):
                if size and times:
                    parts[size] = parts.get(size, 0.0) + often * times
        parts.setdefault(chunk, 0.0)
        running = {count: 1.0 / count for count in range(1, rows + 1)}
        behind = {-(-n // page_size): 0.0 for n in (context,)}
        for length, often in traffic.lengths(context).items():
            need = -(-length // page_size)
            behind[need] = behind.get(need, 0.0) + often
        row_sizes = cut(running, counts[0])
        lengths = cut(parts, counts[1], page_size)
        pages = cut(behind, counts[2])
        return cls(
            rows=row_sizes,
            lengths=lengths,
            pages=pages,
            mixed=mixed,
            padding={
                "decode rows": padding_share(running, row_sizes),
                "prompt tokens": padding_share(parts, lengths),
                "pages": padding_share(behind, pages),
            },
        )

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of all programs, largest first: the first one's memory is the most."""
        found = [Shape(rows, 0, 0, pages) for rows in self.rows for pages in self.pages]
        found += [Shape(0, 1, length, pages) for length in self.lengths for pages in self.pages]
        if self.mixed:
            rows, pages = self.rows[-1], self.pages[-1]
            found += [Shape(rows, 1, length, pages) for length in self.lengths]
        return tuple(sorted(found, key=lambda s: (s.tokens * s.pages, s), reverse=True))

    def shape(self, rows: int, length: int, pages: int) -> Shape | None:
        """The smallest program for so many decode rows beside a part of a prompt; None where no program does both."""
        wide = self.pages[bisect_left(self.pages, pages)]
        if not length:
            return Shape(self.rows[bisect_left(self.rows, rows)], 0, 0, wide)
        long = self.lengths[bisect_left(self.lengths, length)]
        if not rows:
            return Shape(0, 1, long, wide)
        # Padding rows read as many pages as real ones: few texts are quicker by themselves.
        if self.mixed and 4 * rows >= self.rows[-1]:
            return Shape(self.rows[-1], 1, long, self.pages[-1])
        return None
