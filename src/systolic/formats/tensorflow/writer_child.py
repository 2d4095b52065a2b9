"""Writes, reloads and runs a SavedModel: ``python -m systolic.formats.tensorflow.writer_child FOLDER``.

It runs in an environment with tensorflow and jax, which need not have the other packages of this one.
"""

import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

REQUEST, PARAMS, FAILURE = "request.json", "params.npz", "failure.txt"
"""Files of the folder: what to write, its parameters, and the line of a failure."""
MISSING = 3
"""Exit code where a package is missing."""


def main() -> int:
    """Writes what the folder asks for; a failure is told in its file."""
    work = Path(sys.argv[1])
    missing = [name for name in ("tensorflow", "jax") if importlib.util.find_spec(name) is None]
    if missing:
        (work / FAILURE).write_text(f"no package {missing[0]}")
        return MISSING
    try:
        request = json.loads((work / REQUEST).read_bytes())
        write(request, work)
        run(request, work)
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(str(error).split("\n\n")[0].split())[:300]
        (work / FAILURE).write_text(f"{type(error).__name__}: {reason}")
        return 1
    return 0


def write(request: dict[str, Any], work: Path) -> None:
    """Saves the programs of a request as signatures of one SavedModel over one set of variables."""
    import ml_dtypes
    import tensorflow as tf  # ty: ignore[import-not-found]

    module = tf.Module()
    paths = [param["path"] for param in request["params"]]
    variables = []
    with np.load(work / PARAMS) as raw:
        for number, param in enumerate(request["params"]):
            dtype = ml_dtypes.bfloat16 if param["dtype"] == "bfloat16" else param["dtype"]
            array = raw[str(number)].view(dtype).reshape(param["shape"])
            variables.append(tf.Variable(array, trainable=False, name=param["path"]))
    module.params = variables
    signatures = {
        name: _signature(about, paths, variables, request["platforms"], work)
        for name, about in request["functions"].items()
    }
    first = next(iter(signatures.values()))
    tf.saved_model.save(module, request["folder"], {"serving_default": first, **signatures})


def _signature(
    about: dict[str, Any], paths: list[str], variables: list[Any], platforms: list[str], work: Path
) -> Any:
    """A concrete function with the program's inputs by name."""
    import jax.export
    import tensorflow as tf  # ty: ignore[import-not-found]
    from jax.experimental import jax2tf

    program = jax.export.deserialize(bytearray((work / about["program"]).read_bytes()))
    inputs = about["inputs"]
    shapes = {
        key: f"({', '.join(map(str, input_['shape']))}{',' if len(input_['shape']) == 1 else ''})"
        for key, input_ in inputs.items()
    }

    def call(arrays: list[Any], batch: dict[str, Any]) -> Any:
        return program.call(dict(zip(paths, arrays, strict=True)), batch)

    converted = jax2tf.convert(
        call,
        polymorphic_shapes=[None, shapes],
        polymorphic_constraints=about["constraints"],
        with_gradient=False,
        native_serialization_platforms=platforms,
    )
    function = tf.function(lambda **batch: converted(variables, batch), autograph=False)
    return function.get_concrete_function(
        **{
            key: tf.TensorSpec(
                [size if isinstance(size, int) else None for size in input_["shape"]],
                tf.as_dtype(input_["dtype"]),
                name=key,
            )
            for key, input_ in inputs.items()
        }
    )


def run(request: dict[str, Any], work: Path) -> None:
    """Runs the signatures of the saved folder on the example inputs, ``NAME.NUMBER.outputs.npz``."""
    import tensorflow as tf  # ty: ignore[import-not-found]

    signatures = tf.saved_model.load(request["folder"]).signatures
    for name, about in request["functions"].items():
        for number in range(about["calls"]):
            with np.load(work / f"{name}.{number}.npz") as inputs:
                tensors = {key: tf.constant(inputs[key]) for key in about["inputs"]}
            outputs = {key: output.numpy() for key, output in signatures[name](**tensors).items()}
            np.savez(work / f"{name}.{number}.outputs.npz", **outputs)


if __name__ == "__main__":
    raise SystemExit(main())
