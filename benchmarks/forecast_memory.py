"""Whether `--quick` is right about memory: its verdict at the edge of fitting against the full compile's.

    nice -n 10 python benchmarks/forecast_memory.py --out memory.json [--only v5e] [--quick]

Each case is a decoder of 2 to 4 layers on a slice. Its feed-forward width is moved, by quick compiles,
until its peak is the wanted share of the device's memory, from 92 % to 108 %; then the program is compiled
to the end. Results go to --out as they come; what is there is not done again. --quick stops before the full
compiles, which take minutes each; --table prints what an earlier run wrote.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.chips import slice
from systolic.compiling import Compiled, Compiler, Failed, JobProgram, Rejected
from systolic.compiling import compile as compile_program
from systolic.core.files import write_json
from systolic.core.units import GIB
from systolic.job import Layout, Remat
from systolic.models.decoder.config import Decoder

WIDTH_STEP, LEAST, MOST = 128, 256, 65_536
"""Feed-forward widths."""
CLOSE = 0.003
"""Share of the memory that the search may be off by."""
TRIES = 7


@dataclass(frozen=True, kw_only=True)
class Case:
    slice: str
    share: float
    """Wanted peak over the memory that there is."""
    rows: int
    """Per device."""
    layers: int = 2
    remat: Remat = Remat.none
    sequence: int = 2048

    @property
    def name(self) -> str:
        return f"{self.slice} {self.share:.1%} {self.layers} layers, {self.rows} rows, {self.remat.value}"

    def job(self, width: int) -> Any:
        model = Decoder(
            layers=self.layers,
            d_model=2048,
            d_ff=width,
            heads=16,
            kv_heads=16,
            head_dim=128,
            vocab=32_768,
        )
        options = {
            "model": model,
            "sequence": self.sequence,
            "batch_per_device": self.rows,
            "layout": Layout(remat=self.remat),
        }
        return recipes.find("lm")(options)


CASES = (
    Case(slice="v5e-4", share=0.92, rows=8, layers=2),
    Case(slice="v5e-4", share=0.985, rows=25, layers=4, remat=Remat.full),
    Case(slice="v5e-4", share=0.997, rows=15, layers=3, remat=Remat.minimal),
    Case(slice="v5e-4", share=1.01, rows=8, layers=2),
    Case(slice="v5e-16", share=0.95, rows=19, layers=2, remat=Remat.minimal),
    Case(slice="v5e-16", share=0.993, rows=16, layers=2),
    Case(slice="v5e-16", share=1.005, rows=26, layers=4, remat=Remat.full),
    Case(slice="v5e-16", share=1.06, rows=14, layers=3),
    Case(slice="v6e-4", share=0.94, rows=47, layers=2, remat=Remat.full),
    Case(slice="v6e-4", share=0.99, rows=33, layers=2),
    Case(slice="v6e-4", share=0.998, rows=50, layers=4, remat=Remat.full),
    Case(slice="v6e-4", share=1.02, rows=40, layers=2, remat=Remat.minimal),
    Case(slice="v5p-8", share=0.93, rows=94, layers=2),
    Case(slice="v5p-8", share=0.995, rows=154, layers=4, remat=Remat.full),
    Case(slice="v5p-8", share=1.008, rows=121, layers=2, remat=Remat.minimal),
    Case(slice="v5p-8", share=1.08, rows=109, layers=2),
    Case(slice="v4-8", share=0.96, rows=38, layers=2, remat=Remat.minimal),
    Case(slice="v4-8", share=0.992, rows=33, layers=2),
    Case(slice="v4-8", share=1.004, rows=51, layers=3, remat=Remat.full),
    Case(slice="v4-8", share=1.04, rows=35, layers=2),
)


def ask(case: Case, width: int, compiler: Compiler) -> dict[str, Any]:
    """What a compile says of memory: whether it fits, the bytes it needs, the bytes there are."""
    on, begin = slice(case.slice), time.perf_counter()
    answer = compile_program(JobProgram(job=case.job(width)), on, compiler)
    seconds = round(time.perf_counter() - begin, 1)
    match answer:
        case Failed(reason=reason):
            return {"problem": reason, "seconds": seconds}
        case Rejected():
            return {
                "fits": False,
                "need_bytes": answer.need_bytes,
                "space": answer.space,
                "have_bytes": answer.have_bytes,
                "seconds": seconds,
            }
        case Compiled():
            memory = answer.report["memory"]
            return {
                "fits": True,
                "need_bytes": memory["used_in_bytes"],
                "analysis": {
                    name: memory[f"{name}_in_bytes"]
                    for name in ("argument_size", "output_size", "alias_size", "temp_size")
                    if f"{name}_in_bytes" in memory
                },
                "seconds": seconds,
            }


def capacity(case: Case, compiler: Compiler) -> int:
    """Bytes that the compiler has on one device, as it says when it refuses."""
    refused = ask(case, MOST, compiler)
    if refused.get("space") != "hbm":
        raise SystemExit(f"{case.name}: a width of {MOST} should not fit; give it more rows")
    return refused["have_bytes"]


def search(case: Case, have: int, compiler: Compiler, say: Callable[[str], None]) -> dict[str, Any]:
    """The width whose quick forecast is nearest the wanted share, by secants; a record."""
    tried: dict[int, dict[str, Any]] = {}
    width = 8192
    for _ in range(TRIES):
        tried[width] = ask(case, width, compiler)
        if "problem" in tried[width]:
            break
        shares = {w: one["need_bytes"] / have for w, one in tried.items()}
        say(f"{case.name}: width {width} is {shares[width]:.2%}")
        nearest = sorted(shares, key=lambda w: abs(shares[w] - case.share))
        if abs(shares[nearest[0]] - case.share) <= CLOSE:
            break
        if len(nearest) == 1:
            width = 6144 if shares[width] > case.share else 12_288
            continue
        one, other = nearest[:2]
        slope = (shares[one] - shares[other]) / (one - other)
        wanted = one + (case.share - shares[one]) / slope if slope > 0 else one * 1.1
        width = min(max(round(wanted / WIDTH_STEP) * WIDTH_STEP, LEAST), MOST)
        if width in tried:
            break
    known = {w: one for w, one in tried.items() if "need_bytes" in one}
    if not known:
        return {"problem": tried[width]["problem"]}
    best = min(known, key=lambda w: abs(known[w]["need_bytes"] / have - case.share))
    return {"width": best, "have_bytes": have, "quick": known[best], "compiles": len(tried)}


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown, a row a program."""
    lines = [
        "| program | width | memory | --quick | share | full compile | difference | verdicts | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, record in records.items():
        quick, full = record.get("quick"), record.get("full")
        if quick is None:
            lines.append(f"| {name} | - | - | {record.get('problem', '-')} | - | - | - | - | - |")
            continue
        have = record["have_bytes"]
        seconds = f"{quick['seconds']:.0f}"
        cells = [name, f"{record['width']:,}", f"{have / GIB:.2f} GiB", told(quick)]
        cells.append(f"{quick['need_bytes'] / have:.2%}")
        if full is None or "problem" in full:
            cells += [(full or {}).get("problem", "not run"), "-", "-", seconds]
        else:
            off = full["need_bytes"] - quick["need_bytes"]
            same = "same" if full["fits"] == quick["fits"] else "**differ**"
            cells += [told(full), f"{off:+,} B", same, f"{seconds}, {full['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def told(one: Mapping[str, Any]) -> str:
    verdict = "fits" if one["fits"] else "does not fit"
    return f"{verdict}, {one['need_bytes'] / GIB:.3f} GiB"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of case names")
    parser.add_argument("--quick", action="store_true", help="no full compiles")
    parser.add_argument("--table", action="store_true", help="print the table of --out, do nothing")
    parser.add_argument("--out", type=Path, required=True, help="JSON of results; resumed from")
    asked = parser.parse_args()
    records = json.loads(asked.out.read_text()) if asked.out.is_file() else {}
    chosen = [c for c in CASES if not asked.only or any(part in c.name for part in asked.only)]
    with tempfile.TemporaryDirectory() as folder:
        compiler, there = Compiler(root=Path(folder)), {}
        for case in [] if asked.table else chosen:
            record = records.setdefault(case.name, {})
            if "quick" not in record:
                if case.slice not in there:
                    there[case.slice] = capacity(case, compiler.quick())
                record |= search(case, there[case.slice], compiler.quick(), say)
                write_json(asked.out, records)
            if "quick" in record and "full" not in record and not asked.quick:
                record["full"] = ask(case, record["width"], compiler)
                say(f"{case.name}: {record['full']}")
                write_json(asked.out, records)
    print(table(records))


if __name__ == "__main__":
    main()
