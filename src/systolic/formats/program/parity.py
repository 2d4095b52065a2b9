"""Compares an exported program with its framework's outputs, in a process without the framework: ``python -m … BUNDLE SCRATCH``."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic.artifact.tensors import read_header
from systolic.core.errors import RunError, SystolicError
from systolic.formats.program.description import SAMPLE, TOLERANCE
from systolic.formats.program.exported import exported_function
from systolic.formats.program.model import ExportedProgram
from systolic.formats.program.rows import relative_error
from systolic.models.program.function import Named

FRAMEWORKS = ("torch", "torchax", "keras", "tensorflow", "tf2jax", "transformers")
PARITY = "parity.json"


def measure(folder: Path, sample_file: Path) -> dict[str, Any]:
    """Differences over all outputs of the sample.

    Raises:
        RunError: a framework is loaded, or an output is missing.
    """
    made = replayed(folder, sample_file)
    loaded = [name for name in FRAMEWORKS if name in sys.modules]
    if loaded:
        raise RunError(f"the comparison loaded {', '.join(loaded)}; report this as a defect")
    return {**made, "tolerance": TOLERANCE}


def replayed(folder: Path, sample_file: Path) -> dict[str, Any]:
    """Differences of a program's outputs from those of a sample, with the framework and the number of rows.

    Raises:
        RunError: an output has another shape.
    """
    known = ExportedProgram.of(folder).about
    function = exported_function(folder, known)
    arrays = {name: one.read() for name, one in read_header(sample_file)[0].items()}
    sample = {name[6:]: one for name, one in arrays.items() if name.startswith("input:")}
    wanted = {name[7:]: one for name, one in arrays.items() if name.startswith("output:")}
    ports = known.inputs
    count = next(len(one) for name, one in sample.items() if ports[name].batched)
    inputs = {
        name: one if ports[name].batched else np.broadcast_to(one, (count, *one.shape))
        for name, one in sample.items()
    }
    run = jax.jit(
        lambda trained, state, given: function.call(trained, state, given, False, None)[0]
    )
    made = jax.device_get(run(dict(function.trained), dict(function.state), inputs))
    made = {name: one if known.outputs[name].batched else one[0] for name, one in made.items()}
    found = differences(made, wanted, known.framework)
    return {"framework": known.framework, "rows": count, **found}


def differences(made: Named, wanted: Named, framework: str) -> dict[str, float]:
    """Largest and mean differences over all outputs, and both relative to the largest magnitude of the same output.

    Raises:
        RunError: an output has another shape.
    """
    relative, apart, shares = 0.0, [], []
    for name, one in wanted.items():
        here, there = np.asarray(made[name], np.float64), np.asarray(one, np.float64)
        if here.shape != there.shape:
            raise RunError(
                f"output {name} is {list(here.shape)} here and {list(there.shape)} in {framework}; report this as a defect"
            )
        finite = np.isfinite(there) & np.isfinite(here)
        apart.append(np.abs(here - there)[finite].ravel())
        shares.append(apart[-1] / max(np.abs(there[finite]).max(initial=0.0), 1e-30))
        relative = max(relative, relative_error(here, there))
    every, share = np.concatenate(apart), np.concatenate(shares)
    return {
        "max_abs": float(every.max(initial=0.0)),
        "max_relative": relative,
        "mean_abs": float(every.mean()) if every.size else 0.0,
        "mean_relative": float(share.mean()) if share.size else 0.0,
    }


def main() -> int:
    """Writes the result into the folder with the sample."""
    folder, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        outcome: dict[str, object] = dict(measure(folder, scratch / SAMPLE))
    except SystolicError as error:
        outcome = {"error": type(error).__name__, "told": str(error)}
    (scratch / PARITY).write_text(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
