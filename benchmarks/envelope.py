"""Random jobs against physics: what no forecast may be below, and what must grow or shrink with what.

    nice -n 10 python benchmarks/envelope.py --out envelope.jsonl [--count 300] [--seed 0] [--only decode]
    python benchmarks/envelope.py --out envelope.jsonl --table

Jobs come in families of five: a base, the same with twice the layers, the batch or the sequence, and on
twice the slices or on a slice of twice the size. Each is compiled up to the compiler's schedule, seconds a
job. Results go to --out, a JSON object a line, as they come; what is there is not done again. --table prints
the rules, the jobs that break them and, where one is known, why. --again simulates the done jobs' schedules by
today's code; --record FOLDER keeps schedules for tests, those of --only.
"""

import argparse
import contextlib
import gzip
import json
import lzma
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.aot import Compiler, Verb
from systolic.chips import chip, named_slices, slice
from systolic.core.digest import digest
from systolic.core.errors import SystolicError
from systolic.core.store import Store
from systolic.forecasting import forecast_job
from systolic.hlo import parse
from systolic.job import Layout, Remat
from systolic.models.decoder.config import Decoder
from systolic.sim import Timeline, simulate
from systolic.sim.rates import rates_of

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
VERBS = (Verb.train, Verb.train, Verb.prefill, Verb.decode, Verb.decode)
AXES = {
    Verb.train: ("data", "fsdp", "tensor", "context", "expert", "pipeline"),
    Verb.prefill: ("data", "fsdp", "tensor", "expert"),
    Verb.decode: ("data", "tensor", "expert"),
}
FAMILY = 5
"""Jobs of one family."""
SAME = 0.002
"""Share by which a time may fall where it should not: rounding of tiles and of overlaps."""
_METADATA = re.compile(r", metadata=\{[^{}]*\}")


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
    d_model = pick.choice((2048, 4096) if verb is Verb.decode else (512, 1024, 2048, 4096))
    heads = d_model // 128
    axes = spread(pick, devices, [a for a in AXES[verb] if mixed or a != "expert"])
    base = Case(
        family=number,
        member="base",
        verb=verb.value,
        slice=sized[devices],
        layers=pick.choice((4, 8, 16)) if verb is Verb.decode else pick.choice((2, 4, 8)),
        d_model=d_model,
        d_ff=d_model * pick.choice((1, 2)) if mixed else d_model * pick.choice((3, 4)),
        heads=heads,
        kv_heads=max(heads // pick.choice((1, 2, 4)), 1),
        vocab=pick.choice((8192, 32_768, 131_072)),
        experts=pick.choice((4, 8, 16)) if mixed else 1,
        sequence=pick.choice((512, 1024, 2048, 4096)),
        batch=pick.choice((2, 4, 8))
        * math.prod(axes.get(a, 1) for a in ("data", "fsdp", "expert")),
        remat=pick.choice(("none", "minimal", "full")) if verb is Verb.train else "none",
        axes=tuple(axes.items()),
    )
    if verb is Verb.decode:
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
    if verb is Verb.train and pick.random() < 0.6:
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
    found: list[Case] = []
    for members in families(seed):
        if len(found) >= count:
            return found
        found += members
    return found


# Physics


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Seconds below which a step of a case can't be, each by itself."""

    flops: float
    bytes: float
    links: float
    waits: float
    """Fixed costs of the collectives that each layer must wait for."""

    @property
    def seconds(self) -> float:
        """All at once."""
        return max(self.flops, self.bytes, self.links)

    @property
    def in_turn(self) -> float:
        """Of a decode step, in which each layer's sums wait for its weights, and the next layer for them."""
        return max(self.flops, self.bytes) + self.links + self.waits


def floor_of(case: Case) -> Floor:
    """By hand from sizes: matmuls, weights and caches over HBM, gradients and activations over links."""
    on = slice(case.slice)
    rates = rates_of(on)
    training, decoding = case.verb == "train", case.verb == "decode"
    tokens = case.batch * (1 if decoding else case.sequence)
    context = case.sequence if decoding else (case.sequence + 1) / 2
    attention = case.d_model * 128 * 2 * (case.heads + case.kv_heads)
    expert = 3 * case.d_model * case.d_ff
    active = min(case.experts, 2) if case.experts > 1 else 1
    head = case.d_model * case.vocab
    layer = attention + active * expert
    last = case.batch if case.verb == "prefill" else tokens  # positions whose logits someone reads
    forward = 2 * tokens * case.layers * (layer + 2 * case.heads * 128 * context) + 2 * last * head
    flops = forward * (3 if training else 1) / on.num_devices / rates.peaks["bf16"]

    parameters = case.layers * (attention + case.experts * expert) + head
    shards = case.ways("fsdp", "tensor", "pipeline", "expert")
    rows = case.batch / case.ways("data", "fsdp", "expert")
    cache = rows * case.sequence * case.layers * 2 * case.kv_heads * 128 * 2 / case.ways("tensor")
    if training:  # f32 weights and both moments of AdamW, read and written
        moved = 24 * parameters / shards
    else:
        used = min(case.experts, active * tokens) / case.experts
        read = case.layers * (attention + used * case.experts * expert) + head
        moved = 2 * read / shards + cache
    links, waits = _links(case, rates, parameters, rows)
    return Floor(flops=flops, bytes=moved / rates.hbm, links=links, waits=waits)


def _links(case: Case, rates: Any, parameters: float, rows: float) -> tuple[float, float]:
    """Seconds of what all links of a device must carry at least, and fixed costs in turn."""
    on, training = slice(case.slice), case.verb == "train"
    gathered = case.ways("tensor", "pipeline", "expert")
    fsdp, tensor = case.ways("fsdp"), case.ways("tensor")
    # Weights gathered once, gradients scattered once, both bf16.
    moved = (fsdp - 1) / fsdp * 2 * parameters / gathered * (2 if training else 1)
    copies = case.ways("data") // on.num_slices
    if training:
        moved += 2 * (copies - 1) / copies * 2 * parameters / gathered / fsdp
    tokens = rows * (1 if case.verb == "decode" else case.sequence / case.ways("context"))
    sums = case.layers / case.ways("pipeline") * (4 if training else 2)
    # A layer's partial sums over the tensor axis: reduced and spread again.
    moved += sums * 2 * (tensor - 1) / tensor * tokens * case.d_model * 2
    seconds = moved / (2 * rates.axes * rates.link)
    if on.num_slices > 1:
        # Gradients are summed over the slices once, each device of a slice with its part of them.
        n, devices = on.num_slices, on.devices_per_slice
        seconds = max(seconds, 2 * (n - 1) / n * 2 * parameters / devices / rates.dcn)
    waits = 0.0
    if tensor > 1:
        waits += sums * (rates.collective_seconds + tensor // 2 * rates.hop_seconds)
    if case.ways("expert") > 1:  # tokens go to their experts and back
        waits += sums * rates.collective_seconds
    return seconds, waits


# Running


def forecast(case: Case, compiler: Compiler) -> dict[str, Any]:
    """What the forecast says, as a record."""
    begin = time.perf_counter()
    record: dict[str, Any] = {"name": case.name, "key": case.key, "case": asdict(case)}
    try:
        made = forecast_job(
            case.job(), slice(case.slice), verb=Verb(case.verb), compiler=compiler.quick()
        )
    except SystolicError as error:
        return {**record, "problem": str(error)}
    memory = made.memory.peak_bytes if made.memory else (made.rejected or {}).get("need_bytes")
    return {
        **record,
        "fits": made.fits,
        "memory_bytes": memory,
        **(seen(made.timeline) if made.timeline is not None else {"step_seconds": None}),
        "hardware_flops": made.hardware_flops,
        "program": made.compiler.get("program"),
        "floor": asdict(floor_of(case)),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def seen(timeline: Timeline) -> dict[str, Any]:
    """What a record keeps of a simulated step."""
    by: Counter[str] = Counter()
    copies = 0.0
    for span, times in timeline.leaves():
        if span.lane == "core":
            by[span.resource.value] += span.seconds * times
            # XLA names a fusion by the ops it was made of.
            if ("dynamic-slice" in span.name or "data-format" in span.name) and not span.flops:
                copies += span.seconds * times
    return {
        "step_seconds": timeline.seconds,
        "by_resource": dict(by),
        "copies_seconds": copies,
        "notes": list(timeline.notes),
    }


def again(record: Mapping[str, Any], compiler: Compiler) -> dict[str, Any]:
    """A done job's record, its schedule simulated by today's code."""
    if not record.get("step_seconds"):
        return dict(record)
    entry = Store("programs", compiler.root).path(record["program"])
    report = json.loads((entry / "report.json").read_text())
    module = parse(gzip.decompress((entry / "module.hlo.gz").read_bytes()).decode())
    places = [tuple(place) for place in report["places"]]
    timeline = simulate(module, slice(record["case"]["slice"]), places, flags=report["flags"])
    floor = asdict(floor_of(case_of(record)))
    return {**record, **seen(timeline), "floor": floor}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Records by key; the last line may be torn."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            found[record["key"]] = record
    return found


# Rules


@dataclass(frozen=True, kw_only=True)
class Break:
    """A rule that a job does not keep."""

    rule: str
    name: str
    said: str
    why: str = ""


RULES = {
    "floor": "a step is not under the floor of FLOPs, bytes and links",
    "decode": "a decode step is within twice its floor from batch 8 on",
    "layers": "twice the layers take longer",
    "batch": "twice the batch takes longer",
    "sequence": "twice the sequence takes longer",
    "slices": "more slices at equal work per slice are not faster",
    "split": "memory of a device falls where an axis splits it",
    "answer": "every job has an answer",
}


def breaks(records: Sequence[Mapping[str, Any]]) -> tuple[list[Break], Counter[str]]:
    """The rules that records break, and how often each was checked."""
    found: list[Break] = []
    checked: Counter[str] = Counter()
    by_name = {record["name"]: record for record in records}

    def check(rule: str, record: Mapping[str, Any], good: bool, said: str, why: str = "") -> None:
        checked[rule] += 1
        if not good:
            found.append(Break(rule=rule, name=record["name"], said=said, why=why))

    for record in records:
        check("answer", record, "problem" not in record, record.get("problem", ""))
        if "problem" in record:
            continue
        case, now = case_of(record), record["step_seconds"]
        floor = floor_of(case)
        if now:
            text = f"{now * 1e3:.3f} ms, floor {floor.seconds * 1e3:.3f} ms"
            check("floor", record, now >= floor.seconds, text)
            if case.verb == "decode" and case.batch / case.ways("data", "fsdp", "expert") >= 8:
                text = f"{now * 1e3:.3f} ms, floor {floor.in_turn * 1e3:.3f} ms, {now / floor.in_turn:.2f} times"
                check("decode", record, now <= 2 * floor.in_turn, text, _spent(record, floor))
        base = by_name.get(f"{case.family:03d}-base", {})
        before = base.get("step_seconds")
        if case.member == "split" and base.get("memory_bytes") and record["memory_bytes"]:
            mib = [one["memory_bytes"] / 2**20 for one in (base, record)]
            check("split", record, mib[1] < mib[0], f"{mib[0]:.0f} to {mib[1]:.0f} MiB")
        elif case.member in RULES and case.member != "split" and now and before:
            text = f"{before * 1e3:.3f} to {now * 1e3:.3f} ms"
            check(case.member, record, now >= before * (1 - SAME), text)
    return found, checked


def _spent(record: Mapping[str, Any], floor: Floor) -> str:
    """Why a decode step is over its bound: what the compiler's schedule does that mathematics does not ask for."""
    copies = record.get("copies_seconds", 0.0)
    links = max(record["by_resource"].get("ici", 0.0) - floor.links - floor.waits, 0.0)
    rest = (record["step_seconds"] - links - copies) / floor.in_turn
    why = f"the schedule copies a layer's cache or weights out of the stacked ones ({copies * 1e3:.3f} ms) and gathers indices of scatters and weights split by the expert axis ({links * 1e3:.3f} ms); without these {rest:.2f} times"
    if rest > 2:
        vector = record["by_resource"].get("vpu", 0.0)
        rest -= vector / floor.in_turn
        why += f", without its attention on the vector units ({vector * 1e3:.3f} ms by the quick estimate) {rest:.2f}"
    return why if rest <= 2 else ""


def case_of(record: Mapping[str, Any]) -> Case:
    """The case of a record."""
    given = dict(record["case"])
    return Case(**{**given, "axes": tuple(tuple(axis) for axis in given["axes"])})


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the rules with their counts, then the breaks."""
    found, checked = breaks(records)
    kinds = Counter(record["case"]["verb"] for record in records)
    fits = sum(bool(record.get("fits")) for record in records)
    broken = Counter(one.rule for one in found)
    lines = [
        f"{len(records)} jobs ({', '.join(f'{n} {verb}' for verb, n in sorted(kinds.items()))}), {fits} of them fit.",
        "",
        "| rule | checked | broken |",
        "|---|---|---|",
        *(f"| {text} | {checked[rule]} | {broken[rule]} |" for rule, text in RULES.items()),
        "",
        "| broken rule | job | what came out | why |",
        "|---|---|---|---|",
    ]
    of = {record["name"]: record for record in records}
    for one in found:
        case = case_of(of[one.name])
        axes = " ".join(f"{axis} {size}" for axis, size in case.axes)
        text = f"{one.name}: {case.verb}, {case.slice}, {axes}"
        lines.append(f"| {one.rule} | {text} | {one.said[:160]} | {one.why} |")
    return "\n".join(lines)


def record_schedule(record: Mapping[str, Any], compiler: Compiler, folder: Path) -> None:
    """The schedule of a done job, small: names of JAX are left out but for kernels, machine code and folders too."""
    from tests.recorded.hlo.record import clean

    entry = Store("programs", compiler.root).path(record["program"])
    lines = clean(gzip.decompress((entry / "module.hlo.gz").read_bytes()).decode()).splitlines()
    kept = [one if "custom-call(" in one else _METADATA.sub("", one) for one in lines]
    (folder / f"{record['name']}.hlo.xz").write_bytes(
        lzma.compress("\n".join(kept).encode(), preset=9)
    )
    report = json.loads((entry / "report.json").read_text())
    (folder / f"{record['name']}.json").write_text(
        json.dumps({**record, "places": report["places"]}) + "\n"
    )


def recorded(path: Path) -> dict[str, Any]:
    """The record of a recorded schedule, simulated again."""
    record = json.loads(path.with_suffix(".json").read_text())
    text = lzma.decompress(path.with_suffix(".hlo.xz").read_bytes()).decode()
    places = [tuple(place) for place in record["places"]]
    return {**record, **seen(simulate(parse(text), slice(record["case"]["slice"]), places))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a verb, or names of jobs with commas")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    compiler, done = Compiler(), read(asked.out)
    cases = jobs(asked.count, asked.seed)
    known = [done[case.key] for case in cases if case.key in done]
    if asked.again:
        fresh = [again(record, compiler) for record in done.values()]
        asked.out.write_text("".join(json.dumps(record) + "\n" for record in fresh))
        return
    if asked.table:
        print(table(known))
        return
    names = (asked.only or "").split(",")
    cases = [c for c in cases if not asked.only or c.verb in names or c.name in names]
    if asked.record is not None:
        for case in cases:
            record_schedule(done[case.key], compiler, asked.record)
        return
    with asked.out.open("a") as out:
        for at, case in enumerate(cases, 1):
            if case.key in done:
                continue
            made = forecast(case, compiler)
            out.write(json.dumps(made) + "\n")
            out.flush()
            seconds = made.get("step_seconds") or 0.0
            print(
                f"{at}/{len(cases)} {case.name} {case.verb} {case.slice} {seconds * 1e3:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
