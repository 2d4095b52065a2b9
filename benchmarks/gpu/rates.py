"""Prices of single kernels and collectives (``sim/gpu.py``) against what others measured, by half.

``python benchmarks/gpu/rates.py`` prints the errors of both halves; ``--shares`` what the fit half alone asks of each share,
``--rows`` each row. Rows are in the CSV files beside this, their sources in ``sources.toml``; a row belongs to a half by the
hash of what it measures.
"""

import argparse
import csv
import hashlib
import math
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from systolic.chips import chip, slice
from systolic.hlo import Groups
from systolic.sim import gpu

FOLDER = Path(__file__).parent
SMALL = {"matmul": 5e-5, "collective": 1e-4, "attention": 1e-4, "memory": 2e-5}
"""Measured seconds below which a row counts as short."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A measured row and its price."""

    kind: str
    group: str
    """What its share is of."""
    source: str
    half: str
    measured: float
    seconds: float

    @property
    def error(self) -> float:
        """Price over measured seconds, less one."""
        return self.seconds / self.measured - 1


def half_of(row: dict[str, str]) -> str:
    """``fit`` or ``judge``, by what was measured."""
    text = ",".join(value for key, value in row.items() if key not in ("us", "source"))
    return "judge" if hashlib.sha256(text.encode()).digest()[0] % 2 else "fit"


def priced() -> Iterator[Priced]:
    """Every row with its price."""
    for kind, price in PRICES.items():
        with (FOLDER / f"{kind}.csv").open() as file:
            for row in csv.DictReader(file):
                group, seconds = price(row)
                yield Priced(
                    kind=kind,
                    group=group,
                    source=row["source"],
                    half=half_of(row),
                    measured=float(row["us"]) * 1e-6,
                    seconds=seconds,
                )


def _matmul(row: dict[str, str]) -> tuple[str, float]:
    shape = [int(row[key]) for key in ("batch", "m", "n", "k")]
    dtypes = [row[key] for key in ("lhs", "rhs", "out")]
    on = chip(row["chip"])
    seconds = gpu.matmul_alone_seconds(on, *shape, *dtypes)
    if row["state"] == "sustained":
        seconds = max(seconds, 2 * math.prod(shape) / gpu.sustained_flops(on, *dtypes[:2]))
    return f"{row['chip']} {row['lhs']} {row['state']}", seconds


def _attention(row: dict[str, str]) -> tuple[str, float]:
    backward = row["backward"] == "1"
    seconds = gpu.attention_alone_seconds(
        chip(row["chip"]),
        batch=int(row["batch"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        q_len=int(row["q_len"]),
        kv_len=int(row["kv_len"]),
        head_dim=int(row["head_dim"]),
        causal=row["causal"] == "1",
        window=int(row["window"]),
        backward=backward,
        dtype=row["dtype"],
    )
    window = " window" if row["window"] != "0" else ""
    way = "backward" if backward else "forward"
    dtype = "fp8" if row["dtype"].startswith("f8") else "bf16"
    return f"{row['chip']} {dtype} {way} {row['head_dim']}{window}", seconds


def _collective(row: dict[str, str]) -> tuple[str, float]:
    size, count = int(row["group"]), int(row["groups"])
    on = slice(row["slice"])
    groups = Groups(tuple(tuple(range(i * size, (i + 1) * size)) for i in range(count)))
    seconds = gpu.collective_seconds(on, row["kind"], float(row["bytes"]), groups)
    name = row["slice"] if on.num_hosts > 1 and on.chip.max_pod_chips is None else on.chip.name
    return f"{name} {row['kind']}", seconds


def _memory(row: dict[str, str]) -> tuple[str, float]:
    seconds = gpu.elementwise_seconds(
        chip(row["chip"]), float(row["read_bytes"]), float(row["written_bytes"])
    )
    return f"{row['chip']} {row['what']}", seconds


PRICES = {
    "matmul": _matmul,
    "attention": _attention,
    "collective": _collective,
    "memory": _memory,
}


def table(rows: Iterable[Priced]) -> list[str]:
    """Lines of a Markdown table: errors by kind, source, length and half."""
    grouped: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        length = "short" if row.measured < SMALL[row.kind] else "long"
        grouped[row.kind, row.source, length][row.half].append(row.error)
    lines = [
        "| kind | source | length | fit: rows, mean, median, worst | judge: rows, mean, median, worst |",
        "|---|---|---|---|---|",
    ]
    for (kind, source, length), halves in sorted(grouped.items()):
        cells = [_cell(halves.get(half, [])) for half in ("fit", "judge")]
        lines.append(f"| {kind} | {source} | {length} | {cells[0]} | {cells[1]} |")
    return lines


def _cell(errors: list[float]) -> str:
    if not errors:
        return "–"
    sizes = [abs(error) for error in errors]
    worst = max(errors, key=abs)
    return f"{len(errors)}, {statistics.mean(sizes):.1%}, {statistics.median(errors):+.1%}, {worst:+.0%}"


def shares(rows: Iterable[Priced]) -> list[str]:
    """What the fit half multiplies each group's rate by: the median of price over measured seconds of its longer rows."""
    ratios = defaultdict(list)
    for row in rows:
        if row.half == "fit" and row.measured >= SMALL[row.kind]:
            ratios[row.kind, row.group].append(row.seconds / row.measured)
    return [
        f"{kind} {group}: x {statistics.median(found):.3f} ({len(found)} rows)"
        for (kind, group), found in sorted(ratios.items())
    ]


def main() -> None:
    """Prints what is chosen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shares", action="store_true", help="what the fit half asks of each share"
    )
    parser.add_argument("--rows", action="store_true", help="each row")
    chosen = parser.parse_args()
    rows = list(priced())
    if chosen.rows:
        for row in rows:
            print(row.half, row.kind, row.group, f"{row.measured:.3e}", f"{row.error:+.3f}")
    print("\n".join(shares(rows) if chosen.shares else table(rows)))
    sources = tomllib.loads((FOLDER / "sources.toml").read_text())
    assert {row.source for row in rows} <= set(sources), "a row without its source"


if __name__ == "__main__":
    main()
