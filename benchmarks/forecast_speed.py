"""Seconds and memory of a forecast: the whole command, from nothing to its answer.

    python benchmarks/forecast_speed.py --out speed.json [--only 8b] [--rounds 3] [--whole]

For each model shape and slice: `systolic forecast lm … --quick` with an empty store, the same again from
the store, and with --whole the full compile of the smallest two shapes. Wall and CPU seconds are of the
process and its children; memory is the largest sum of resident sizes over the tree, read every 50 ms, in
which pages that two processes share count twice. Results go to --out as they come; what is there is kept.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from systolic.chips import slice
from systolic.core.files import write_json

POLL_SECONDS = 0.05
LLAMA = "--model.mlp swiglu --model.head-dim 128 --model.kv-heads 8 --model.vocab 128256"
WHOLE = "--model.no-tie-embeddings --layout.remat full"
SHAPES = {
    "125M": "--model.layers 12 --model.d-model 768 --model.d-ff 2048 --model.heads 12 "
    "--model.kv-heads 12 --model.head-dim 64 --model.vocab 50304 --sequence 2048",
    "1B": f"{LLAMA} --model.layers 16 --model.d-model 2048 --model.d-ff 8192 --model.heads 32 "
    "--model.head-dim 64 --sequence 4096 --layout.remat full",
    "8B": f"{LLAMA} --model.layers 32 --model.d-model 4096 --model.d-ff 14336 --model.heads 32 "
    f"--sequence 8192 {WHOLE}",
    "70B": f"{LLAMA} --model.layers 80 --model.d-model 8192 --model.d-ff 28672 --model.heads 64 "
    f"--sequence 8192 {WHOLE}",
    "405B": f"{LLAMA} --model.layers 126 --model.d-model 16384 --model.d-ff 53248 "
    f"--model.heads 128 --sequence 8192 {WHOLE}",
}
"""Decoders with the sizes of GPT-2 small and of Llama 3.2 1B, 3.1 8B, 70B and 405B."""


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    slice: str
    options: str
    whole: bool = False
    """Whether --whole compiles it to the end."""

    @property
    def name(self) -> str:
        return f"{self.shape} {self.slice}"


CASES = (
    Case(shape="125M", slice="v5e-8", options="--batch-per-device 8", whole=True),
    Case(shape="125M", slice="v5e-256", options="--batch-per-device 4"),
    Case(shape="1B", slice="v6e-8", options="--batch-per-device 2", whole=True),
    Case(shape="1B", slice="v5e-64", options="--batch-per-device 1"),
    Case(shape="8B", slice="v5p-32", options="--batch-per-device 1"),
    Case(shape="8B", slice="v6e-256", options="--batch-per-device 1"),
    Case(shape="70B", slice="v5p-512", options="--batch-per-device 1"),
    Case(shape="70B", slice="4xv6e-256", options="--batch-per-device 1 --layout.data 4"),
    Case(shape="405B", slice="v5p-2048", options="--batch-per-device 0.5 --layout.tensor 4"),
    Case(shape="405B", slice="v5p-8192", options="--batch-per-device 0.5 --layout.tensor 4"),
    Case(
        shape="405B",
        slice="8xv5p-1024",
        options="--batch-per-device 0.5 --layout.tensor 4 --layout.data 8",
    ),
)


def measure(command: Sequence[str], store: Path) -> dict[str, Any]:
    """One run of the command: seconds, CPU seconds, largest memory of the tree, its JSON."""
    env = {**os.environ, "SYSTOLIC_CACHE": str(store)}
    load, begin = os.getloadavg()[0], time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        watch = Watch(process.pid)
        watch.start()
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        watch.stop()
    if process.returncode not in (0, 1):
        raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}")
    answer = json.loads(out)
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_bytes": watch.peak_bytes,
        "load_before": round(load, 2),
        "fits": answer["fits"],
    }


class Watch(threading.Thread):
    """The largest sum of resident sizes over a process and its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root, self.peak_bytes, self.ended = psutil.Process(pid), 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(POLL_SECONDS):
            self.peak_bytes = max(self.peak_bytes, self.now())

    def now(self) -> int:
        try:
            tree = [self.root, *self.root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        return sum(resident(process) for process in tree)

    def stop(self) -> None:
        self.ended.set()
        self.join()


def resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def run(case: Case, rounds: int, whole: bool, record: dict[str, Any]) -> None:
    """Fills in what the record lacks."""
    words = shlex.split(f"{SHAPES[case.shape]} {case.options}")
    command = [sys.executable, "-m", "systolic", "forecast", "lm", *words, "--on", case.slice]
    for _ in range(rounds - len(record["cold"])):
        with tempfile.TemporaryDirectory() as folder:
            record["cold"].append(measure([*command, "--quick", "--json"], Path(folder)))
            record["store"].append(measure([*command, "--quick", "--json"], Path(folder)))
    if whole and case.whole and "full" not in record:
        with tempfile.TemporaryDirectory() as folder:
            record["full"] = measure([*command, "--json"], Path(folder))


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown, a row a case; seconds are medians with their range."""
    lines = [
        "| shape | slice | chips | cold, --quick | of it CPU | from the store | whole compile | largest memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in records.values():
        cold, store, whole = record["cold"], record["store"], record.get("full")
        peak = max(one["peak_bytes"] for one in [*cold, *store, *([whole] if whole else [])])
        cpu = statistics.median(one["cpu_seconds"] for one in cold)
        full = f"{whole['seconds']:.0f} s ({whole['cpu_seconds']:.0f} s CPU)" if whole else "-"
        fits = "" if all(one["fits"] for one in cold) else " (does not fit)"
        chips = slice(record["slice"]).num_chips
        lines.append(
            f"| {record['shape']} | {record['slice']}{fits} | {chips:,} | {spread(cold)} | {cpu:.1f} s | {spread(store)} | {full} | {peak / 2**30:.2f} GiB |"
        )
    return "\n".join(lines)


def spread(runs: Sequence[Mapping[str, Any]]) -> str:
    seconds = [one["seconds"] for one in runs]
    middle = f"{statistics.median(seconds):.1f} s"
    return middle if len(runs) == 1 else f"{middle} ({min(seconds):.1f} to {max(seconds):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of case names, as in 8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="the full compiles too: minutes each")
    parser.add_argument("--out", type=Path, required=True, help="JSON of results; resumed from")
    asked = parser.parse_args()
    records = json.loads(asked.out.read_text()) if asked.out.is_file() else {}
    for case in CASES:
        if asked.only and not any(part.lower() in case.name.lower() for part in asked.only):
            continue
        record = records.setdefault(case.name, {**asdict(case), "cold": [], "store": []})
        run(case, asked.rounds, asked.whole, record)
        write_json(asked.out, records)
        print(f"{case.name}: {spread(record['cold'])}", file=sys.stderr, flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
