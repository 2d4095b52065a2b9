"""Every published model by name: parameters, and its train step on the smallest slice of a list that it fits.

    python benchmarks/named_models.py --out named.jsonl [--only llama-3.1-8b,gpt2]

For each name: ``systolic.forecast(NAME, on=SLICE, quick=True)`` with its defaults, from the first slice of
SLICES whose memory holds f32 weights, gradients and Adam's moments on. One JSON line a model is written to
--out as it comes; what is there is kept. Seconds are of the last forecast, without a stored schedule. The
table is printed at the end.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

SLICES = ("v6e-1", "v6e-4", "v6e-8", "v6e-16", "v6e-32", "v6e-64", "v6e-128", "v6e-256")
LARGER = ("v5p-128", "v5p-256", "v5p-512", "v5p-1024")
"""Slices for models whose widths v6e-128 and v6e-256 do not divide, or that are too large for these."""
BYTES_PER_PARAMETER = 16
"""f32 weights, gradients and two moments."""


def forecast(name: str, parameters: int) -> dict[str, Any]:
    """The first forecast that fits, as a record."""
    import systolic
    from systolic.core.errors import SystolicError

    refused = []
    for on in (*SLICES, *LARGER):
        target = systolic.slice(on)
        if parameters * BYTES_PER_PARAMETER > target.num_devices * target.program_bytes:
            continue
        started = time.perf_counter()
        try:
            made = systolic.forecast(name, on=on, quick=True)
        except SystolicError as error:
            refused.append(f"{on}: {error}")
            continue
        seconds = time.perf_counter() - started
        if not made.fits:
            refused.append(f"{on}: does not fit")
            continue
        answer = made.to_json()
        return {
            "slice": on,
            "fits": True,
            "peak_gib": answer["hbm"]["peak_bytes"] / 2**30,
            "capacity_gib": answer["hbm"]["capacity_bytes"] / 2**30,
            "step_seconds": answer["step_seconds"],
            "tokens_per_second": answer["tokens_per_second"],
            "mfu": answer["mfu"],
            "bound_by": answer["bound_by"],
            "seconds": seconds,
            "refused": refused,
        }
    return {"fits": False, "refused": refused}


def rows(records: list[dict[str, Any]]) -> list[str]:
    """The table, in Markdown."""
    found = [
        "| model | parameters | as published | slice | memory a device, GiB | step, s | MFU | answer, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in records:
        same = "equal" if one["exact"] else "rounded only"
        start = f"| {one['name']} | {one['parameters']:,} | {same} | "
        if not one["fits"]:
            found.append(start + "none of the list | | | | |")
            continue
        memory = f"{one['peak_gib']:.1f} of {one['capacity_gib']:.1f}"
        figures = f"{one['step_seconds']:.3g} | {one['mfu']:.1%} | {one['seconds']:.1f} |"
        found.append(f"{start}{one['slice']} | {memory} | {figures}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        os.environ["XDG_CACHE_HOME"] = store
        from systolic.models.families import published

        lines = options.out.read_text().splitlines() if options.out.exists() else []
        records = {one["name"]: one for one in map(json.loads, lines)}
        wanted = options.only.split(",") if options.only else list(published())
        for name in wanted:
            if name in records:
                continue
            known = published()[name]
            model: Any = known.model()
            record = {
                "name": name,
                "parameters": model.num_parameters,
                "published": known.parameters,
                "exact": known.exact,
                "counted_by": known.counted_by,
                **forecast(name, known.parameters),
            }
            records[name] = record
            with options.out.open("a") as out:
                out.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)
    print("\n".join(rows([records[name] for name in wanted])))


if __name__ == "__main__":
    main()
