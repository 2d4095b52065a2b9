"""Measured rows of other files: matmuls of ``gemm_rates.json``, ops of profiles as Chrome traces.

``python benchmarks/operations/convert.py gemm_rates.json a.trace.json.gz > ops.jsonl``
"""

import gzip
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import quantized

DTYPES = {"bfloat16": "bf16", "float32": "f32", "int8": "s8"}
TRACED_FLAGS = ("--xla_tpu_scoped_vmem_limit_kib=65536", "--xla_tpu_dvfs_p_state=7")
"""Of the matmuls that were timed on the device (gpu-tpu-pedia, tpu/v7_perf/README.md); the others ran without flags."""
_OPS = 3
"""Thread of a Chrome trace with the ops of the TensorCore."""
WAITS = ("async-start", "async-done", "copy-start", "copy-done")
"""Categories whose time is a wait for what the schedule put beside it."""


def matmuls(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of ``gemm_rates.json``."""
    for row in json.loads(path.read_text()):
        on_device = row["timing"].startswith("device")
        yield {
            "id": row["id"],
            "generation": row["chip"],
            "what": "matmul" if on_device else "matmul by the host's clock",
            "implementation": None,
            "shapes": {**{dim: row[dim] for dim in "mkn"}, "dtype": DTYPES[row["dtype"]]},
            "config": {"flags": TRACED_FLAGS} if on_device else {"call": True},
            "measured_seconds": row["measured_us"] * 1e-6,
            "confidence": "A" if on_device else "C",
            "source": row["source"],
        }


def traced(path: Path) -> Iterator[dict[str, Any]]:
    """Ops of a trace, one row for all runs of the same HLO line, names and channels aside: their median."""
    runs: dict[tuple[str, ...], list[float]] = defaultdict(list)
    names: dict[tuple[str, ...], str] = {}
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        args = event.get("args", {})
        if event.get("tid") != _OPS or "device_duration_ps" not in args or "long_name" not in args:
            continue
        if args["hlo_category"] in WAITS:
            continue
        line = re.sub(r", channel_id=\d+", "", args["long_name"].partition(" = ")[2])
        name = re.sub(r"\.\d+$", "", event["name"])
        kernel = name if "tpu_custom_call" in line else ""
        line = re.sub(
            r"(calls|to_apply|%)(=%)?[\w.\-]+",
            lambda m: m[0] if "(" in m[0] else m[1] + (m[2] or ""),
            line,
        )
        key = (args["hlo_category"], kernel, line, args["model_flops"], args["bytes_accessed"])
        runs[key].append(float(args["device_duration_ps"]) * 1e-12)
        names[key] = name
    runs = {key: seconds for key, seconds in runs.items() if statistics.median(seconds) > 0}
    for number, ((category, kernel, line, flops, moved), seconds) in enumerate(
        sorted(runs.items())
    ):
        begins = kernel.rstrip("0123456789")
        shapes = {"hlo": line, "flops": float(flops), "bytes": float(moved), "kernel": begins}
        yield {
            "id": f"{path.name.partition('.trace')[0]}-{number}",
            "generation": "tpu7x",
            "what": f"traced {category}",
            "implementation": None,
            "shapes": shapes,
            "config": {
                "name": names[category, kernel, line, flops, moved].rstrip("0123456789."),
                "kernel": kernel,
                "counted": quantized.count(kernel, line),
            },
            "measured_seconds": statistics.median(seconds),
            "runs": len(seconds),
            "confidence": "A",
        }


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        for row in (traced if path.suffix == ".gz" else matmuls)(path):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
