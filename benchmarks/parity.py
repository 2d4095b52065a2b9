"""Parity of the model families with Hugging Face's transformers, on random weights.

    python benchmarks/parity.py [NAME ...] [--seeds 3] [--json FILE]

Two directions: ``in`` gives transformers' files to Systolic, ``out`` writes Systolic's config.json and weights and
gives them to transformers. Errors are differences of the outputs over the largest magnitude of transformers' float32
output; in bfloat16 both sides are compared with that too, and transformers' own error stands beside ours. Lines of
mixtures in bfloat16 also have how many choices of experts are those of float32, and the error where all are.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from parity_cases import CASES, Case
from parity_routing import Choices, Routing, compared, forced, watch_ours, watch_theirs
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
    routing: Routing | None = None
    """Of mixtures in bfloat16."""


def error(found: Any, exact: np.ndarray) -> tuple[float, float]:
    """Maximum and mean difference over the largest magnitude of ``exact``."""
    gap = np.abs(np.asarray(found, np.float64) - exact) / np.abs(exact).max()
    return float(gap.max()), float(gap.mean())


def opened(known: Family, config: dict[str, Any], tensors: dict[str, Held], dtype: str) -> Any:
    """Our module of a file's tensors in a dtype."""
    config, tensors = known.canonical(config, tensors)
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

    settled, _ = known.canonical(config, tensors)
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
    reference = error(case.theirs(loaded(case, folder / "theirs", torch.bfloat16)), exact)[1]
    there = loaded(case, out, torch.bfloat16)
    with watch_ours() as seen:
        here = np.asarray(case.ours(narrow), np.float64)
    with watch_theirs(there) as theirs_seen:
        back = case.theirs(there)
    inward, outward = None, None
    if case.mixture:
        with watch_theirs(model) as exact_seen:
            case.theirs(model)
        choices = Choices.of(exact_seen)
        with forced(choices):
            given = np.asarray(case.ours(narrow), np.float64)
        inward = compared(exact, choices, here, Choices.of(seen), given)
        outward = compared(ours, choices, back, Choices.of(theirs_seen))
    for direction, made, against, routing in (
        ("in", here, exact, inward),
        ("out", back, ours, outward),
    ):
        found.append(
            Error(
                name=name,
                direction=direction,
                dtype="bfloat16",
                reference=reference,
                routing=routing,
                **both(made, against),
            )
        )
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
    routings = [one.routing for one in errors if one.routing is not None]
    far = [one.maximum_forced for one in routings if one.maximum_forced is not None]
    routing = None
    if routings:
        routing = Routing(
            agree=float(np.mean([one.agree for one in routings])),
            maximum_agreeing=max(one.maximum_agreeing for one in routings),
            maximum_forced=max(far) if far else None,
        )
    return Error(
        name=errors[0].name,
        direction=errors[0].direction,
        dtype=errors[0].dtype,
        maximum=max(one.maximum for one in errors),
        mean=float(np.mean([one.mean for one in errors])),
        reference=float(np.mean(references)) if references else None,
        routing=routing,
    )


def line(row: Error) -> str:
    """A line of the table."""
    cells = [row.name, row.direction, row.dtype, f"{row.maximum:.1e}", f"{row.mean:.1e}"]
    cells.append("" if row.reference is None else f"{row.reference:.1e}")
    about = row.routing
    far = None if about is None else about.maximum_forced
    cells += ["", ""] if about is None else [f"{about.agree:.1%}", f"{about.maximum_agreeing:.1e}"]
    cells.append("" if far is None else f"{far:.1e}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(
        "| family | direction | dtype | maximum | mean | mean of transformers | same experts | maximum where same | maximum with float32's experts |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
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
            print(line(row), flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
