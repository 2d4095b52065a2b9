"""Exports of ``onnx``: one .onnx file of one function with free dims, run by ONNX Runtime beside its source."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from systolic.artifact import failure
from systolic.artifact.bundle import check_free, write_file
from systolic.core.errors import OptionError, RunError
from systolic.formats.difference import joined
from systolic.formats.examples import ExampleInputs
from systolic.formats.inference import ExportableModel, Inference
from systolic.formats.onnx import child
from systolic.formats.outside import metadata
from systolic.formats.packages import package_folder
from systolic.formats.plain import plain_platform
from systolic.formats.process import ended, last_line, run_module
from systolic.formats.result import ModelExport
from systolic.formats.settings import ExportSettings
from systolic.job import Precision

CHILD = "systolic.formats.onnx.child"
MOST_BYTES = 2_000_000_000
"""Most bytes of weights in one file: protobuf's limit is 2 GiB."""


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
        TakenError: there is something at ``out``.
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
            _run(work, packages, [name for name in model.functions if name != function.name])
            say("comparing")
            apart = joined(
                [
                    (model.source_outputs(function.name, given), _outputs(work, number))
                    for number, given in enumerate(calls)
                ],
                examples.rows,
            )
            apart.check(f"the exported {function.name}", model.tolerance)
            content = (work / child.PROGRAM).read_bytes()
    except OSError as error:
        raise RunError(
            f"the conversion to ONNX could not write to {tempfile.gettempdir()} ({failure.reason(error)}); free some space there, or set TMPDIR to another folder"
        ) from error
    write_file(out, content)
    return ModelExport.of(model, out, "onnx", {function.name: apart}, examples)


def _write_request(
    model: ExportableModel, function: Inference, examples: ExampleInputs, work: Path
) -> list[dict[str, np.ndarray]]:
    """Files that the child reads: the model, its weights, inputs. Returns the inputs of each call."""
    import cloudpickle

    calls = examples.compared(function)
    for number, given in enumerate(calls):
        arrays: dict[str, Any] = dict(given)
        np.savez(work / f"{number}.npz", **arrays)
    params = {path: np.ascontiguousarray(array) for path, array in model.params.items()}
    raw: dict[str, Any] = {
        str(number): array.reshape(-1).view(np.uint8)
        for number, array in enumerate(params.values())
    }
    np.savez(work / child.PARAMS, **raw)
    plain = ExportableModel(
        job=model.job, params={}, make=model.make, dtype=model.dtype, sizes=model.sizes
    )
    (work / child.MODEL).write_bytes(cloudpickle.dumps(plain))
    limits = function.limits.items()
    request = {
        "function": function.name,
        "platform": plain_platform(model),
        "outputs": list(model.outputs(function.name)),
        "limits": [f"{dim} <= {most}" for dim, most in limits if dim in function.free],
        "params": [[path, one.dtype.name, list(one.shape)] for path, one in params.items()],
        "calls": len(calls),
        "metadata": metadata(model.job),
    }
    (work / child.REQUEST).write_text(json.dumps(request))
    return calls


def _run(work: Path, packages: Path, others: list[str]) -> None:
    """Runs the child; the model's other functions are another way out.

    Raises:
        RunError: it refuses the model, or died.
    """
    log, answer = work / "log.txt", work / child.OUTCOME
    code = run_module(sys.executable, CHILD, [str(work)], log, path=[packages])
    if not answer.is_file():
        raise RunError(f"the conversion to ONNX {ended(code)}; {last_line(log)}")
    outcome: Mapping[str, Any] = json.loads(answer.read_bytes())
    if "told" in outcome:
        way = "export it to stablehlo or litert"
        if others:
            way = f"give --function {' or '.join(others)}, or export it to stablehlo"
        raise RunError(f"jax2onnx can't convert the model: {outcome['told']}; {way}")


def _outputs(work: Path, number: int) -> dict[str, np.ndarray]:
    with np.load(work / f"{number}.outputs.npz") as found:
        return dict(found)
