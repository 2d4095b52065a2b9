"""Converts a function to ONNX and runs it, in a process with packages of its own: ``python -m systolic.exporting.onnx.child FOLDER``."""

import itertools
import json
import logging
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np

MODEL, REQUEST, OUTCOME = "request.pkl", "request.json", "outcome.json"
PARAMS, PROGRAM = "params.npz", "model.onnx"
OPSET = 21
"""Of ONNX 1.16 (2024): newer operations are not needed, and older runtimes read it."""

INLINED = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
)
"""Primitives that call a function once."""
MOST_TURNS = 128
"""Turns of a loop that are written one after another."""
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
        told = " ".join(str(error).split("\n\n")[0].split())[:300]
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
        lambda *args: tuple(_computed(traced.jaxpr, traced.consts, args)),
        inputs=shapes,
        input_names=names,
        output_names=outputs,
        model_name=request["function"],
        opset=OPSET,
        return_mode="file",
        output_path=str(folder / PROGRAM),
        export_mode="web",  # one file, weights inside
    )


def _computed(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    """Outputs of a jaxpr, its functions inlined; what ONNX Runtime lacks (choices among booleans, pooling with the channels last) by other operations."""
    import jax
    import jax.extend.core
    import jax.numpy as jnp

    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax.extend.core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        given, name = [read(atom) for atom in equation.invars], equation.primitive.name
        if name in INLINED:
            made = _called(equation.params, given)
        elif name == "scan" and equation.params["length"] <= MOST_TURNS:
            made = _unrolled(equation.params, given)
        elif name == "select_n" and len(given) == 3 and equation.outvars[0].aval.dtype == bool:
            which, no, yes = given
            made = [(which & yes) | (jnp.logical_not(which) & no)]
        elif name == "reduce_window_max" and _taps(equation.params) <= MOST_TAPS:
            made = [_pooled(given[0], equation.params)]
        else:
            params = equation.primitive.get_bind_params(equation.params)
            out = equation.primitive.bind(*given, **params)
            made = out if equation.primitive.multiple_results else [out]
        known.update(zip(equation.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _called(params: Any, given: list[Any]) -> list[Any]:
    """Outputs of a function that is called once."""
    import jax.extend.core

    inner = params.get("jaxpr") or params["call_jaxpr"]
    if isinstance(inner, jax.extend.core.ClosedJaxpr):
        return _computed(inner.jaxpr, inner.consts, given)
    return _computed(inner, (), given)


def _unrolled(params: Any, given: list[Any]) -> list[Any]:
    """Outputs of a loop over layers, one turn after another."""
    import jax.numpy as jnp

    fixed, carried, length = params["num_consts"], params["num_carry"], params["length"]
    consts, carry = given[:fixed], given[fixed : fixed + carried]
    rows = given[fixed + carried :]
    body, turns = params["jaxpr"], range(length)
    made: list[list[Any]] = []
    for turn in reversed(turns) if params["reverse"] else turns:
        outputs = _computed(body.jaxpr, body.consts, [*consts, *carry, *(r[turn] for r in rows)])
        carry = outputs[:carried]
        made.append(outputs[carried:])
    made = made[::-1] if params["reverse"] else made
    return [*carry, *(jnp.stack(parts) for parts in zip(*made, strict=True))]


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
    import onnxruntime

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
