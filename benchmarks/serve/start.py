"""Seconds until a real ``systolic serve`` process is ready, cold and warm, by phase.

    python benchmarks/serve/start.py [--models smollm2 minilm] [--warm 2] [--out FILE.json]

Cold: an empty cache. Warm: the same command again. Both read the weights' files from the disk cache of the
system. ``wall`` is from the start of the process to the first 200 of ``/health``; phases are those of the metric
``startup_seconds``: trace, compile, keep and load are summed over two threads. Weights: tests/weights.txt.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

POLL_SECONDS = 0.05
MOST_SECONDS = 900.0


def weights(model: str) -> Path:
    """Files of a model."""
    from benchmarks.serve.batch import weights as of_batch
    from tests.weights import smollm2

    return smollm2() if model == "smollm2" else of_batch(model)


def get(url: str) -> str | None:
    """The body of a 200, else None."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None


def start(model: str, cache: Path) -> dict[str, Any]:
    """One start: seconds, phases, programs from the disk and compiled, and the process's peak memory."""
    env = {**os.environ, "SYSTOLIC_CACHE": str(cache)}
    command = ["-m", "systolic", "serve", f"{model}={weights(model)}", "--port", "0", "--json"]
    begin = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            assert server.stderr is not None
            sys.exit(server.stderr.read().decode())
        url = json.loads(line)["url"]
        while get(f"{url}/health") is None:
            if server.poll() is not None or time.perf_counter() - begin > MOST_SECONDS:
                sys.exit(f"{model} did not become ready")
            time.sleep(POLL_SECONDS)
        wall = time.perf_counter() - begin
        metrics = get(f"{url}/metrics") or ""
        peak = Path(f"/proc/{server.pid}/status").read_text()
    finally:
        server.terminate()
        server.communicate()
    phases = dict(
        re.findall(
            r'startup_seconds\{model_name="\w+",phase="(\w+)",version="\d*"\} (\S+)', metrics
        )
    )
    counts = {
        name: float(found[1])
        if (found := re.search(rf"{name}_total\{{.*\}} (\S+)", metrics))
        else 0
        for name in ("compile_cache_hits", "compile_cache_misses")
    }
    kibibytes = re.search(r"VmHWM:\s+(\d+) kB", peak)
    return {
        "wall_seconds": round(wall, 2),
        "phases": {name: round(float(value), 2) for name, value in phases.items()},
        "programs_kept": int(counts["compile_cache_hits"]),
        "programs_compiled": int(counts["compile_cache_misses"]),
        "peak_bytes": int(kibibytes[1]) << 10 if kibibytes else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2", "minilm"])
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="a cache of an earlier call: warm starts alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "starts": [],
    }
    with tempfile.TemporaryDirectory() as made:
        cache = options.cache or Path(made)
        for model in options.models:
            kinds = [] if options.cache else ["cold"]
            for kind in [*kinds, *["warm"] * options.warm]:
                row = {"model": model, "start": kind, **start(model, cache)}
                print(json.dumps(row), flush=True)
                found["starts"].append(row)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
