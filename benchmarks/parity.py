"""Parity of the model families with Hugging Face's transformers, on random weights.

    python benchmarks/parity.py [NAME ...] [--seeds 3] [--json FILE]

Two directions: ``in`` gives transformers' files to Systolic, ``out`` writes Systolic's config.json and weights and
gives them to transformers. Errors are differences of the outputs over the largest magnitude of transformers' float32
output; in bfloat16 both sides are compared with that too, and transformers' own error stands beside ours.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from parity_cases import CASES, Case
from safetensors.numpy import save_file

from systolic.models.families import CONFIG, Family, family
from tests.models.foreign import Held, converted, saved, structure


@dataclass(frozen=True, kw_only=True)
class Error:
    """Errors of one family, direction and dtype, over the largest magnitude of the output."""

    name: str
    direction: str
    dtype: str
    maximum: float
    mean: float
    reference: float | None = None
    """Mean error of transformers in this dtype, where it is not exact."""


def error(found: Any, exact: np.ndarray) -> tuple[float, float]:
    """Maximum and mean difference over the largest magnitude of ``exact``."""
    gap = np.abs(np.asarray(found, np.float64) - exact) / np.abs(exact).max()
    return float(gap.max()), float(gap.mean())


def opened(known: Family, config: dict[str, Any], tensors: dict[str, Held], dtype: str) -> Any:
    """Our module of a file's tensors in a dtype."""
    config, tensors = known.settle(config, tensors)
    module, arrays = converted(known, config, tensors)
    if dtype == "float32":
        return module, arrays
    made = structure(known.model(config), dtype)
    params = {path: arrays[path].astype(dtype) for path in made.params}
    state = {path: arrays[path] for path in made.model_state if path in arrays}
    return made.module(params, state, train=False), arrays


def measured(name: str, case: Case, seed: int, folder: Path) -> list[Error]:
    """Both directions and dtypes of one model."""
    model = case.make(seed)
    exact = case.theirs(model).astype(np.float64)
    config, tensors = saved(model, folder / "theirs")
    known = family(config, name)
    module, arrays = opened(known, config, tensors, "float32")
    found = [Error(name=name, direction="in", dtype="float32", **both(case.ours(module), exact))]

    settled, _ = known.settle(config, tensors)
    written = known.config(known.model(settled))
    out = folder / "ours"
    out.mkdir()
    (out / CONFIG).write_text(json.dumps(written))
    there = {
        key: np.ascontiguousarray(value) for key, value in known.conversion(written).tensors(arrays)
    }
    save_file(there, out / "model.safetensors", metadata={"format": "pt"})
    again, ours = loaded(case, out, torch.float32), np.asarray(case.ours(module), np.float64)
    found.append(
        Error(name=name, direction="out", dtype="float32", **both(case.theirs(again), ours))
    )

    narrow, _ = opened(known, config, tensors, "bfloat16")
    reference = case.theirs(loaded(case, folder / "theirs", torch.bfloat16))
    mean = error(reference, exact)[1]
    sizes = both(case.ours(narrow), exact)
    found.append(Error(name=name, direction="in", dtype="bfloat16", reference=mean, **sizes))
    sizes = both(case.theirs(loaded(case, out, torch.bfloat16)), ours)
    found.append(Error(name=name, direction="out", dtype="bfloat16", reference=mean, **sizes))
    return found


def loaded(case: Case, folder: Path, dtype: torch.dtype) -> Any:
    """A folder as transformers opens it, which keeps some weights and buffers in float32 in any dtype."""
    return case.load.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()


def both(found: Any, exact: np.ndarray) -> dict[str, float]:
    """Fields of an :class:`Error`."""
    maximum, mean = error(found, exact)
    return {"maximum": maximum, "mean": mean}


def joined(errors: list[Error]) -> Error:
    """The largest maximum and the mean of the means, of several seeds."""
    references = [one.reference for one in errors if one.reference is not None]
    return Error(
        name=errors[0].name,
        direction=errors[0].direction,
        dtype=errors[0].dtype,
        maximum=max(one.maximum for one in errors),
        mean=float(np.mean([one.mean for one in errors])),
        reference=float(np.mean(references)) if references else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print("| family | direction | dtype | maximum | mean | mean of transformers |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name in given.names or CASES:
        case = CASES[name]()
        by_seed = []
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as folder:
                by_seed.append(measured(name, case, seed, Path(folder)))
        for errors in zip(*by_seed, strict=True):
            row = joined(list(errors))
            rows.append(row)
            reference = "" if row.reference is None else f"{row.reference:.1e}"
            print(
                f"| {row.name} | {row.direction} | {row.dtype} | {row.maximum:.1e} | {row.mean:.1e} | {reference} |",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
