"""Several processes of one job on this machine: throughput against one process, and what a kill costs.

    python benchmarks/processes.py FOLDER [--steps 60] [--json FILE]

Throughput: the recipe `bytes` with the same global batch in one process with one device, one with two devices, and two
with one device each (fsdp 2), from the summary's steady rate. Kills: two processes under the supervisor of
`systolic launch --via local`; one is killed with SIGKILL in the middle between two checkpoints, first the second process,
then the first. Counted are the seconds to the end of the first step after it, what the survivor says, and the
steps that were trained again.
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
SIZES = "--sequence 64 --batch 16 --model.layers 2 --evaluation.batches 1 --checkpoints.every 20 --log-every 1"


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """Of a run that another process writes."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in found if record["kind"] == kind]


def launch(folder: Path, steps: int, processes: int, devices: int) -> "subprocess.Popen[bytes]":
    """Processes under the supervisor."""
    folder.mkdir(parents=True)
    run = ["--steps", str(steps), "--run", str(folder / "run"), "--continue"]
    settings = {
        "made_by": ["benchmarks/processes.py"],
        "command": ["systolic", "train", "bytes", *SIZES.split(), *run],
        "directory": str(folder),
        "processes": processes,
        "devices": devices,
        "restarts": 3,
    }
    (folder / "local.json").write_text(json.dumps(settings))
    cache = {"XDG_CACHE_HOME": str(folder.parent / "cache")}
    module = [sys.executable, "-m", "systolic.launching.supervisor", str(folder)]
    return subprocess.Popen(module, env=os.environ | cache)


def throughput(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Of each number of processes and devices."""
    rows = []
    for processes, devices in ((1, 1), (1, 2), (2, 1)):
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
            }
        )
    return rows


def kills(folder: Path, steps: int) -> list[dict[str, Any]]:
    """One of each process."""
    where, rows = folder / "killed", []
    supervisor = launch(where, 10 * steps, 2, 1)
    run = where / "run"
    try:
        for attempt, number in enumerate((1, 0)):
            start = records(run, "start")[-1]["resumed_from"] or 0 if attempt else 0
            at = start + SAVE + SAVE // 2
            while max((r["step"] for r in records(run, "train")), default=0) < at:
                if supervisor.poll() is not None:
                    raise SystemExit((where / "logs" / "0.log").read_text())
                time.sleep(0.05)
            state = json.loads((where / "state.json").read_text())
            before, killed = max(r["step"] for r in records(run, "train")), time.time()
            os.kill(state["running"][number]["pid"], signal.SIGKILL)
            while len(records(run, "start")) < attempt + 2 or not [
                r for r in records(run, "train") if r["time"] > records(run, "start")[-1]["time"]
            ]:
                time.sleep(0.05)
            again = records(run, "start")[-1]
            first = next(r for r in records(run, "train") if r["time"] > again["time"])
            rows.append(
                {
                    "killed": number,
                    "seconds_to_start": again["time"] - killed,
                    "seconds_to_next_step": first["time"] - killed,
                    "steps_lost": before - again["resumed_from"],
                }
            )
    finally:
        supervisor.terminate()
        supervisor.wait()
    log = (where / "logs" / "0.log").read_text()
    said = [line for line in log.splitlines() if "is dead" in line or "was killed" in line]
    return [*rows, {"said": said}]


def main() -> None:
    """Prints and keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = args.folder.absolute()
    found = {
        "throughput": throughput(folder, args.steps),
        "kills": kills(folder, args.steps),
        "checkpoint_every": SAVE,
        "cores": len(os.sched_getaffinity(0)),
    }
    text = json.dumps(found, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
