"""The random jobs of the envelope: families of a base and its variants."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from systolic import recipes
from systolic.chips import chip, named_slices, slice
from systolic.compiling import StepKind
from systolic.core.errors import SystolicError
from systolic.core.files import digest
from systolic.job import Layout, Remat
from systolic.models.decoder.config import Decoder

Member = TypeVar("Member")

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
VERBS = (StepKind.train, StepKind.train, StepKind.prefill, StepKind.decode, StepKind.decode)
AXES = {
    StepKind.train: ("data", "fsdp", "tensor", "context", "expert", "pipeline"),
    StepKind.prefill: ("data", "fsdp", "tensor", "expert"),
    StepKind.decode: ("data", "tensor", "expert"),
}
FAMILY = 5
"""Jobs of one family."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job on one slice."""

    family: int
    member: str
    """base, layers, batch, sequence, slices or split."""
    verb: str
    slice: str
    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    vocab: int
    experts: int
    sequence: int
    batch: int
    """Rows, all devices."""
    remat: str
    axes: tuple[tuple[str, int], ...]
    """Axis name to size; the product is the number of devices."""

    @property
    def name(self) -> str:
        return f"{self.family:03d}-{self.member}"

    @property
    def key(self) -> str:
        """Names what is computed, so that a changed generator does not pass for a done job."""
        return digest({**asdict(self), "axes": dict(self.axes)}, length=16)

    def job(self) -> Any:
        sizes = ("layers", "d_model", "d_ff", "heads", "kv_heads", "vocab", "experts")
        model = Decoder(head_dim=128, **{size: getattr(self, size) for size in sizes})
        layout = Layout(**{"fsdp": 1, **dict(self.axes)}, remat=Remat(self.remat))
        options = {"sequence": self.sequence, "batch": self.batch}
        return recipes.find("lm")({**options, "model": model, "layout": layout})

    def ways(self, *axes: str) -> int:
        """Product of some axes' sizes."""
        return math.prod(dict(self.axes).get(axis, 1) for axis in axes)

    def problem(self) -> str | None:
        """Why the layout does not divide the slice, the model or the batch."""
        on = slice(self.slice)
        try:
            self.job().on(on.num_devices, on.num_slices)
        except SystolicError as error:
            return str(error)
        return None


def families(seed: int) -> Iterator[list[Case]]:
    """Without end, the same for the same seed."""
    at = 0
    while True:
        members = family(random.Random(f"{seed}/{at}"), at)
        if members:
            yield members
        at += 1


def family(pick: random.Random, number: int) -> list[Case]:
    """Base and variants; empty where one of them does not divide."""
    verb = pick.choice(VERBS)
    sized = {s.num_devices: s.name for s in named_slices(chip(pick.choice(CHIPS)))}
    devices = pick.choice([n for n in (4, 8, 16) if n in sized and 2 * n in sized])
    mixed = pick.random() < 0.35
    d_model = pick.choice((2048, 4096) if verb is StepKind.decode else (512, 1024, 2048, 4096))
    heads = d_model // 128
    axes = spread(pick, devices, [a for a in AXES[verb] if mixed or a != "expert"])
    base = Case(
        family=number,
        member="base",
        verb=verb.value,
        slice=sized[devices],
        layers=pick.choice((4, 8, 16)) if verb is StepKind.decode else pick.choice((2, 4, 8)),
        d_model=d_model,
        d_ff=d_model * pick.choice((1, 2)) if mixed else d_model * pick.choice((3, 4)),
        heads=heads,
        kv_heads=max(heads // pick.choice((1, 2, 4)), 1),
        vocab=pick.choice((8192, 32_768, 131_072)),
        experts=pick.choice((4, 8, 16)) if mixed else 1,
        sequence=pick.choice((512, 1024, 2048, 4096)),
        batch=pick.choice((2, 4, 8))
        * math.prod(axes.get(a, 1) for a in ("data", "fsdp", "expert")),
        remat=pick.choice(("none", "minimal", "full")) if verb is StepKind.train else "none",
        axes=tuple(axes.items()),
    )
    if verb is StepKind.decode:
        base = replace(base, batch=base.batch * pick.choice((1, 2, 4)))
    split = pick.choice(list(axes))
    larger = {**axes, split: 2 * axes[split]}
    members = [
        base,
        replace(base, member="layers", layers=2 * base.layers),
        replace(base, member="batch", batch=2 * base.batch),
        replace(base, member="sequence", sequence=2 * base.sequence),
        replace(base, member="split", slice=sized[2 * devices], axes=tuple(larger.items())),
    ]
    if verb is StepKind.train and pick.random() < 0.6:
        name = f"{pick.choice((2, 4))}x{base.slice}"
        count = slice(name).num_slices
        copies = tuple({**axes, "data": count * axes.get("data", 1)}.items())
        members[-1] = replace(
            base, member="slices", slice=name, batch=count * base.batch, axes=copies
        )
    return [] if any(one.problem() for one in members) else members


def spread(pick: random.Random, devices: int, axes: Sequence[str]) -> dict[str, int]:
    """A random product of axes that is the number of devices."""
    sizes = Counter(pick.choice(axes) for _ in range(devices.bit_length() - 1))
    return {axis: 2**times for axis, times in sorted(sizes.items())}


def jobs(count: int, seed: int) -> list[Case]:
    """The first ``count`` of them, whole families."""
    return whole_families(families(seed), count)


def whole_families(families: Iterator[list[Member]], count: int) -> list[Member]:
    """Members of as many families as hold ``count`` of them."""
    found: list[Member] = []
    while len(found) < count:
        found += next(families)
    return found


def case_of(record: Mapping[str, Any]) -> Case:
    """The case of a record."""
    given = dict(record["case"])
    return Case(**{**given, "axes": tuple(tuple(axis) for axis in given["axes"])})
