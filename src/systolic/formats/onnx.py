"""Exports of ``onnx``: one .onnx file of one function with free dims, run by ONNX Runtime beside its source.

The converter runs in a process with packages of its own: ``python -m systolic.formats.onnx FOLDER``.
"""

import itertools
import json
import logging
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import OptionError, RunError
from systolic.core.files import fault_of
from systolic.formats.comparison import joined
from systolic.formats.conversion import ModelExport, computed, metadata, plain_platform
from systolic.formats.examples import ExampleInputs
from systolic.formats.inference import ExportableModel, Inference
from systolic.formats.packages import ended, last_line, package_folder, run_module
from systolic.formats.registry import ExportSettings
from systolic.job import Precision
from systolic.runs.bundle.folder import check_free, write_file

CHILD = "systolic.formats.onnx"

MOST_BYTES = 2_000_000_000
"""Most bytes of weights in one file: protobuf's limit is 2 GiB."""
MODEL, REQUEST, OUTCOME = "request.pkl", "request.json", "outcome.json"
PARAMS, PROGRAM = "params.npz", "model.onnx"
OPSET = 21
"""Operator set of ONNX 1.16 (2024): newer operations are not needed, and older runtimes read it."""
MOST_TAPS = 64
"""Largest window that is pooled by slices."""


def check_onnx(settings: ExportSettings) -> None:
    """Refuses a precision that the format is not written in.

    Raises:
        OptionError: it is not f32.
    """
    if settings.precision is not Precision.f32:
        raise OptionError(
            f"--precision is {settings.precision.value}, and ONNX is exported in f32; leave it out"
        )


def export_onnx(
    model: ExportableModel,
    examples: ExampleInputs,
    out: Path,
    settings: ExportSettings = ExportSettings(),  # noqa: B008
    say: Callable[[str], None] = lambda _: None,
) -> ModelExport:
    """Writes one function of a model as an .onnx file, run by ONNX Runtime and compared with its source.

    Args:
        model: The model; dims without a size are free in the file.
        examples: Inputs of the comparison.
        out: The new file.
        settings: The function; its precision is f32.
        say: Called with each stage.

    Raises:
        OptionError: the weights are too large for one file.
        TakenError: ``out`` exists.
        RunError: the converter refuses the model or can't be installed, outputs differ, or the disk is full; nothing is left at ``out``.
    """
    check_onnx(settings)
    check_free(out)
    size = sum(array.nbytes for array in model.params.values())
    if size > MOST_BYTES:
        raise OptionError(
            f"{model.job.name} has {size} bytes of weights, and an ONNX file takes up to {MOST_BYTES}; export it to stablehlo"
        )
    packages = package_folder("onnx", say)
    function = model.function(settings.function or None)
    say(f"converting {function.name}")
    try:
        with tempfile.TemporaryDirectory(prefix="systolic-onnx-") as name:
            work = Path(name)
            calls = _write_request(model, function, examples, work)
            _run_child(work, packages, [name for name in model.functions if name != function.name])
            say("comparing")
            apart = joined(
                [
                    (model.source_outputs(function.name, batch), _child_outputs(work, number))
                    for number, batch in enumerate(calls)
                ],
                examples.rows,
            )
            apart.check(f"the exported {function.name}", model.tolerance)
            content = (work / PROGRAM).read_bytes()
    except OSError as error:
        raise RunError(
            f"the conversion to ONNX could not write to {tempfile.gettempdir()} ({fault_of(error)}); free some space there, or set TMPDIR to another folder"
        ) from error
    write_file(out, content)
    return ModelExport.of(model, out, "onnx", {function.name: apart}, examples)


def _write_request(
    model: ExportableModel, function: Inference, examples: ExampleInputs, work: Path
) -> list[dict[str, np.ndarray]]:
    """Files that the child reads: the model, its weights, inputs. Returns the inputs of each call."""
    import cloudpickle

    calls = examples.compared(function)
    for number, batch in enumerate(calls):
        arrays: dict[str, Any] = dict(batch)
        np.savez(work / f"{number}.npz", **arrays)
    params = {path: np.ascontiguousarray(array) for path, array in model.params.items()}
    raw: dict[str, Any] = {
        str(number): array.reshape(-1).view(np.uint8)
        for number, array in enumerate(params.values())
    }
    np.savez(work / PARAMS, **raw)
    plain = ExportableModel(
        job=model.job, params={}, make=model.make, dtype=model.dtype, sizes=model.sizes
    )
    (work / MODEL).write_bytes(cloudpickle.dumps(plain))
    limits = function.limits.items()
    request = {
        "function": function.name,
        "platform": plain_platform(model),
        "outputs": list(model.outputs(function.name)),
        "limits": [f"{dim} <= {most}" for dim, most in limits if dim in function.free],
        "params": [[path, param.dtype.name, list(param.shape)] for path, param in params.items()],
        "calls": len(calls),
        "metadata": metadata(model.job),
    }
    (work / REQUEST).write_text(json.dumps(request))
    return calls


def _run_child(work: Path, packages: Path, others: list[str]) -> None:
    """Runs the child; the model's other functions are another way out.

    Raises:
        RunError: it refuses the model, or died.
    """
    log, answer = work / "log.txt", work / OUTCOME
    code = run_module(sys.executable, CHILD, [str(work)], log, path=[packages])
    if not answer.is_file():
        raise RunError(f"the conversion to ONNX {ended(code)}; {last_line(log)}")
    outcome: Mapping[str, Any] = json.loads(answer.read_bytes())
    if "told" in outcome:
        way = "export it to stablehlo or litert"
        if others:
            way = f"give --function {' or '.join(others)}, or export it to stablehlo"
        raise RunError(f"jax2onnx can't convert the model: {outcome['told']}; {way}")


def _child_outputs(work: Path, number: int) -> dict[str, np.ndarray]:
    with np.load(work / f"{number}.outputs.npz") as arrays:
        return dict(arrays)


def main() -> int:
    """Does what a folder's request asks for; a mistake is told in its outcome."""
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # of plugins for libraries that are not installed
    request = json.loads((folder / REQUEST).read_bytes())
    try:
        convert(folder, request)
        outcome = {"outputs": run(folder, request["calls"])}
    except Exception as error:
        traceback.print_exc()
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]
        outcome = {"told": f"{type(error).__name__}: {reason}"}
    (folder / OUTCOME).write_text(json.dumps(outcome))
    return 0


def convert(folder: Path, request: dict[str, Any]) -> None:
    """Writes the function as an ONNX file, its weights inside."""
    import cloudpickle
    import jax
    import jax.core
    import jax.export
    from jax2onnx import to_onnx  # ty: ignore[import-not-found]

    model = cloudpickle.loads((folder / MODEL).read_bytes())
    with np.load(folder / PARAMS) as archive:
        params = {
            path: archive[str(number)].view(np.dtype(dtype)).reshape(shape)
            for number, (path, dtype, shape) in enumerate(request["params"])
        }
    function = model.functions_on(request["platform"])[request["function"]]
    names, outputs = list(function.inputs), list(request["outputs"])

    def call(*inputs: Any) -> Any:
        answers = function.call(params, dict(zip(names, inputs, strict=True)))
        return tuple(answers[name] for name in outputs)

    dims: dict[str, Any] = {}
    if function.free:
        sizes = jax.export.symbolic_shape(", ".join(function.free), constraints=request["limits"])
        dims = dict(zip(function.free, sizes, strict=True))
    inputs = function.abstract(dims)
    shapes = [inputs[name] for name in names]
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


def _replaced(equation: Any, operands: list[Any]) -> list[Any] | None:
    """Replacements for what ONNX Runtime lacks: choices among booleans, and pooling with the channels last."""
    import jax.numpy as jnp

    name = equation.primitive.name
    if name == "select_n" and len(operands) == 3 and equation.outvars[0].aval.dtype == bool:
        which, no, yes = operands
        return [(which & yes) | (jnp.logical_not(which) & no)]
    if name == "reduce_window_max" and _taps(equation.params) <= MOST_TAPS:
        return [_pooled(operands[0], equation.params)]
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
    largest = None
    for place in itertools.product(*map(range, windows)):
        part = array
        for axis, (start, window, stride) in enumerate(zip(place, windows, strides, strict=True)):
            if (window, stride) != (1, 1):
                size = (array.shape[axis] - window) // stride + 1
                stop = start + (size - 1) * stride + 1
                part = jax.lax.slice_in_dim(part, start, stop, stride, axis)
        largest = part if largest is None else jax.lax.max(largest, part)
    return largest


def run(folder: Path, calls: int) -> list[str]:
    """Outputs of ONNX Runtime for the inputs of each call; their names."""
    onnxruntime: Any = import_module("onnxruntime")  # of the packages in the cache

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(folder / PROGRAM), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    known = {input_.name for input_ in session.get_inputs()}
    for number in range(calls):
        with np.load(folder / f"{number}.npz") as inputs:
            known_inputs = {name: inputs[name] for name in inputs.files if name in known}
        outputs: dict[str, Any] = dict(zip(names, session.run(None, known_inputs), strict=True))
        np.savez(folder / f"{number}.outputs.npz", **outputs)
    return names


if __name__ == "__main__":
    raise SystemExit(main())
