"""Exports of ``stablehlo``: programs of JAX for cpu, tpu and cuda in one file each, their parameters beside them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from systolic.core.errors import OptionError, RunError
from systolic.formats.comparison import ExportDifference, joined
from systolic.formats.conversion import ModelExport, described, each_platform
from systolic.formats.examples import ExampleInputs
from systolic.formats.inference import ExportableModel, Inference, run
from systolic.formats.registry import ExportSettings
from systolic.runs.bundle.folder import BundleDraft, draft
from systolic.runs.bundle.tensors import TensorSpec

PLATFORMS = ("cpu", "tpu", "cuda")
MANIFEST, README = "manifest.json", "README.txt"
KIND, FORMAT = "systolic-stablehlo", 1
SUFFIX = ".bin"
"""Suffix of a program: jax.export's serialization (a FlatBuffer with StableHLO)."""
LOADING = """\
import glob
import jax.export
from safetensors.flax import load_file

params = {{}}
for file in glob.glob("weights*.safetensors"):
    params |= load_file(file)
program = jax.export.deserialize(bytearray(open("{program}", "rb").read()))
inputs = {{{inputs}}}
outputs = jax.jit(program.call)(params, inputs)  # {outputs}
"""
"""Python that reloads a program."""


def export_stablehlo(
    model: ExportableModel,
    examples: ExampleInputs,
    out: Path,
    settings: ExportSettings,
    say: Callable[[str], None],
) -> ModelExport:
    """Writes a model's functions as programs that plain JAX reloads, compared with their source.

    Args:
        model: The model.
        examples: Inputs of the comparison.
        out: The new folder.
        settings: Nothing of them is left to do.
        say: Called with each stage.

    Raises:
        OptionError: an operation of the model needs a size that is free.
        RunError: an operation lowers on no such platform, outputs differ, or the disk is full; nothing is left at ``out``.
        TakenError: ``out`` exists.
    """
    del settings
    with draft(out) as folder:
        programs = {}
        for name, function in model.functions.items():
            say(f"lowering {name} for {', '.join(PLATFORMS)}")
            programs[name] = serialized(each_platform(model, function), model.params)
            folder.add(f"{name}{SUFFIX}", programs[name])
        write_params(folder, model.params, say)
        differences = {}
        for name, function in model.functions.items():
            say(f"comparing {name}")
            differences[name] = _difference(model, function, examples, programs[name])
            differences[name].check(f"the exported {name}", model.tolerance)
        folder.add(MANIFEST, json.dumps(_manifest(model, differences), indent=2).encode())
        folder.add(README, _readme(model).encode())
        folder.rename()
    return ModelExport.of(model, out, "stablehlo", differences, examples)


def serialized(
    function: Inference, params: Mapping[str, Any], platforms: tuple[str, ...] = PLATFORMS
) -> bytes:
    """A function of (params, inputs) as jax.export writes it, with its free dims.

    Raises:
        OptionError: an operation needs a size that is free.
        RunError: an operation does not lower on a platform.
    """
    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in params.items()}
    free = function.free
    try:
        exported = jax.export.export(jax.jit(function.call), platforms=platforms)(
            shapes, function.abstract(function.symbolic())
        )
    except (TypeError, jax.errors.InconclusiveDimensionOperation) as error:
        # A size that is used as a number of Python; JAX's own errors of that are of this type too.
        if not free:
            raise
        raise OptionError(
            f"{function.name} can't be exported with {' and '.join(free)} free ({_first(error)}); fix them with {' '.join(f'--{dim} N' for dim in free)}"
        ) from error
    except (NotImplementedError, ValueError) as error:
        raise RunError(
            f"{function.name} can't be exported for {', '.join(platforms)} ({_first(error)}); an operation of the model lowers on one platform only"
        ) from error
    return bytes(exported.serialize())


def _first(error: Exception) -> str:
    """First line of an error of JAX."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].strip().rstrip(".")[:200]


def write_params(
    folder: BundleDraft, params: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Writes parameters by path as safetensors, ``weights*.safetensors``."""
    say("writing parameters")
    specs = [
        TensorSpec(name=path, shape=array.shape, dtype=np.dtype(array.dtype))
        for path, array in params.items()
    ]
    folder.weights(specs, lambda path: iter([np.asarray(params[path])]), lambda _: None)


def _difference(
    model: ExportableModel, function: Inference, examples: ExampleInputs, program: bytes
) -> ExportDifference:
    """Outputs of a serialized program against those of the source, on the same inputs."""
    reloaded = jax.export.deserialize(bytearray(program))
    return joined(
        [
            (
                model.source_outputs(function.name, batch),
                run(reloaded.call, model.params, batch),
            )
            for batch in examples.compared(function)
        ],
        examples.rows,
    )


def _manifest(
    model: ExportableModel, differences: Mapping[str, ExportDifference]
) -> dict[str, Any]:
    from systolic import __version__

    return {
        "kind": KIND,
        "format": FORMAT,
        "systolic": __version__,
        "jax": jax.__version__,
        "model": type(model.job.model).__name__,
        "name": model.job.name,
        "dtype": model.dtype,
        "platforms": list(PLATFORMS),
        "functions": {
            name: {
                "program": f"{name}{SUFFIX}",
                "inputs": {key: asdict(input_) for key, input_ in function.inputs.items()},
                "outputs": {key: asdict(output) for key, output in model.outputs(name).items()},
                "limits": dict(function.limits),
                "compared": differences[name].to_json(),
            }
            for name, function in model.functions.items()
        },
        "labels": [],
        **described(model.job),
    }


def _readme(model: ExportableModel) -> str:
    """Text beside the programs: what they take and return, and the lines that reload one."""
    parts = [
        f"{model.job.name}: programs of JAX {jax.__version__} for {', '.join(PLATFORMS)}, written by systolic export.",
        "",
        "A name in a shape is a free dim: any size, the same wherever the name occurs in a call.",
        "",
    ]
    for name, function in model.functions.items():
        takes = ", ".join(f"{key}: {input_}" for key, input_ in function.inputs.items())
        back = ", ".join(f"{key}: {output}" for key, output in model.outputs(name).items())
        parts += [f"{name}{SUFFIX}", f"  takes   {takes}", f"  returns {back}"]
        parts += [f"  {dim} is at most {most}" for dim, most in function.limits.items()]
    first = model.function()
    inputs = ", ".join(f'"{key}": ...' for key in first.inputs)
    outputs = ", ".join(model.outputs(first.name))
    code = LOADING.format(program=f"{first.name}{SUFFIX}", inputs=inputs, outputs=outputs)
    parts += ["", "Reload it in this folder with jax and safetensors alone:", "", code]
    parts += ["manifest.json says the same, and how far the outputs were from the source's.", ""]
    return "\n".join(parts)
