"""Profiles of real chips: figures worked out by hand beside those that `systolic explain` prints, and ops beside the simulator.

    python benchmarks/profiles.py FOLDER [--out FILE.md]

FOLDER holds the profiles whose names are in `HANDS` (tpu-inference's of TPU7x, XProf's of v6e). The ops of each are priced
alone, from their lines (`--against lines`); nothing of a profile is used to fit the simulator. The quantized TPU7x step is for
judging: no constant was chosen with it in sight.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUANTIZED = "tpu7x-1chip-tp2-qwen3-32b-quantized-a.trace.json.gz"
BF16 = "tpu7x-1chip-tp2-qwen2.5-32b-bf16-1024tokens.trace.json.gz"
OFFLOAD = "v6e-8-allreduce-host-offload.xplane.pb"
KERNEL = "v6e-1-pallas-matmul.xplane.pb"
CHIPS = {QUANTIZED: ["--chip", "tpu7x"], BF16: ["--chip", "tpu7x"]}
"""The traces do not name their chip."""

MS, US, GB = 1e3, 1e6, 1e-9
HANDS = (
    (
        OFFLOAD,
        "all-reduce of 5.37 GB over 2 devices, ms",
        "121.69",
        ("all-reduce", "median_seconds", MS),
    ),
    (OFFLOAD, "the same on its link, GB/s", "44.1", ("all-reduce", "per_second", GB)),
    (OFFLOAD, "adding a constant, ms", "7.91", ("broadcast_add_fusion.2", "median_seconds", MS)),
    (
        OFFLOAD,
        "the same of device memory, GB/s",
        "1,357",
        ("broadcast_add_fusion.2", "per_second", GB),
    ),
    (OFFLOAD, "fill, ms", "4.444", ("broadcast.2", "median_seconds", MS)),
    (OFFLOAD, "the same of device memory, GB/s", "1,208", ("broadcast.2", "per_second", GB)),
    (OFFLOAD, "copy from the host alone, GB/s", "28.4", ("copy-done", "per_second", GB)),
    (OFFLOAD, "copy to the host alone, GB/s", "29.5", ("copy-done.5", "per_second", GB)),
    (KERNEL, "Pallas matmul, us", "75.6 to 75.8", ("kernel", "median_seconds", US)),
    (BF16, "step, ms", "66.9", ("step", "step_seconds", MS)),
    (BF16, "ops of both devices", "6,908", ("ops", "", 1)),
    (QUANTIZED, "step, ms", "65.6", ("step", "step_seconds", MS)),
    (QUANTIZED, "ops of both devices", "9,364", ("ops", "", 1)),
)
"""File, what, by hand from its events and shapes, and where `--json` has it."""


def explained(path: Path) -> dict[str, Any]:
    """What `systolic explain PROFILE --against lines --json` prints."""
    command = [sys.executable, "-m", "systolic", "explain", str(path), *CHIPS.get(path.name, ())]
    against = [] if path.name == KERNEL else ["--against", "lines"]
    done = subprocess.run([*command, *against, "--json"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{path.name}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def printed(made: dict[str, Any], where: tuple[str, str, float]) -> str:
    """A figure as the verb prints it."""
    name, field, scale = where
    if name == "step":
        value = made["figures"][field]
    elif name == "ops":
        return f"{sum(round(row['calls']) for row in made['ops']) * made['figures']['devices']:,}"
    elif name == "kernel":
        value = max(row["seconds"] for row in made["ops"] if row["kind"] == "custom kernels")
        calls = next(row["calls"] for row in made["ops"] if row["seconds"] == value)
        value /= calls
    else:
        rows = [row for row in made["ops"] if row["name"] == name]
        value = max(rows, key=lambda row: row["seconds"])[field]
    return f"{value * scale:,.4g}"


def rows(made: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The page's lines."""
    yield "| profile | figure | by hand | printed |"
    yield "|---|---|---|---|"
    for file, what, hand, where in HANDS:
        yield f"| {file.partition('.')[0]} | {what} | {hand} | {printed(made[file], where)} |"
    for file in (BF16, QUANTIZED, OFFLOAD):
        of = made[file]["against"]
        alone, step = of["measured_alone_seconds"], of["measured_step_seconds"]
        yield f"\n{file}, simulated over measured; of {step * MS:.1f} ms {alone * MS:.1f} are of ops that no line prices:\n"
        yield "| kind | ops | measured ms | simulated ms | median | 10th | 90th percentile |"
        yield "|---|---|---|---|---|---|---|"
        for kind in of["kinds"]:
            times = f"{kind['measured_seconds'] * MS:.3f} | {kind['simulated_seconds'] * MS:.3f}"
            ratios = (kind[name] for name in ("median_ratio", "p10_ratio", "p90_ratio"))
            told = " | ".join("-" if one is None else f"{one:.2f}" for one in ratios)
            yield f"| {kind['kind']} | {kind['ops']} | {times} | {told} |"


def main() -> None:
    """Prints the page, or writes it."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--out", type=Path)
    asked = arguments.parse_args()
    made = {file: explained(asked.folder / file) for file in dict.fromkeys(row[0] for row in HANDS)}
    page = "\n".join(rows(made)) + "\n"
    if asked.out:
        asked.out.write_text(page)
    print(page, end="")


if __name__ == "__main__":
    main()
