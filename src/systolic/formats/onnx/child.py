"""Converts a function to ONNX and runs it, in a process with packages of its own: ``python -m systolic.formats.onnx.child FOLDER``."""

import itertools
import json
import logging
import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from systolic.formats.unrolling import computed

MODEL, REQUEST, OUTCOME = "request.pkl", "request.json", "outcome.json"
PARAMS, PROGRAM = "params.npz", "model.onnx"
OPSET = 21
"""Of ONNX 1.16 (2024): newer operations are not needed, and older runtimes read it."""

MOST_TAPS = 64
"""Largest window that is pooled by slices."""


def main() -> int:
    """Does what a folder's request asks for; a mistake is told in its outcome."""
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # of plugins for libraries that are not installed
    request = json.loads((folder / REQUEST).read_bytes())
    try:
        outcome = _work(folder, request)
    except Exception as error:
        traceback.print_exc()
        told = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]
        outcome = {"told": f"{type(error).__name__}: {told}"}
    (folder / OUTCOME).write_text(json.dumps(outcome))
    return 0


def _work(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    convert(folder, request)
    return {"outputs": run(folder, request["calls"])}


def convert(folder: Path, request: dict[str, Any]) -> None:
    """Writes the function as an ONNX file, its weights inside."""
    import cloudpickle
    import jax
    import jax.core
    import jax.export
    from jax2onnx import to_onnx  # ty: ignore[import-not-found]

    model = cloudpickle.loads((folder / MODEL).read_bytes())
    with np.load(folder / PARAMS) as found:
        params = {
            path: found[str(number)].view(np.dtype(dtype)).reshape(shape)
            for number, (path, dtype, shape) in enumerate(request["params"])
        }
    function = model.functions_on(request["platform"])[request["function"]]
    names, outputs = list(function.inputs), list(request["outputs"])

    def call(*given: Any) -> Any:
        made = function.call(params, dict(zip(names, given, strict=True)))
        return tuple(made[name] for name in outputs)

    dims: dict[str, Any] = {}
    if function.free:
        sizes = jax.export.symbolic_shape(", ".join(function.free), constraints=request["limits"])
        dims = dict(zip(function.free, sizes, strict=True))
    given = function.abstract(dims)
    shapes = [given[name] for name in names]
    # Traced before the converter, which puts functions of its own into jax.numpy and Flax while it traces.
    traced = jax.make_jaxpr(call)(*shapes)
    to_onnx(
        lambda *args: tuple(computed(traced.jaxpr, traced.consts, args, _replaced)),
        inputs=shapes,
        input_names=names,
        output_names=outputs,
        model_name=request["function"],
        opset=OPSET,
        return_mode="file",
        output_path=str(folder / PROGRAM),
        export_mode="web",  # one file, weights inside
    )
    _describe(folder / PROGRAM, request["metadata"])


def _describe(file: Path, metadata: dict[str, str]) -> None:
    """Adds metadata to a file: of messages that follow each other the fields are joined."""
    onnx: Any = import_module("onnx")  # of the packages in the cache

    more = onnx.ModelProto()
    import_module("onnx.helper").set_model_props(more, metadata)
    with file.open("ab") as opened:
        opened.write(more.SerializeToString())


def _replaced(equation: Any, given: list[Any]) -> list[Any] | None:
    """What ONNX Runtime lacks, choices among booleans and pooling with the channels last, by other operations."""
    import jax.numpy as jnp

    name = equation.primitive.name
    if name == "select_n" and len(given) == 3 and equation.outvars[0].aval.dtype == bool:
        which, no, yes = given
        return [(which & yes) | (jnp.logical_not(which) & no)]
    if name == "reduce_window_max" and _taps(equation.params) <= MOST_TAPS:
        return [_pooled(given[0], equation.params)]
    return None


def _taps(params: Any) -> int:
    """Positions of a pooling's window."""
    return int(np.prod(params["window_dimensions"]))


def _pooled(array: Any, params: Any) -> Any:
    """A largest value of windows as that of shifted slices: a MaxPool with the channels last is none that ONNX Runtime has."""
    import jax

    low = np.array(-np.inf, array.dtype)
    padding = [(before, after, 0) for before, after in params["padding"]]
    array = jax.lax.pad(array, low, padding) if np.any(params["padding"]) else array
    windows, strides = params["window_dimensions"], params["window_strides"]
    made = None
    for place in itertools.product(*map(range, windows)):
        part = array
        for axis, (start, window, stride) in enumerate(zip(place, windows, strides, strict=True)):
            if (window, stride) != (1, 1):
                size = (array.shape[axis] - window) // stride + 1
                stop = start + (size - 1) * stride + 1
                part = jax.lax.slice_in_dim(part, start, stop, stride, axis)
        made = part if made is None else jax.lax.max(made, part)
    return made


def run(folder: Path, calls: int) -> list[str]:
    """Outputs of ONNX Runtime for the inputs of each call; their names."""
    onnxruntime: Any = import_module("onnxruntime")  # of the packages in the cache

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(folder / PROGRAM), options, providers=["CPUExecutionProvider"]
    )
    names = [one.name for one in session.get_outputs()]
    known = {one.name for one in session.get_inputs()}
    for number in range(calls):
        with np.load(folder / f"{number}.npz") as found:
            given = {name: found[name] for name in found.files if name in known}
        made: dict[str, Any] = dict(zip(names, session.run(None, given), strict=True))
        np.savez(folder / f"{number}.outputs.npz", **made)
    return names


if __name__ == "__main__":
    raise SystemExit(main())
