"""Where whole steps spend their time, forecast against chips: matmuls, attention, elementwise work, collectives.

``python benchmarks/buckets/run.py --out ROWS`` forecasts each program of the published profiles (by
XProf category, v6e-8) once and compares it with the median of its profiles. ``--quick`` stops at schedules.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "accuracy"))
import known
import xla_flags
from ask import append, fitting, settled
from records import Kind, Record, check_out, records, refuse
from rows import narrow

from systolic.chips.flags import merged
from systolic.compiling import Compiler

HERE = Path(__file__).parent
CATEGORIES: Mapping[str, Sequence[str]] = {
    "matmul": ("convolution fusion",),
    "attention": ("custom-call",),
    "elementwise": ("loop fusion", "data formatting"),
}
"""XProf's categories of each bucket; a profile has the bucket where it names all of them."""
PARTS: Mapping[str, str] = {"loops": "loop fusion", "formatting": "data formatting"}
"""Of elementwise work: what computes, and copies, transposes and slices by themselves."""
COVERED = 97.0
"""Per cent of a step that a profile's categories cover, from which on the rest counts as collectives."""

Key = tuple[int, int, bool]
"""Sequence, rows per device, layers scanned."""


NEEDED = {
    **dict.fromkeys(("id", "model"), Kind.text),
    **dict.fromkeys(("seq_len", "batch_per_chip", "step_ms"), Kind.positive),
    **{"buckets_ms_per_chip_step": Kind.object, "named_buckets_cover_pct": Kind.number},
}
"""Fields of a profile and their kinds."""
MODEL = "qwen3-8b"
"""The model whose profiles are compared."""


def profiles(path: Path) -> list[Record]:
    """The profiles of :data:`MODEL` in a file."""
    found = [record for record in records(path, NEEDED, {}) if record["model"] == MODEL]
    for record in found:
        for name, ms in record["buckets_ms_per_chip_step"].items():
            if not Kind.number.takes(ms):
                refuse(
                    f"{path}: {record['id']}: buckets_ms_per_chip_step.{name} is {json.dumps(ms)}; it takes {Kind.number.value}"
                )
    if not found:
        refuse(f"{path} has no profile whose model is {MODEL}; others are not compared here")
    return found


def key_of(record: Mapping[str, Any]) -> Key:
    """The program of a profile; runs at 2,048 tokens and those that say so have no scan."""
    sequence = record["seq_len"]
    # Runs of the later weeks begin from the program without a scan.
    unrolled = sequence == 2048 or "no-scan" in record["id"] or "-current-" in record["id"]
    return sequence, record["batch_per_chip"], not unrolled


def measured(records: Sequence[Mapping[str, Any]]) -> dict[Key, dict[str, float]]:
    """Median seconds of each bucket by program."""
    found: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        ms = record["buckets_ms_per_chip_step"]
        at = found[key_of(record)]
        at["step"].append(record["step_ms"])
        parts = {
            name: sum(ms[one] for one in names)
            for name, names in CATEGORIES.items()
            if all(one in ms for one in names)
        }
        if len(parts) == len(CATEGORIES) and record["named_buckets_cover_pct"] >= COVERED:
            parts["collective"] = record["step_ms"] - sum(parts.values())
        parts |= {name: ms[one] for name, one in PARTS.items() if one in ms}
        for name, value in parts.items():
            at[name].append(value)
    return {
        key: {name: statistics.median(values) / 1e3 for name, values in parts.items()}
        for key, parts in sorted(found.items())
    }


def options_of(key: Key) -> dict[str, Any]:
    """The ``lm`` recipe's options of a program of this series: Qwen3 8B on eight v6e chips."""
    sequence, rows, scanned = key
    sizes = known.sizes_of("qwen3-8b") or {}
    names = ("layers", "d_model", "d_ff", "heads", "kv_heads", "head_dim", "vocab", "qk_norm")
    layout = {"fsdp": 8, "remat": "full", "attention_block": 1024, "attention_backward": "fused"}
    return {
        "model": {name: sizes[name] for name in names} | {"tie_embeddings": False},
        "sequence": sequence,
        "batch": 8 * rows,
        "layout": layout | {"loss_chunks": 8 if scanned else 1},
        "precision": "bf16",
        **narrow("bfloat16", []),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", type=Path, default=HERE / "published.json")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines; an earlier run goes on")
    parser.add_argument("--quick", action="store_true", help="schedules only, cycles estimated")
    asked = parser.parse_args()
    mode = "quick" if asked.quick else "full"
    compiler = Compiler().quick() if asked.quick else Compiler()
    flags = merged(xla_flags.recipe(), xla_flags.offloaded(("reduce_scatter", "all_reduce")))
    check_out(asked.out)
    done = settled(asked.out, mode)
    for key, chips in measured(profiles(asked.buckets)).items():
        name = f"qwen3-8b-v6e8-s{key[0]}-bs{key[1]}{'-scan' if key[2] else ''}"
        if name not in done:
            made = fitting(options_of(key), flags, "v6e:2x4", compiler)
            done[name] = {"id": name, "mode": mode, "measured": chips, **made}
            append(asked.out, done[name])
        show(done[name])


def show(record: Mapping[str, Any]) -> None:
    """A line of Markdown: each bucket's seconds on the chip and by forecast, and its error."""
    if "problem" in record:
        print(f"| {record['id']} | {record['problem'].splitlines()[0]} |", flush=True)
        return
    formatting = record["formatting_seconds"]
    loops = record["buckets"]["elementwise"] - formatting
    ours = {"step": record["forecast_seconds"], **record["buckets"]}
    ours |= {"loops": loops, "formatting": formatting}
    cells = [
        f"{name} {chip:.3f} s, {ours[name]:.3f} s, {ours[name] / chip - 1:+.0%}"
        for name, chip in record["measured"].items()
        if chip
    ]
    print(f"| {record['id']} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
