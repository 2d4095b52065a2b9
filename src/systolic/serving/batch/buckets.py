"""Options of a batch model, and the shapes that are compiled for it: sizes that pad the expected traffic least, under a number of programs."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from systolic.core.errors import DataError, OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, Range, check
from systolic.inference.rows import Bucket, fewest_padded, share_beyond

FIXED, VARIED = 8, 16
"""Programs for rows of one shape, and for rows that differ in length, where none are given."""
LONG = 512
"""Positions of a row for ``Shapes.positions``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Histograms of traffic, value to how often; {} if nothing is known: then each doubling is as likely."""

    examples: Mapping[int, float] = field(default_factory=dict)
    """How many examples waited when a batch was taken."""
    lengths: Mapping[int, float] = field(default_factory=dict)
    """Positions of an example, such as tokens of a text."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for :meth:`from_json`."""
        return {
            name: {str(value): weight for value, weight in sorted(histogram.items())}
            for name, histogram in (("examples", self.examples), ("lengths", self.lengths))
        }

    @classmethod
    def from_json(cls, fields: Any) -> "Traffic":
        """Traffic from plain values, such as a server recorded.

        Raises:
            DataError: it is something else.
        """
        try:
            traffic = cls(
                **{
                    name: {int(value): float(weight) for value, weight in fields[name].items()}
                    for name in ("examples", "lengths")
                    if name in fields.keys()  # noqa: SIM118 - a list has none
                }
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(
                f'traffic is no pair of histograms ({error}); give {{"examples": {{"SIZE": HOW OFTEN}}, "lengths": …}}'
            ) from error
        for histogram in (traffic.examples, traffic.lengths):
            if any(
                value < 1 or not 0 <= weight < float("inf") for value, weight in histogram.items()
            ):
                raise DataError("traffic has a size below 1 or a negative weight; count from 1")
        return traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """Limits within which buckets are chosen.

    Raises:
        OptionError: a value out of its range.
    """

    largest: Annotated[int, COUNT] = 32
    """Most rows of a batch."""
    programs: Annotated[int | None, COUNT] = None
    """Most programs to compile; None takes 8, or 16 where rows differ in length."""
    positions: Annotated[int | None, COUNT] = None
    """Most rows x length of a batch; None takes what ``largest`` rows of 512 positions have; on a CPU, 256 for each core."""
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketGrid:
    """The buckets of a model."""

    rows: Sequence[int]
    """Sizes of a batch, ascending."""
    lengths: Sequence[int | None]
    """Lengths of a row, ascending; [None] where all rows have one shape."""
    most_positions: int | None = None
    """Larger buckets are left out; a length whose are all larger has one of as many rows as fit."""
    ways: int = 1
    """Rows of a batch are a multiple of this."""
    padding_share: float
    """Expected share of positions that hold nothing, where each batch takes the smallest bucket that holds it."""
    measured: bool = False
    """Whether the traffic was given; else it is an assumption."""

    @property
    def all(self) -> list[Bucket]:
        """The smallest first."""
        return sorted(
            (self.at(rows, length) for length in self.lengths for rows in self.sizes(length)),
            key=lambda bucket: bucket.positions,
        )

    def at(self, rows: int, length: int | None) -> Bucket:
        """A bucket of these."""
        return Bucket(rows=rows, length=length)

    def sizes(self, length: int | None) -> list[int]:
        """Sizes of a batch of rows of a length, ascending."""
        if self.most_positions is None or length is None:
            return list(self.rows)
        fits = [rows for rows in self.rows if rows * length <= self.most_positions]
        return fits or [max(self.most_positions // length // self.ways, 1) * self.ways]

    def length_for(self, length: int) -> int | None:
        """The least length that holds a row."""
        if self.lengths[0] is None:
            return None
        return next(size for size in self.lengths if size is not None and size >= length)

    def __str__(self) -> str:
        count = len(self.all)
        rows = ", ".join(map(str, self.rows))
        across = (
            "" if self.lengths[0] is None else f" x {', '.join(map(str, self.lengths))} positions"
        )
        programs = f"{count} program{'s' if count > 1 else ''}"
        return f"{programs}: batches of {rows}{across}; expected padding {self.padding_share:.1%}"


def choose(
    shapes: Shapes, *, longest: int | None = None, ways: int = 1, linear: bool = False
) -> BucketGrid:
    """The buckets with the least expected padding.

    Args:
        shapes: Limits and traffic.
        longest: Most positions of a row; None where all rows have one shape.
        ways: Rows of a batch are a multiple of this.
        linear: Whether a call takes as long as it has positions: then several calls hold any number of rows, and
            rows that differ in length get more lengths in place of more sizes.

    Raises:
        OptionError: not even the largest shape is within the limits.
    """
    if shapes.largest < ways:
        raise OptionError(
            f"a batch has at most {shapes.largest} rows, and the {ways} devices each take one; allow {ways} or more"
        )
    largest = shapes.largest // ways * ways
    counts = _weights(shapes.traffic.examples, largest, 1)
    rows = _weights(counts, largest, ways)
    if longest is None:
        count = shapes.programs or FIXED
        halves = _falling(largest, ways, 2)
        halved = linear and len(halves) <= count
        sizes = halves if halved else _sizes(rows, count, ways)
        measured = bool(shapes.traffic.examples)
        trial = BucketGrid(rows=sizes, lengths=[None], padding_share=0.0, measured=measured)
        return replace(trial, padding_share=_padding(trial, counts, {1: 1.0}, halved))
    lengths = _weights(shapes.traffic.lengths, longest, 1)
    most = max(shapes.positions or largest * LONG, longest * ways)
    measured, programs = bool(shapes.traffic.lengths), shapes.programs or VARIED

    def grid(sizes: list[int], count: int) -> BucketGrid:
        across, _ = fewest_padded(lengths, count)
        trial = BucketGrid(
            rows=sizes,
            lengths=across,
            most_positions=most,
            ways=ways,
            padding_share=0.0,
            measured=measured,
        )
        return replace(trial, padding_share=_padding(trial, counts, lengths, linear))

    if linear:
        sizes = _falling(largest, ways, 4)[-programs:]
        grids = (grid(sizes, count) for count in range(programs, 0, -1))
        return next(trial for trial in grids if len(trial.all) <= programs)
    # Every split of the programs into sizes x lengths.
    splits = (
        grid(_sizes(rows, count, ways), programs // count) for count in range(1, programs + 1)
    )
    return min(splits, key=lambda split: split.padding_share)


def _padding(
    grid: BucketGrid, rows: Mapping[int, float], lengths: Mapping[int, float], linear: bool
) -> float:
    """Expected share of positions that hold nothing, with the buckets that the bound leaves out."""
    held: dict[int, float] = {}
    for length, often in lengths.items():
        across = grid.length_for(length) or length
        held[across] = held.get(across, 0.0) + often * across
    total = sum(
        positions
        * sum(often * _rows(count, grid.sizes(across), linear) for count, often in rows.items())
        for across, positions in held.items()
    )
    useful = sum(length * often for length, often in lengths.items())
    useful *= sum(count * often for count, often in rows.items())
    return share_beyond(useful, total)


def _rows(count: int, sizes: Sequence[int], linear: bool) -> int:
    """Rows of the calls that hold ``count``: of the largest, and of one for the rest or, where it is linear, the fewest."""
    full = count // sizes[-1] * sizes[-1]
    rest = count - full
    if not linear:
        return full + next(size for size in (0, *sizes) if size >= rest)
    fewest = [0]
    for waiting in range(1, rest + 1):
        fewest.append(min(size + fewest[max(waiting - size, 0)] for size in sizes))
    return full + fewest[rest]


def _sizes(weights: Mapping[int, float], count: int, least: int) -> list[int]:
    """Sizes of a batch; the smallest is ``least``, so that a request alone pads no more than devices need."""
    if count == 1 or len(weights) == 1:
        return fewest_padded(weights, count)[0]
    others = {value: weight for value, weight in weights.items() if value != least}
    return [least, *fewest_padded(others, count - 1)[0]]


def _falling(largest: int, ways: int, by: int) -> list[int]:
    """Sizes of a batch that fall by a factor from the largest to ``ways``: every number of rows is a few of them."""
    sizes = [largest]
    while sizes[0] > ways:
        sizes.insert(0, max(sizes[0] // by // ways * ways, ways))
    return sizes


def _weights(histogram: Mapping[int, float], most: int, step: int) -> dict[int, float]:
    """A histogram over the multiples of ``step`` up to ``most``, which is always there."""
    weights = histogram or {value: 1 / value for value in range(1, most + 1)}
    rounded = dict.fromkeys((most,), 0.0)
    for value, weight in weights.items():
        up = min(-(-value // step) * step, most)
        rounded[up] = rounded.get(up, 0.0) + weight
    return rounded


class Recorder:
    """Histograms of what came; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._examples: Counter[int] = Counter()
        self._lengths: Counter[int] = Counter()

    def record(self, waited: int, lengths: list[int]) -> None:
        """A batch.

        Args:
            waited: Rows that could have been in it.
            lengths: Of its rows, 0 where all have one shape.
        """
        with self._lock:
            self._examples[waited] += 1
            self._lengths.update(length for length in lengths if length)

    @property
    def traffic(self) -> Traffic:
        """Traffic so far."""
        with self._lock:
            return Traffic(
                examples={value: float(count) for value, count in self._examples.items()},
                lengths={value: float(count) for value, count in self._lengths.items()},
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class InputLimits:
    """Largest inputs.

    Raises:
        OptionError: a value out of its range.
    """

    examples: Annotated[int, COUNT] = 256
    """Examples of a request."""
    bytes: Annotated[int, COUNT] = 32 * 2**20
    """Size of an encoded file, or of a text."""
    pixels: Annotated[int, COUNT] = 40_000_000
    """Width x height of a picture, by its header."""
    seconds: Annotated[float, Range(above=0)] = 1800.0
    """Length of a recording."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOptions:
    """Options of a batch model.

    Raises:
        OptionError: a value out of its range.
    """

    shapes: Shapes = field(default_factory=Shapes)
    limits: InputLimits = field(default_factory=InputLimits)
    delay_ms: Annotated[float, NOT_NEGATIVE] = 2.0
    """Longest wait of a row for others while a worker is free, and a request is read or computed."""
    waiting: Annotated[int, COUNT] = 1024
    """Most examples that wait or are read; further requests are refused."""
    waiting_bytes: Annotated[int, COUNT] = 512 * 2**20
    """Most bytes of their inputs."""
    readers: Annotated[int, COUNT] = 4
    """Threads that decode."""
    workers: Annotated[int, COUNT] = 2
    """Threads that run batches: while one waits for the device, another prepares the next call."""
    stalled_seconds: Annotated[float, Range(above=0)] = 60.0
    """A call that takes longer makes the model not ready."""
    strict: bool = False
    """Whether a compile after the model is ready ends it, beside being counted."""

    def __post_init__(self) -> None:
        check(self)
