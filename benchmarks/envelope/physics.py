"""Floors of a job's step by hand, and the rules that forecasts of jobs keep."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cases import Case, case_of

from systolic.chips import slice
from systolic.sim.rates import rates_of

SAME = 0.002
"""Share by which a time may fall where it should not: rounding of tiles and of overlaps."""


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
    # As documented: a bound is by what links can carry, not by what was measured on them.
    link = rates.chip.ici_bytes_per_second_per_link
    seconds = moved / (2 * rates.axes * link)
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


# Rules


@dataclass(frozen=True, kw_only=True)
class Break:
    """A rule that a job does not keep."""

    rule: str
    name: str
    said: str


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

    def check(rule: str, record: Mapping[str, Any], good: bool, said: str) -> None:
        checked[rule] += 1
        if not good:
            found.append(Break(rule=rule, name=record["name"], said=said))

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
                check("decode", record, now <= 2 * floor.in_turn, text)
        base = by_name.get(f"{case.family:03d}-base", {})
        before = base.get("step_seconds")
        if case.member == "split" and base.get("memory_bytes") and record["memory_bytes"]:
            mib = [one["memory_bytes"] / 2**20 for one in (base, record)]
            check("split", record, mib[1] < mib[0], f"{mib[0]:.0f} to {mib[1]:.0f} MiB")
        elif case.member in RULES and case.member != "split" and now and before:
            text = f"{before * 1e3:.3f} to {now * 1e3:.3f} ms"
            check(case.member, record, now >= before * (1 - SAME), text)
    return found, checked


def _without_waits(records: Sequence[Mapping[str, Any]]) -> str:
    """How many decode steps keep their bound without the fixed costs, which the forecast itself charges."""
    found = []
    for record in records:
        case = case_of(record)
        rows = case.batch / case.ways("data", "fsdp", "expert")
        if case.verb == "decode" and rows >= 8 and record.get("step_seconds"):
            floor = floor_of(case)
            found.append(record["step_seconds"] / (floor.in_turn - floor.waits))
    above = sum(ratio > 2 for ratio in found)
    return (
        f"The floor of a decode step holds the fixed costs of the collectives that each layer waits for, which the forecast charges "
        f"too. By FLOPs, bytes and links alone {above} of {len(found)} are above twice, {max(found):.1f} times at most: small models whose layers take less than a collective's start."
    )


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
        "| broken rule | job | what came out |",
        "|---|---|---|",
    ]
    of = {record["name"]: record for record in records}
    if checked["decode"]:
        lines[-3:-3] = ["", _without_waits(records)]
    for one in found:
        case = case_of(of[one.name])
        axes = " ".join(f"{axis} {size}" for axis, size in case.axes)
        text = f"{one.name}: {case.verb}, {case.slice}, {axes}"
        lines.append(f"| {one.rule} | {text} | {one.said[:160]} |")
    return "\n".join(lines)
