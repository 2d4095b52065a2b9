"""Seconds to a plan's first answer and to its last, from an empty store, for three shapes over three generations.

``python benchmarks/plan/time_to_answer.py --out result.json [--only 8B]`` runs ``systolic plan lm --on v5e,v6e,v5p
--max-chips 256`` as a user would, and writes a row as each is done. Use an idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from systolic.core.files import write_json

COMMAND = ("plan", "lm", "--on", "v5e,v6e,v5p", "--max-chips", "256", "--tokens", "20e9")
SHAPES = {
    "1B": "--model.layers 16 --model.d-model 2048 --model.d-ff 8192 --model.heads 16 --model.kv-heads 8 "
    "--model.head-dim 128 --model.vocab 32768 --sequence 2048 --batch 256 --goal cost",
    "8B": "--model.layers 32 --model.d-model 4096 --model.d-ff 14336 --model.heads 32 --model.kv-heads 8 "
    "--model.head-dim 128 --model.vocab 128256 --sequence 4096 --batch 256 --budget 20000",
    "70B": "--model.layers 80 --model.d-model 8192 --model.d-ff 28672 --model.heads 64 --model.kv-heads 8 "
    "--model.head-dim 128 --model.vocab 128256 --sequence 4096 --batch 256 --goal cost",
}


def measure(shape: str) -> dict[str, Any]:
    """One shape: the plan is in its file from the first answer on."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "plan.json")
        environ = os.environ | {"SYSTOLIC_CACHE": str(Path(folder, "cache"))}
        words = [sys.executable, "-m", "systolic", *COMMAND, *SHAPES[shape].split()]
        begun, first = time.monotonic(), None
        with subprocess.Popen([*words, "--out", str(out)], env=environ) as process:
            while process.poll() is None:
                if first is None and out.exists():
                    first = time.monotonic() - begun
                time.sleep(0.1)
        last = time.monotonic() - begun
        plan = json.loads(out.read_text()) if out.exists() else {}
    best = plan.get("best") or {}
    return {
        "shape": shape,
        "first_seconds": first,
        "last_seconds": last,
        "searched": plan.get("searched"),
        "compiled": plan.get("compiled"),
        "whole": sum(one["compile"] == "whole" for one in plan.get("candidates", ())),
        "slice": best.get("slice"),
        "settings": best.get("settings"),
        "step_seconds": best.get("step_seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    done = json.loads(asked.out.read_text()) if asked.out.exists() else []
    for shape in asked.only:
        if shape not in {record["shape"] for record in done}:
            done.append(measure(shape))
            write_json(asked.out, done)
            print(json.dumps(done[-1]), flush=True)


if __name__ == "__main__":
    main()
