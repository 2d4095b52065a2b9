"""Compares an exported program with its framework's outputs, in a process without the framework: ``python -m … FOLDER``."""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from systolic.artifact.tensors import read_header
from systolic.core.errors import RunError, SystolicError
from systolic.interop.program.description import SAMPLE, TOLERANCE
from systolic.interop.program.exported import exported_function, read_description
from systolic.interop.program.write import relative_error

FRAMEWORKS = ("torch", "torchax", "keras", "tensorflow", "tf2jax", "transformers")
PARITY = "parity.json"


def measure(folder: Path) -> dict[str, float]:
    """Largest differences over all outputs of the sample.

    Raises:
        RunError: a framework is loaded, or an output is missing.
    """
    function = exported_function(folder, read_description(folder).digest)
    arrays = {name: one.read() for name, one in read_header(folder / SAMPLE)[0].items()}
    sample = {name[6:]: one for name, one in arrays.items() if name.startswith("input:")}
    wanted = {name[7:]: one for name, one in arrays.items() if name.startswith("output:")}
    known = read_description(folder).inputs
    count = next(len(one) for name, one in sample.items() if known[name].batched)
    inputs = {
        name: one if known[name].batched else np.broadcast_to(one, (count, *one.shape))
        for name, one in sample.items()
    }
    run = jax.jit(
        lambda trained, state, given: function.call(trained, state, given, False, None)[0]
    )
    made = jax.device_get(run(dict(function.trained), dict(function.state), inputs))
    loaded = [name for name in FRAMEWORKS if name in sys.modules]
    if loaded:
        raise RunError(f"the comparison loaded {', '.join(loaded)}; report this as a defect")
    absolute = relative = 0.0
    for name, one in wanted.items():
        here = np.asarray(made[name], np.float64)
        there = np.asarray(one, np.float64)
        if here.shape != there.shape:
            raise RunError(
                f"output {name} is {list(here.shape)} here and {list(there.shape)} in {function.framework}; report this as a defect"
            )
        finite = np.isfinite(there) & np.isfinite(here)
        absolute = max(absolute, float(np.abs(here - there)[finite].max(initial=0.0)))
        relative = max(relative, relative_error(here, there))
    return {
        "examples": count,
        "max_absolute": absolute,
        "max_relative": relative,
        "tolerance": TOLERANCE,
    }


def main() -> int:
    """Writes the result into the folder."""
    folder = Path(sys.argv[1])
    try:
        outcome: dict[str, object] = dict(measure(folder))
    except SystolicError as error:
        outcome = {"error": type(error).__name__, "told": str(error)}
    (folder / PARITY).write_text(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
