"""Multi-process training on this machine: throughput relative to one process, and the cost of a kill.

    python benchmarks/processes.py FOLDER [--steps 60] [--part throughput|kills|left-out] [--json FILE]

Throughput: the recipe `bytes` with the same global batch in one process with one device, one with two devices, and two
with one device each (fsdp 2), from the summary's steady rate. Kills: two processes under the supervisor of
`systolic launch --via local`; one is killed with SIGKILL halfway between two checkpoints: first process 1, then
process 0; then, in another run, process 1 as a slice that is left out at once. Reported are the seconds to the end of
the first step after the kill, the survivor's messages, and the number of steps repeated. The machine's load is the
one-minute average before each part.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SAVE = 20
SIZES = "--sequence 64 --batch 16 --model.layers 2 --evaluation.batches 1 --evaluation.final-batches 1 --checkpoints.every 20 --log-every 1"
NARROW = "--model.d-model 64 --model.d-ff 128 --model.heads 2 --model.kv-heads 2"
"""Model size for runs whose steps are only counted."""
PATIENCE_SECONDS = 600
"""Timeout for the next step after a kill."""


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """Records of a run that another process is writing."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in found if record["kind"] == kind]


def launch(
    folder: Path, steps: int, processes: int, devices: int, more: str = "", *, fewer: bool = False
) -> "subprocess.Popen[bytes]":
    """Starts processes under the supervisor; with ``fewer``, each is a slice that is left out once killed."""
    folder.mkdir(parents=True)
    run = ["--steps", str(steps), "--run", str(folder / "run"), "--continue"]
    run += ["--for-devices", str(processes * devices)] if fewer else []
    settings = {
        "made_by": ["benchmarks/processes.py"],
        "command": ["systolic", "train", "bytes", *SIZES.split(), *more.split(), *run],
        "directory": str(folder),
        "processes": processes,
        "devices": devices,
        "restarts": 3,
    }
    if fewer:
        settings["remaining"] = {"slices": processes, "min_slices": 1, "rejoin_seconds": 0}
    (folder / "local.json").write_text(json.dumps(settings))
    cache = {"XDG_CACHE_HOME": str(folder.parent / "cache")}
    module = [sys.executable, "-m", "systolic.launching.supervisor", str(folder)]
    return subprocess.Popen(module, env=os.environ | cache)


def throughput(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Throughput for each number of processes and devices."""
    rows = []
    for processes, devices in ((1, 1), (1, 2), (2, 1)):
        load = os.getloadavg()[0]
        where = folder / f"{processes}x{devices}"
        if launch(where, steps, processes, devices).wait():
            raise SystemExit((where / "logs" / "0.log").read_text())
        summary = json.loads((where / "run" / "summary.json").read_text())
        seconds = sorted(r["step_seconds"] for r in records(where / "run", "train")[steps // 3 :])
        rows.append(
            {
                "processes": processes,
                "devices_each": devices,
                "tokens_per_second": summary["tokens_per_second"],
                "median_step_ms": 1e3 * seconds[len(seconds) // 2],
                "load_before": load,
            }
        )
    return rows


def kills(
    folder: Path, name: str, numbers: tuple[int, ...], *, fewer: bool = False
) -> list[dict[str, Any]]:
    """Kills the given processes in turn; one row per kill."""
    load = os.getloadavg()[0]
    where, rows = folder / name, []
    supervisor = launch(where, 100 * SAVE, 2, 1, NARROW, fewer=fewer)
    run = where / "run"

    def steps() -> int:
        if supervisor.poll() is not None:
            raise SystemExit((where / "logs" / "0.log").read_text())
        time.sleep(0.05)
        return max((r["step"] for r in records(run, "train")), default=0)

    try:
        for attempt, number in enumerate(numbers):
            start = records(run, "start")[-1]["resumed_from"] or 0 if attempt else 0
            while steps() < start + SAVE + SAVE // 2:
                pass
            state = json.loads((where / "state.json").read_text())
            before, killed = steps(), time.time()
            os.kill(state["running"][number]["pid"], signal.SIGKILL)
            again, first = next_step(run, attempt + 2)
            rows.append(
                {
                    "killed": number,
                    "processes_after": again["num_devices"],
                    "seconds_to_start": again["time"] - killed,
                    "seconds_to_next_step": first["time"] - killed,
                    "step_killed": before,
                    "resumed_from": again["resumed_from"],
                    "steps_lost": before - again["resumed_from"],
                    "load_before": load,
                }
            )
    finally:
        supervisor.terminate()
        supervisor.wait()
    log = (where / "logs" / "0.log").read_text()
    said = [
        line
        for line in log.splitlines()
        if "is dead" in line or "was killed" in line or "goes on with" in line or "are here" in line
    ]
    return [*rows, {"said": said}]


def next_step(run: Path, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Start record of the run's ``count``-th session, and the record of its first step."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        starts = records(run, "start")
        after = [r for r in records(run, "train") if starts and r["time"] > starts[-1]["time"]]
        if len(starts) == count and after:
            return starts[-1], after[0]
        time.sleep(0.05)
    raise SystemExit(f"no step of session {count} after {PATIENCE_SECONDS} s")


def main() -> None:
    """Prints the results and writes them to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--part", choices=["all", "throughput", "kills", "left-out"], default="all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = args.folder.absolute()
    parts = {
        "throughput": lambda: throughput(folder, args.steps),
        "kills": lambda: kills(folder, "killed", (1, 0)),
        "left-out": lambda: kills(folder, "left-out", (1,), fewer=True),
    }
    found = {name: measure() for name, measure in parts.items() if args.part in ("all", name)} | {
        "checkpoint_every": SAVE,
        "cores": len(os.sched_getaffinity(0)),
    }
    text = json.dumps(found, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
