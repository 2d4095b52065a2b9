"""Exported programs, loaded again without their framework: StableHLO with a batch of any size and its weights.

``python -m systolic.formats.program.exported BUNDLE SCRATCH`` compares one with its framework's outputs.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError, NotFoundError, RunError, SystolicError
from systolic.formats.program.description import PROGRAM, SAMPLE, TOLERANCE, Description
from systolic.formats.program.export import relative_error
from systolic.formats.program.model import ExportedProgram
from systolic.models.program.function import Named, PureFunction
from systolic.runs.bundle.tensors import SUFFIX, read_header

_functions: dict[tuple[Path, str], PureFunction] = {}
"""Loaded once a process, by folder and digest."""
FRAMEWORKS = ("torch", "torchax", "keras", "tensorflow", "tf2jax", "transformers")
PARITY = "parity.json"


def exported_function(folder: Path, known: Description) -> PureFunction:
    """The program of a folder as a pure function; weights are mapped and read when they are used.

    Raises:
        NotFoundError: a file is missing.
        DataError: the program is another one than the description says, or does not read in this version of JAX.
    """
    key = folder.resolve(), known.digest
    if key not in _functions:
        _functions[key] = _loaded(folder, known)
    return _functions[key]


def _loaded(folder: Path, known: Description) -> PureFunction:
    file = folder / PROGRAM
    if not file.is_file():
        raise NotFoundError(f"{folder} lacks {PROGRAM}; copy the whole folder")
    raw = file.read_bytes()
    if hashlib.sha256(raw).hexdigest() != known.digest:
        raise DataError(
            f"{file} is another program than the one that was imported; import the model again"
        )
    try:
        program = jax.export.deserialize(bytearray(raw))
    except Exception as error:
        raise DataError(
            f"{file} was written by jax {known.jax} and does not read with {jax.__version__} ({str(error).splitlines()[0]}); import the model again"
        ) from error
    arrays = {}
    for part in sorted(folder.glob(f"weights*{SUFFIX}")):
        arrays |= {name: tensor.read() for name, tensor in read_header(part)[0].items()}
    missing = [name for name in (*known.trained, *known.state) if name not in arrays]
    if missing:
        raise NotFoundError(f"{folder} lacks the weights of {missing[0]}; copy the whole folder")
    return PureFunction(
        framework=known.framework,
        trained={name: arrays[name] for name in known.trained},
        state={name: arrays[name] for name in known.state},
        example={},
        call=_Reloaded(program, known, {name: array.dtype for name, array in arrays.items()}),
        random=False,
    )


class _Reloaded:
    """An exported program under the contract of a pure function; evaluation always."""

    def __init__(self, program: Any, known: Description, dtypes: Mapping[str, Any]) -> None:
        self.program, self.known, self.dtypes = program, known, dtypes

    def __call__(
        self, trained: Named, state: Named, inputs: Named, train: bool, key: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """See :class:`PureFunction`."""
        del train, key
        weights = {
            name: jnp.asarray(array, self.dtypes[name])
            for name, array in {**trained, **state}.items()
        }
        arrays = {}
        for name, port in self.known.inputs.items():
            array = jnp.asarray(inputs[name], port.dtype)
            # A batch repeats what is the same for all its examples.
            arrays[name] = array if port.batched else array[0]
        if self.known.batch is None:
            return dict(self.program.call(weights, arrays)), dict(state)
        return self._in_groups(weights, arrays, self.known.batch), dict(state)

    def _in_groups(self, weights: Named, inputs: dict[str, Any], size: int) -> dict[str, Any]:
        """The program on groups of the examples that it was exported for, the last one padded with zeros.

        An output that is one for a whole call is repeated for its examples.

        Raises:
            OptionError: examples depend on each other, and there is a part of a group.
        """
        batched = {
            name: input_ for name, input_ in inputs.items() if self.known.inputs[name].batched
        }
        rest = {name: input_ for name, input_ in inputs.items() if name not in batched}
        count = next(iter(batched.values())).shape[0]
        self.known.check_examples(count)
        groups = -(-count // size)

        def split(array: Any) -> Any:
            pads = [(0, groups * size - count)] + [(0, 0)] * (array.ndim - 1)
            return jnp.pad(array, pads).reshape(groups, size, *array.shape[1:])

        def rows(name: str, output: Any) -> Any:
            if self.known.outputs[name].batched:
                return output.reshape(-1, *output.shape[2:])[:count]
            return jnp.repeat(output, size, axis=0)[:count]

        grouped = jax.lax.map(
            lambda group: self.program.call(weights, {**group, **rest}),
            jax.tree.map(split, batched),
        )
        return {name: rows(name, output) for name, output in grouped.items()}


def measure(folder: Path, sample_file: Path) -> dict[str, Any]:
    """Differences over all outputs of the sample.

    Raises:
        RunError: a framework is loaded, or an output is missing.
    """
    measured = replayed(folder, sample_file)
    loaded = [name for name in FRAMEWORKS if name in sys.modules]
    if loaded:
        raise RunError(f"the comparison loaded {', '.join(loaded)}; report this as a defect")
    return {**measured, "tolerance": TOLERANCE}


def replayed(folder: Path, sample_file: Path) -> dict[str, Any]:
    """Differences of a program's outputs from those of a sample, with the framework and the number of rows.

    Raises:
        RunError: an output has another shape.
    """
    known = ExportedProgram.of(folder).about
    function = exported_function(folder, known)
    arrays = {name: tensor.read() for name, tensor in read_header(sample_file)[0].items()}
    sample = {name[6:]: array for name, array in arrays.items() if name.startswith("input:")}
    wanted = {name[7:]: array for name, array in arrays.items() if name.startswith("output:")}
    ports = known.inputs
    count = next(len(input_) for name, input_ in sample.items() if ports[name].batched)
    inputs = {
        name: input_ if ports[name].batched else np.broadcast_to(input_, (count, *input_.shape))
        for name, input_ in sample.items()
    }
    run = jax.jit(
        lambda trained, state, batch: function.call(trained, state, batch, False, None)[0]
    )
    answers = jax.device_get(run(dict(function.trained), dict(function.state), inputs))
    answers = {
        name: output if known.outputs[name].batched else output[0]
        for name, output in answers.items()
    }
    measured = differences(answers, wanted, known.framework)
    return {"framework": known.framework, "rows": count, **measured}


def differences(answers: Named, wanted: Named, framework: str) -> dict[str, float]:
    """Largest and mean differences over all outputs, and both relative to the largest magnitude of the same output.

    Raises:
        RunError: an output has another shape.
    """
    relative, apart, shares = 0.0, [], []
    for name, expected in wanted.items():
        here, there = np.asarray(answers[name], np.float64), np.asarray(expected, np.float64)
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
