"""Pairs of steps with one setting changed, as two jobs: what stands in the text of a base and of a change, by rule."""

import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "accuracy"))
import known
import xla_flags
from rows import narrow

from systolic.chips import slice
from systolic.chips.flags import merged

CORES_IN_NAME = ("v2", "v3", "v4", "v5p", "tpu7x")
KINDS = {
    "kernel": "a change inside a kernel that is not ours",
    "kernel layout": "the kernel's operand layouts are not an option here",
    "program": "another order or fusion of the same operations, which is no option here",
    "layout of weights": "the order of a weight's dims is no option here",
    "scan": "the scan over layers has no unrolling here",
    "host": "the host's dispatch is not part of a step's forecast",
    "bundle": "several changes at once, some of which are no options here",
}
"""Kinds of change that no option says."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One side of a pair."""

    model: Mapping[str, Any]
    slice: str
    sequence: int
    batch: float
    """Rows per device."""
    layout: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    """Options of what weights and optimizer state are kept in."""
    departures: tuple[str, ...] = field(default=())

    def options(self) -> dict[str, Any]:
        """Those of the ``lm`` recipe."""
        rows = round(self.batch * slice(self.slice).num_devices)
        return {
            "model": dict(self.model),
            "sequence": self.sequence,
            "batch": rows,
            "layout": dict(self.layout),
            "precision": "bf16",
            **self.state,
        }


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two settings and what was measured between them."""

    id: str
    family: str
    """Model, chip and sequence: settings of one family are ranked against each other."""
    measured_delta: float
    """After over before, minus 1."""
    before: Setting
    after: Setting

    def to_json(self) -> dict[str, Any]:
        """Both sides as options of the recipe, with what differs from the record."""
        return {
            "id": self.id,
            "measured_delta": self.measured_delta,
            "slice": self.before.slice,
            "before": self.before.options() | {"flags": list(self.before.flags)},
            "after": self.after.options() | {"flags": list(self.after.flags)},
            "departures": list(self.after.departures),
        }


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A pair that the options don't say."""

    id: str
    measured_delta: float | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


class SkipError(Exception):
    """Why a text is no setting."""


def pair_of(record: Mapping[str, Any]) -> Pair | Skipped:
    """A record of ``ablations.json`` as two jobs, or why not."""
    delta = record.get("delta_pct")
    before, after = record.get("step_before_s"), record.get("step_after_s")
    measured = after / before - 1 if before and after else (delta / 100 if delta else None)
    try:
        if measured is None:
            raise SkipError("no difference was printed")
        one = base_of(record)
        start, end = changed(one, str(record["change"]), str(record.get("kind") or ""))
        return Pair(
            id=record["id"],
            family=f"{known.name_of(str(record['base']))} {one.slice} {one.sequence}",
            measured_delta=measured,
            before=start,
            after=end,
        )
    except SkipError as reason:
        return Skipped(id=record["id"], measured_delta=measured, reason=str(reason))


def base_of(record: Mapping[str, Any]) -> Setting:
    """The setting that a pair starts from."""
    text = str(record["base"])
    sizes = known.sizes_of(text)
    if sizes is None:
        raise SkipError(f"the model of {text[:60]!r} is not one whose sizes are known here")
    if re.search(r"decode|serving|single stream|\bcc\d+", text, re.I):
        raise SkipError("decoding by another server, whose program is not ours")
    if re.search(r"kernel B\d", text):
        raise SkipError("a kernel by itself")
    departures: list[str] = []
    on = _slice(record)
    layout = _layout(text, on, departures)
    # The runs of Qwen3 and Gemma 4 in JAX and torchax keep weights and optimizer state in bf16, the others in f32.
    bf16 = re.search(r"qwen3-8b JAX|gemma4", text) and "f32 master" not in text
    state = narrow("bfloat16" if bf16 else None, departures)
    return Setting(
        model=_model(sizes),
        slice=on,
        sequence=_sequence(text, departures),
        batch=_batch(text, on, departures),
        layout=layout,
        flags=_flags(text),
        state=state,
        departures=tuple(departures),
    )


def _model(sizes: Mapping[str, Any]) -> dict[str, Any]:
    activation = sizes["activation"]
    return {
        **{k: sizes[k] for k in ("layers", "d_model", "d_ff", "heads", "kv_heads", "head_dim")},
        "mlp": "relu" if "relu" in activation else "swiglu" if "silu" in activation else "geglu",
        "vocab": -(-sizes["vocab"] // 128) * 128,
        "tie_embeddings": sizes["tied_embeddings"],
        "qk_norm": bool(sizes.get("qk_norm")),
        "experts": sizes.get("experts") or 1,
        "experts_per_token": sizes.get("top_k") or 2,
    }


def _slice(record: Mapping[str, Any]) -> str:
    generation, text = str(record["generation"]).split()[0], str(record["chips"])
    found = re.match(r"(\d+)", text)
    if found is None:
        raise SkipError("the number of chips is not stated")
    chips = int(found[1])
    shape = re.search(r"\((\d+x\d+(?:x\d+)?)\)", text)
    if shape:
        return f"{generation}:{shape[1]}"
    return f"{generation}-{2 * chips if generation in CORES_IN_NAME else chips}"


def _sequence(text: str, departures: list[str]) -> int:
    if found := re.search(r"seq(?:uence)? ?(\d+)([kK]?)", text):
        return int(found[1]) * (1024 if found[2] else 1)
    # As other records of the same runs state it.
    known_length = 2048 if "MaxText 128B" in text else 1024 if "gemma4" in text else 8192
    departures.append(f"sequence not stated, taken as {known_length}")
    return known_length


def _batch(text: str, on: str, departures: list[str]) -> float:
    if found := re.search(r"global batch (\d+)", text):
        return int(found[1]) / slice(on).num_devices
    if found := re.search(r"\b(?:bs|b|pdb|batch) ?(\d+)\b", text):
        return int(found[1])
    departures.append("batch not stated, taken as 4 rows a device")
    return 4


def _layout(text: str, on: str, departures: list[str]) -> dict[str, Any]:
    devices = slice(on).num_devices
    if found := re.search(r"context parallel (\d+)", text):
        layout: dict[str, Any] = {"context": int(found[1]), "fsdp": devices // int(found[1])}
    else:
        layout = dict(known.mesh_of(text, slice(on).chip.name) or {"fsdp": devices})
    if "no load balancing" in text:
        layout["context_order"] = "natural"
    layout["attention_block"] = _block(text)
    layout["attention_backward"] = (
        "fused"  # of MaxText's recipes of these models, and tokamax's default
    )
    if not text.startswith("MaxText") and "MaxText CE" not in text:
        layout["loss_chunks"] = 8
        departures.append("a loss in chunks: here 8 of them")
    if re.search(r"no[- ]scan", text):
        layout["loss_chunks"] = 1
        departures.append("layers are scanned here")
    policy = re.search(
        r"nothing_saveable|no remat|remat (?:full|minimal\w*)|\w*offload\w* (?:attention )?remat|save_\w+|offload remat",
        text,
    )
    words = policy[0] if policy else _usual_policy(text, on)
    if words == "offload remat":  # MaxText's recipe of these models
        names = ["query", "key", "value", "out", "layer_input"]
        return layout | {"remat": "offload", "remat_names": names}
    return layout | (known.policy_of(words) or {"remat": "full"})


def _usual_policy(text: str, on: str) -> str:
    """What runs of this kind have where a base leaves it out: other records of the same runs state it."""
    if text.startswith("MaxText") and on.startswith("v6e"):
        return "offload remat"
    if text.startswith("gemma4"):
        return "no remat"
    if "qwen3-8b JAX" in text and not re.search(r"no[- ]scan", text):
        return "offload attention"
    return "full"


def _block(text: str) -> int:
    """The kernel here has square blocks: the smaller side of theirs."""
    sides = [int(n) for n in re.findall(r"b(?:q|kv) ?(\d+)", text)]
    sides += [int(n) for n in re.findall(r"splash (\d+) blocks", text)]
    return min(sides) if sides else 1024


def _flags(text: str) -> tuple[str, ...]:
    flags: tuple[str, ...] = ()
    if "only scoped" in text:
        flags = tuple(xla_flags.GROUPS["DENSE_VMEM_LIMIT_FLAG"])
    elif "128B v5e" in text:
        flags = xla_flags.MAXTEXT_128B_V5E
    elif "8b" in text and "context parallel" not in text:
        flags = xla_flags.recipe()  # what the runs that state their flags have
    if re.search(r"no[- ]scan", text):
        flags = merged(flags, xla_flags.offloaded(("reduce_scatter", "all_reduce")))
    parts = re.split(r",|;|\bwith\b", re.sub(r"\((?!windowed)[^()]*\)", "", text))
    for part in parts:
        if re.search(r"SparseCore", part):
            flags = merged(flags, xla_flags.phrase(f"SparseCore offload {part}"))
        else:
            flags = merged(flags, xla_flags.phrase(part))
    return flags


def changed(base: Setting, change: str, kind: str) -> tuple[Setting, Setting]:
    """The settings before and after a change in words."""
    for pattern, apply in _CHANGES:
        if found := re.search(pattern, change):
            return apply(base, found)
    if any(word in change for word in ("splash", "CE:", "projection")) or kind in KINDS:
        raise SkipError(KINDS.get(kind, "a change inside a kernel that is not ours"))
    if "bundle" in change:
        return base, replace(base, flags=_bundle(base, change))
    earlier = re.search(r"(?:instead of|\(?was) ?(\d+)\)?", change)
    plain = re.sub(r" ?(?:instead of \d+|\((?!windowed)[^()]*\))", "", change)
    flags = xla_flags.phrase(plain)
    if not flags:
        raise SkipError(f"no flag or option is known for {change[:70]!r}")
    start = base
    if earlier and len(flags) == 1:
        name = flags[0].partition("=")[0]
        start = replace(base, flags=merged(base.flags, (f"{name}={earlier[1]}",)))
    after = replace(start, flags=merged(start.flags, flags))
    if set(after.flags) == set(start.flags):
        raise SkipError(f"the base has what {change[:50]!r} changes")
    return start, after


def _bundle(base: Setting, change: str) -> tuple[str, ...]:
    groups = [
        name
        for name in xla_flags.GROUPS
        if name in change.replace("HOST_OFFLOAD", "HOST_OFFLOAD_FLAGS")
    ]
    flags = [flag for name in groups for flag in xla_flags.GROUPS[name]]
    if "MaxText" in change and not groups:
        flags = list(xla_flags.recipe())
    if not flags and "async" in change:
        flags = list(xla_flags.GROUPS["CF_FOR_ALL_GATHER"])
    if not flags:
        raise SkipError("the flags of the bundle are not printed")
    return merged(base.flags, flags)


def _batches(base: Setting, found: re.Match[str]) -> tuple[Setting, Setting]:
    return replace(base, batch=int(found[1])), replace(base, batch=int(found[2]))


def _blocks(base: Setting, found: re.Match[str]) -> tuple[Setting, Setting]:
    numbers = [int(n) for n in re.findall(r"\d{3,4}", found[0])]
    now = base.layout["attention_block"]
    if "->" in found[0]:
        old, new = numbers[0], numbers[1]
    else:
        new, old = numbers[0], numbers[1] if len(numbers) > 1 else now
    if new == old:
        raise SkipError("the kernel's blocks are square here, and their smaller side stays")
    words = (*base.departures, "the kernel's blocks are square here")
    one = replace(base, layout={**base.layout, "attention_block": old}, departures=words)
    return one, replace(one, layout={**base.layout, "attention_block": new})


def _unfused(base: Setting, _: re.Match[str]) -> tuple[Setting, Setting]:
    return base, replace(base, layout={**base.layout, "attention_backward": "split"})


def _tensor(base: Setting, found: re.Match[str]) -> tuple[Setting, Setting]:
    words = found[0].partition("instead of")[0].partition(" at ")[0]
    numbers = {name.lower(): int(n) for name, n in re.findall(r"(\w+?)=?(\d+)", words)}
    fsdp, tensor = numbers.get("fsdp", 4), numbers.get("tp", 2)
    tokens = re.search(r"global batch (\d+)", found.string)
    rows = int(tokens[1]) / slice(base.slice).num_devices if tokens else base.batch
    start = replace(base, batch=rows)
    return start, replace(start, layout={**base.layout, "fsdp": fsdp, "tensor": tensor})


def _policy(base: Setting, found: re.Match[str]) -> tuple[Setting, Setting]:
    options = known.policy_of(found[1])
    if options is None:
        raise SkipError(f"the policy {found[1]!r} is not known here")
    kept = {
        k: v for k, v in base.layout.items() if k not in ("remat", "remat_names", "saved_names")
    }
    return base, replace(base, layout=kept | options)


def _recipe(base: Setting, found: re.Match[str]) -> tuple[Setting, Setting]:
    """Before: without the groups that the change names in brackets."""
    groups = {
        "windowed": "DISABLE_COLLECTIVE_MATMUL",
        "layout": "LAYOUT_FOR_ALL_REDUCE_SCATTER",
        "ACF": "CF_FOR_ALL_GATHER",
        "scheduler": "HOST_OFFLOAD_FLAGS",
    }
    named = [name for word, name in groups.items() if word in found.string]
    added = [flag for name in named for flag in xla_flags.GROUPS[name]]
    less = tuple(flag for flag in base.flags if flag not in added)
    return replace(base, flags=less), replace(base, flags=merged(less, xla_flags.recipe()))


def _skip(reason: str) -> Callable[[Setting, re.Match[str]], tuple[Setting, Setting]]:
    def raising(base: Setting, found: re.Match[str]) -> tuple[Setting, Setting]:
        raise SkipError(reason)

    return raising


_CHANGES: tuple[tuple[str, Callable[[Setting, re.Match[str]], tuple[Setting, Setting]]], ...] = (
    (r"batch \d+ -> \d+ with", _skip("batch and kernel change together")),
    (r"batch (\d+) -> (\d+)", _batches),
    (
        r"\blse\b",
        _skip("the kernel's output with its normalisers is not a name that can be saved here"),
    ),
    (r"splash (?:q block|bkv|bq) (?:\d+ -> )?\d+.*", _blocks),
    (r"unfused splash backward", _unfused),
    (r"(?:fsdp ?\d+ x tp ?\d+|TP=\d+ with FSDP=\d+).*", _tensor),
    (
        r"context strategy (?:ring|USP)",
        _skip("keys and values are gathered here; ring and Ulysses are no options"),
    ),
    (r"ring attention", _skip("ring attention is no option here")),
    (r"SEQ_MINOR", _skip(KINDS["kernel layout"])),
    (r"unroll(?:=\d+| )", _skip(KINDS["scan"])),
    (r"\bscan\b", _skip("layers are always scanned here")),
    (r"remat (\w+)", _policy),
    (r"((?:full|selective) remat)", _policy),
    (r"MaxText recipe flags", _recipe),
)
"""Patterns of a change and what they do to the base; the first that fits."""


def spearman(one: Sequence[float], two: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank."""

    def ranked(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(v) + (order.count(v) - 1) / 2 for v in values]

    return statistics.correlation(ranked(one), ranked(two))
