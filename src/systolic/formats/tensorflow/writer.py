"""Exports of ``savedmodel``: written, reloaded and run by TensorFlow in a process of its own."""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import MissingExtraError, RunError
from systolic.formats.comparison import joined
from systolic.formats.conversion import LABELS, ModelExport, each_platform, label_lines
from systolic.formats.examples import ExampleInputs
from systolic.formats.inference import ExportableModel
from systolic.formats.packages import ended, last_line, run_module
from systolic.formats.registry import ExportSettings
from systolic.formats.stablehlo import PLATFORMS, SUFFIX, serialized
from systolic.formats.tensorflow.writer_child import FAILURE, MISSING, PARAMS, REQUEST
from systolic.runs.bundle.folder import draft

CHILD = "systolic.formats.tensorflow.writer_child"
VERSION = "1"
"""Folder of the model's version, as TensorFlow Serving has them below a model's name."""
ABOUT = "assets.extra/README.txt"
"""Place in a SavedModel for files that TensorFlow leaves alone."""


def export_saved_model(
    model: ExportableModel,
    examples: ExampleInputs,
    out: Path,
    settings: ExportSettings,
    say: Callable[[str], None],
) -> ModelExport:
    """Writes a SavedModel with a signature for each function, ``OUT/1/``; the first is ``serving_default`` too.

    Args:
        model: The model.
        examples: Inputs of the comparison.
        out: The new folder, with the model's name for TensorFlow Serving.
        settings: The Python that has TensorFlow.
        say: Called with each stage.

    Raises:
        MissingExtraError: TensorFlow is not installed there.
        OptionError: an operation needs a size that is free, or there is no such Python.
        RunError: TensorFlow can't write it, outputs differ, or the disk is full; nothing is left at ``out``.
        TakenError: ``out`` exists.
    """
    check_tensorflow(settings)
    with draft(out) as folder, tempfile.TemporaryDirectory(prefix="systolic-") as scratch:
        work = Path(scratch)
        for name, function in model.functions.items():
            say(f"lowering {name} for {', '.join(PLATFORMS)}")
            (work / f"{name}{SUFFIX}").write_bytes(
                serialized(each_platform(model, function), model.params)
            )
        _write_request(model, examples, folder.folder / VERSION, work)
        say("writing and reloading with TensorFlow")
        _run(str(settings.python or sys.executable), work)
        differences = {}
        for name, function in model.functions.items():
            say(f"comparing {name}")
            batches = examples.compared(function)
            source = [model.source_outputs(name, inputs) for inputs in batches]
            answers = [
                _loaded(work / f"{name}.{number}.outputs.npz") for number in range(len(batches))
            ]
            differences[name] = joined(list(zip(source, answers, strict=True)), examples.rows)
            differences[name].check(f"signature {name} of the SavedModel", model.tolerance)
        folder.add(f"{VERSION}/{ABOUT}", _readme(model, out).encode())
        if lines := label_lines(model.job):
            folder.add(f"{VERSION}/assets.extra/{LABELS}", lines)
        folder.rename()
    return ModelExport.of(model, out, "savedmodel", differences, examples)


def check_tensorflow(settings: ExportSettings) -> None:
    """Refuses an environment without TensorFlow; another one than this is asked when it is used.

    Raises:
        MissingExtraError: it is not installed here.
    """
    if settings.python is None and importlib.util.find_spec("tensorflow") is None:
        raise MissingExtraError(
            "--to savedmodel, without --python of an environment with tensorflow and jax,", "tf"
        )


def _write_request(
    model: ExportableModel, examples: ExampleInputs, folder: Path, work: Path
) -> None:
    """Files that the child reads: parameters as bytes, inputs, and what to do with them."""
    params = {path: np.ascontiguousarray(array) for path, array in model.params.items()}
    raw = {str(at): param.reshape(-1).view(np.uint8) for at, param in enumerate(params.values())}
    np.savez(work / PARAMS, **raw)  # ty: ignore[invalid-argument-type]
    functions: dict[str, Any] = {}
    for name, function in model.functions.items():
        calls = examples.compared(function)
        for number, inputs in enumerate(calls):
            np.savez(work / f"{name}.{number}.npz", **inputs)  # ty: ignore[invalid-argument-type]
        limits = {dim: most for dim, most in function.limits.items() if dim in function.free}
        functions[name] = {
            "program": f"{name}{SUFFIX}",
            "inputs": {
                key: {"shape": list(input_.shape), "dtype": input_.dtype}
                for key, input_ in function.inputs.items()
            },
            "constraints": [f"{dim} <= {most}" for dim, most in limits.items()],
            "calls": len(calls),
        }
    request = {
        "folder": str(folder),
        "params": [
            {"path": path, "shape": list(param.shape), "dtype": param.dtype.name}
            for path, param in params.items()
        ],
        "platforms": list(PLATFORMS),
        "functions": functions,
    }
    (work / REQUEST).write_text(json.dumps(request))


def _run(python: str, work: Path) -> None:
    """Runs the child.

    Raises:
        MissingExtraError: its Python has no TensorFlow.
        RunError: it failed or died.
    """
    log = work / "log.txt"
    code = run_module(python, CHILD, [str(work)], log)
    if code == 0:
        return
    failure = work / FAILURE
    if not failure.is_file():
        raise RunError(f"TensorFlow's process {ended(code)}; {last_line(log)}")
    reason = failure.read_text()
    if code == MISSING:
        raise MissingExtraError(f"--to savedmodel ({reason} of {python})", "tf")
    raise RunError(f"TensorFlow can't write the model: {reason}; nothing was kept")


def _loaded(file: Path) -> dict[str, np.ndarray]:
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def _readme(model: ExportableModel, out: Path) -> str:
    """Text inside the SavedModel: its signatures, and how it is loaded and served."""
    parts = [
        f"{model.job.name}: a SavedModel for {', '.join(PLATFORMS)}, written by systolic export.",
        "",
        "Signatures; a name in a shape is a free dim. serving_default is the first one.",
        "",
    ]
    for name, function in model.functions.items():
        takes = ", ".join(f"{key}: {input_}" for key, input_ in function.inputs.items())
        back = ", ".join(f"{key}: {output}" for key, output in model.outputs(name).items())
        parts += [name, f"  takes   {takes}", f"  returns {back}"]
        parts += [f"  {dim} is at most {most}" for dim, most in function.limits.items()]
    first = model.function()
    inputs = ", ".join(f"{key}=..." for key in first.inputs)
    parts += [
        "",
        "Reload it with TensorFlow alone:",
        "",
        "import tensorflow as tf",
        "",
        f'served = tf.saved_model.load("{out.name}/{VERSION}").signatures["serving_default"]',
        f"outputs = served({inputs})  # {', '.join(model.outputs(first.name))}",
        "",
        "TensorFlow Serving takes the folder above this version:",
        f"tensorflow_model_server --rest_api_port=8501 --model_name={out.name} --model_base_path=/PATH/TO/{out.name}",
        "",
    ]
    return "\n".join(parts)
