"""Sizes of the compiled programs, chosen for the traffic: less padding for more programs."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from systolic.inference.rows import fewest_padded, padding_share
from systolic.steps.paged import StepShape

Needs = Mapping[int, float]
"""How often each size is needed."""
DRAFTED_TEXTS, DRAFTED_SIZES = 16, 3
"""Most texts that proposals are verified for at once, and sizes of the programs: more texts fill a step by themselves."""
POINTS = 64
"""Sizes of a histogram whose products with those of another are counted."""


def in_units(needed: Needs, unit: int) -> Needs:
    """Sizes rounded up to multiples of ``unit``."""
    sizes: dict[int, float] = {}
    for size, often in needed.items():
        place = -(-size // unit) * unit
        sizes[place] = sizes.get(place, 0.0) + often
    return sizes


@dataclass(frozen=True, kw_only=True)
class TextTraffic:
    """Requests that are expected."""

    prompts: Needs
    """Tokens of a prompt and how often."""
    answers: Needs
    """Tokens of an answer and how often."""
    reads: Needs = field(default_factory=dict)
    """Tokens of a prompt that no page holds yet; {} where all are read."""
    running: Needs = field(default_factory=dict)
    """Texts that a step continues; {} where few are likelier than many."""
    measured: bool = True
    """Whether it comes from requests; else it is an assumption."""

    @classmethod
    def assumed(cls, context: int) -> "TextTraffic":
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
        lengths: dict[int, float] = {}
        lasting, answers = _fewer(self.answers), sum(self.answers.values())
        for prompt, often in _fewer(self.prompts).items():
            for answer, also in lasting.items():
                steps = min(8, answer)
                for step in range(steps):
                    length = min(prompt + 1 + answer * step // steps, context)
                    share = often * also / answers * answer / steps
                    lengths[length] = lengths.get(length, 0.0) + share
        return lengths


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Sizes of all programs."""

    rows: Sequence[int]
    """Texts of a decode step."""
    lengths: Sequence[int]
    """Prompt tokens of a prefill step."""
    pages: Sequence[int]
    """Pages of a text."""
    mixed: bool
    """Whether one program reads tokens of texts and a part of a prompt."""
    padding: Mapping[str, float]
    """Expected share of padding by what is padded."""
    measured: bool
    """Whether the traffic was."""
    drafts: int = 0
    """Tokens that are proposed for a text at once."""

    @classmethod
    def of(
        cls,
        traffic: TextTraffic,
        *,
        rows: int,
        chunk: int,
        context: int,
        page_size: int,
        mixed: bool,
        counts: tuple[int, int, int] = (5, 3, 3),
        least_rows: int = 1,
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
            least_rows: Of a decode step, padding among them.
        """
        parts: dict[int, float] = {}
        for prompt, often in (traffic.reads or traffic.prompts).items():
            whole, rest = divmod(min(prompt, context), chunk)
            for size, times in ((chunk, whole), (rest, 1)):
                if size and times:
                    parts[size] = parts.get(size, 0.0) + often * times
        parts.setdefault(chunk, 0.0)
        running = _running(traffic, rows)
        padded: dict[int, float] = {}
        for count, often in running.items():
            place = min(max(count, least_rows), rows)
            padded[place] = padded.get(place, 0.0) + often
        behind = {-(-n // page_size): 0.0 for n in (context,)}
        for length, often in traffic.lengths(context).items():
            need = -(-length // page_size)
            behind[need] = behind.get(need, 0.0) + often
        # One text is the most usual, and its step a product with a vector.
        alone = [1] if least_rows == 1 < min(rows, counts[0]) else []
        several = {size: often for size, often in padded.items() if size not in alone}
        row_sizes = [*alone, *fewest_padded(several, counts[0] - len(alone))[0]]
        lengths, _ = fewest_padded(in_units(parts, page_size), counts[1])
        pages, page_share = fewest_padded(behind, counts[2])
        row_share, part_share = padding_share(running, row_sizes), padding_share(parts, lengths)
        return cls(
            rows=row_sizes,
            lengths=lengths,
            pages=pages,
            mixed=mixed,
            measured=traffic.measured,
            padding={
                "decode rows": row_share,
                "prompt tokens": part_share,
                "pages": page_share,
                "all": _joint(traffic, parts, row_share, part_share),
            },
        )

    def lines(self) -> list[str]:
        """The sizes and their expected padding, one line each."""
        origin = "of the traffic given" if self.measured else "assumed: no traffic was given"
        parts = (("decode rows", self.rows), ("prompt tokens", self.lengths), ("pages", self.pages))
        lines = [
            f"{len(self.shapes) + len(self.drafted)} programs of steps; expected padding, {origin}:"
        ]
        for name, sizes in parts:
            listed = ", ".join(map(str, sizes))
            lines.append(f"  {name} {listed}: {self.padding[name]:.1%}")
        return lines

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """Shapes of all programs, largest first: the first one needs the most memory."""
        shapes = [StepShape(rows, 0, 0, pages) for rows in self.rows for pages in self.pages]
        shapes += [
            StepShape(0, 1, length, pages) for length in self.lengths for pages in self.pages
        ]
        if self.mixed:
            rows, pages = self.rows[-1], self.pages[-1]
            shapes += [StepShape(rows, 1, length, pages) for length in self.lengths]
        return tuple(sorted(shapes, key=lambda s: (s.tokens * s.pages, s), reverse=True))

    @property
    def drafted_texts(self) -> Sequence[int]:
        """Texts of a step that verifies proposals."""
        if not self.drafts:
            return ()
        counts = range(1, min(self.rows[-1], DRAFTED_TEXTS) + 1)
        return fewest_padded({count: 1.0 / count for count in counts}, DRAFTED_SIZES)[0]

    @property
    def drafted(self) -> tuple[StepShape, ...]:
        """Shapes of the programs that verify proposals, largest first: the last token of a text and proposals for it."""
        shapes = [
            StepShape(0, texts, self.drafts + 1, pages)
            for texts in self.drafted_texts
            for pages in self.pages
        ]
        return tuple(sorted(shapes, key=lambda s: (s.tokens * s.pages, s), reverse=True))

    def drafted_shape(self, texts: int, pages: int) -> StepShape:
        """The smallest program that verifies proposals for so many texts."""
        several = self.drafted_texts
        wide = self.pages[bisect_left(self.pages, pages)]
        return StepShape(0, several[bisect_left(several, texts)], self.drafts + 1, wide)

    def shape(self, rows: int, length: int, pages: int) -> StepShape | None:
        """The smallest program for so many decode rows beside a part of a prompt; None where no program does both."""
        wide = self.pages[bisect_left(self.pages, pages)]
        if not length:
            return StepShape(self.rows[bisect_left(self.rows, rows)], 0, 0, wide)
        long = self.lengths[bisect_left(self.lengths, length)]
        if not rows:
            return StepShape(0, 1, long, wide)
        # Padding rows read as many pages as real ones: few texts are quicker by themselves.
        if self.mixed and 4 * rows >= self.rows[-1]:
            return StepShape(self.rows[-1], 1, long, self.pages[-1])
        return None


def _running(traffic: TextTraffic, rows: int) -> Needs:
    """Texts of a decode step and how often, up to so many."""
    if not traffic.running:
        return {count: 1.0 / count for count in range(1, rows + 1)}
    counts = {rows: 0.0}
    for count, often in traffic.running.items():
        counts[min(count, rows)] = counts.get(min(count, rows), 0.0) + often
    return counts


def _fewer(needed: Needs) -> Needs:
    """At most POINTS sizes, each the largest of a group that comes as often as the other groups."""
    if len(needed) <= POINTS:
        return needed
    groups: dict[int, float] = {}
    total, before, group, largest = sum(needed.values()), 0.0, 0.0, max(needed)
    for size, often in sorted(needed.items()):
        before, group = before + often, group + often
        if before * POINTS >= total * (len(groups) + 1) or size == largest:
            groups[size], group = group, 0.0
    return groups


def _joint(traffic: TextTraffic, parts: Needs, row_share: float, part_share: float) -> float:
    """Expected share of padding among all positions: the first token of an answer comes with the prompt's last part."""
    read = sum(size * often for size, often in parts.items())
    texts = sum((traffic.reads or traffic.prompts).values())
    answers = sum(traffic.answers.values())
    longer = sum((size - 1) * often for size, often in traffic.answers.items())
    written = longer * texts / answers if answers else 0.0
    held = read / (1 - part_share) + written / (1 - row_share)
    return 1 - (read + written) / held if held else 0.0
