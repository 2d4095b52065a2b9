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
from collections.abc import Callable, Mapping, Sequence
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
    simplify(folder / PROGRAM)
    _describe(folder / PROGRAM, request["metadata"])


class OnnxGraph:
    """The nodes of an ONNX graph while they are rewritten.

    Args:
        model: ONNX's message; changed by :meth:`write`.
    """

    def __init__(self, model: Any) -> None:
        self._onnx: Any = import_module("onnx")  # of the packages in the cache
        self._helper: Any = import_module("onnx.helper")
        self._arrays: Any = import_module("onnx.numpy_helper")
        self._graph = model.graph
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._names = itertools.count()
        self._outputs = {output.name for output in model.graph.output}
        self._sizes = self._known_sizes(model)
        self.nodes: list[Any] = list(model.graph.node)
        self.index()

    def _known_sizes(self, model: Any) -> dict[str, list[float]]:
        """Sizes of values by name, infinite where they are free."""
        inferred = self._onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        known: dict[str, list[float]] = {}
        for value in (*inferred.value_info, *inferred.input):
            shape = value.type.tensor_type.shape.dim
            known[value.name] = [
                dim.dim_value if dim.HasField("dim_value") else np.inf for dim in shape
            ]
        return known

    def index(self) -> None:
        """Finds producers and readers again, after :attr:`nodes` has changed."""
        self.producers = {output: node for node in self.nodes for output in node.output}
        self.readers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    def sizes(self, name: str, dims: str) -> dict[str, float]:
        """Sizes of a value's dims by their letters."""
        return dict(zip(dims, self._sizes.get(name) or [np.inf] * len(dims), strict=True))

    def value(self, name: str) -> np.ndarray | None:
        """A constant; None for what is computed."""
        tensor = self._constants.get(name)
        return None if tensor is None else self._arrays.to_array(tensor)

    def constant(self, array: Any) -> str:
        """Name of a new constant."""
        name = f"constant_{next(self._names)}"
        self._constants[name] = self._arrays.from_array(np.ascontiguousarray(array), name)
        return name

    def node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> Any:
        """A new node of one output, in no list yet."""
        return self._helper.make_node(kind, inputs, [f"{kind}_{next(self._names)}"], **attributes)

    def reader(self, name: str) -> Any:
        """The only node that reads a value; None where there are others, or none."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self._outputs else None

    def drop(self, node: Any, by: str) -> None:
        """Removes a node; whoever read its output reads another value. An output of the graph stays."""
        if node.output[0] in self._outputs:
            return
        for reader in self.readers.get(node.output[0], []):
            for index, name in enumerate(reader.input):
                if name == node.output[0]:
                    reader.input[index] = by
        self.nodes = [other for other in self.nodes if other is not node]
        self.index()

    def write(self) -> None:
        """Puts what is still used into the message."""
        used, kept = set(self._outputs), []
        for node in reversed(self.nodes):
            if not used.isdisjoint(node.output):
                kept.append(node)
                used.update(node.input)
        del self._graph.node[:], self._graph.initializer[:], self._graph.value_info[:]
        self._graph.node.extend(reversed(kept))
        self._graph.initializer.extend(
            tensor for name, tensor in self._constants.items() if name in used
        )


def simplify(file: Path) -> None:
    """Rewrites a graph so that a runtime finds what it has kernels for: matmuls in place of einsums, convolutions that hold their norms, Clip and Relu.

    ONNX Runtime then takes 0.6 of the time for MobileNetV2 and 0.75 for MiniLM. Its own basic pass comes first: it computes what
    depends on weights alone, and moves transposes until convolutions follow each other.
    """
    onnx: Any = import_module("onnx")  # of the packages in the cache
    onnxruntime: Any = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(file)
    onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    model = onnx.load(file)
    graph = OnnxGraph(model)
    _without_einsums(graph)
    _norms_into_convolutions(graph)
    _clips(graph)
    _without_expands(graph)
    graph.write()
    used = {node.domain for node in model.graph.node}
    sets = [version for version in model.opset_import if version.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(sets)
    onnx.checker.check_model(model)
    onnx.save(model, file)


def _without_einsums(graph: OnnxGraph) -> None:
    nodes = []
    for node in graph.nodes:
        instead = _matmul(graph, node) if node.op_type == "Einsum" else None
        if instead:
            instead[-1].output[0] = node.output[0]
        nodes += instead or [node]
    graph.nodes = nodes
    graph.index()


def _matmul(graph: OnnxGraph, node: Any) -> list[Any] | None:
    """An einsum of two operands as nodes around one MatMul; None where it is none."""
    operands, _, out = node.attribute[0].s.decode().replace(" ", "").partition("->")
    if len(node.input) != 2 or not out or "." in operands:
        return None
    left, right = operands.split(",")
    summed = "".join(letter for letter in left if letter in right and letter not in out)
    weights = graph.value(node.input[1])
    plain = left.endswith(summed) and right.startswith(summed)
    if (
        weights is not None
        and plain
        and out == left[: -len(summed)] + right[len(summed) :]
        and summed
    ):
        return _dense(graph, node.input[0], weights, len(left) - len(summed), len(summed))
    return _batched(graph, node.input, left, right, out, summed)


def _dense(graph: OnnxGraph, x: str, weights: np.ndarray, before: int, summed: int) -> list[Any]:
    """A product with weights [summed ..., outputs ...], the dims ``before`` of ``x`` kept as they are."""
    nodes: list[Any] = []
    if summed > 1:
        nodes.append(graph.node("Reshape", [x, graph.constant(np.array([0] * before + [-1]))]))
    matrix = weights.reshape(int(np.prod(weights.shape[:summed])), -1)
    x = nodes[-1].output[0] if nodes else x
    nodes.append(graph.node("MatMul", [x, graph.constant(matrix)]))
    if weights.ndim != summed + 1:
        shape = np.array([0] * before + list(weights.shape[summed:]), np.int64)
        nodes.append(graph.node("Reshape", [nodes[-1].output[0], graph.constant(shape)]))
    return nodes


def _batched(
    graph: OnnxGraph, names: Sequence[str], left: str, right: str, out: str, summed: str
) -> list[Any] | None:
    """A product of two values over one dim, with common dims; the largest free dim of each is the matrix's, others are broadcast, and those of one entry left out."""
    sides = [(left, right, names[0]), (right, left, names[1])]
    free = [[letter for letter in out if letter in a and letter not in b] for a, b, _ in sides]
    repeated = any(len(set(dims)) < len(dims) for dims in (left, right))
    if len(summed) != 1 or repeated or not all(free) or set(out) != set(left + right) - {summed}:
        return None
    sizes = [graph.sizes(name, dims) for dims, _, name in sides]
    rows, columns = (
        max(letters, key=known.__getitem__) for letters, known in zip(free, sizes, strict=True)
    )
    single = {
        letter
        for letters, known in zip(free, sizes, strict=True)
        for letter in letters
        if known[letter] == 1 and letter not in (rows, columns)
    }
    batch = [c for c in out if c not in (rows, columns) and c not in single]
    nodes: list[Any] = []

    def add(kind: str, inputs: Sequence[str], axes: Sequence[int] = (), **more: Any) -> str:
        inputs = [*inputs, graph.constant(np.array(axes))] if axes else inputs
        nodes.append(graph.node(kind, inputs, **more))
        return nodes[-1].output[0]

    def turned(x: str, dims: Sequence[str], order: Sequence[str]) -> str:
        perm = [dims.index(letter) for letter in order]
        return x if perm == sorted(perm) else add("Transpose", [x], perm=perm)

    def operand(name: str, dims: str, matrix: str) -> str:
        gone = [index for index, letter in enumerate(dims) if letter in single]
        x = add("Squeeze", [name], gone) if gone else name
        kept = [letter for letter in dims if letter not in single]
        x = turned(x, kept, [letter for letter in (*batch, *matrix) if letter in kept])
        missing = [index for index, letter in enumerate(batch) if letter not in dims]
        return add("Unsqueeze", [x], missing) if missing else x

    inputs = [operand(names[0], left, rows + summed), operand(names[1], right, summed + columns)]
    result = add("MatMul", inputs)
    kept = [letter for letter in out if letter not in single]
    result = turned(result, [*batch, rows, columns], kept)
    back = [index for index, letter in enumerate(out) if letter in single]
    if back:
        add("Unsqueeze", [result], back)
    return nodes


def _norms_into_convolutions(graph: OnnxGraph) -> None:
    """Sums and products with a number for each channel that follow a convolution become its weights and bias."""
    for node in [node for node in graph.nodes if node.op_type == "Conv"]:
        weights = graph.value(node.input[1])
        computed_bias = len(node.input) > 2 and graph.value(node.input[2]) is None
        if weights is None or computed_bias or len(graph.readers[node.input[1]]) > 1:
            continue
        bias = graph.value(node.input[2]) if len(node.input) > 2 else np.zeros(len(weights))
        factor, shift = np.ones(len(weights)), np.asarray(bias, np.float64)
        while (then := graph.reader(node.output[0])) is not None:
            change = _by_channel(graph, then, node.output[0], weights)
            if change is None:
                break
            factor, shift = factor * change[0], shift * change[0] + change[1]
            graph.nodes = [other for other in graph.nodes if other is not then]
            node.output[0] = then.output[0]
            graph.index()
        across = factor.reshape(-1, *[1] * (weights.ndim - 1))
        constants = (weights * across, shift)
        del node.input[1:]
        node.input.extend(graph.constant(array.astype(weights.dtype)) for array in constants)


def _by_channel(
    graph: OnnxGraph, node: Any, name: str, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Factor and summand of each channel by which a node changes a convolution's output; None where it does something else."""
    if node.op_type not in ("Add", "Sub", "Mul", "Div"):
        return None
    place = list(node.input).index(name)
    value = graph.value(node.input[1 - place])
    shape = (len(weights), *[1] * (weights.ndim - 2))
    if value is None or value.ndim > weights.ndim or (node.op_type == "Div" and place == 1):
        return None
    if value.size != 1 and value.shape not in (shape, (1, *shape)):
        return None
    each = np.broadcast_to(value.reshape(-1).astype(np.float64), len(weights))
    ones, zeros = np.ones(len(weights)), np.zeros(len(weights))
    return {
        "Add": (ones, each),
        "Sub": (ones, -each) if place == 0 else (-ones, each),
        "Mul": (each, zeros),
        "Div": (1 / each if node.op_type == "Div" else ones, zeros),
    }[node.op_type]


def _clips(graph: OnnxGraph) -> None:
    """The larger of 0 and a value as Relu, with the smaller of a number and that as Clip."""
    for node in [node for node in graph.nodes if node.op_type == "Max"]:
        x, least = _with_number(graph, node)
        if x is None or least is None:
            continue
        then = graph.reader(node.output[0])
        most = _with_number(graph, then)[1] if then is not None and then.op_type == "Min" else None
        if most is not None and least <= most:
            instead = graph.node("Clip", [x, graph.constant(least), graph.constant(most)])
        elif least == 0:
            instead, then = graph.node("Relu", [x]), node
        else:
            continue
        instead.output[0] = then.output[0]
        graph.nodes = [
            instead if other is then else other
            for other in graph.nodes
            if other is then or other is not node
        ]
        graph.index()


def _with_number(graph: OnnxGraph, node: Any) -> tuple[str | None, np.ndarray | None]:
    """The other input of a node that reads a single number, and the number."""
    for place in (0, 1):
        number = graph.value(node.input[place]) if len(node.input) == 2 else None
        if number is not None and number.ndim == 0 and number.dtype.kind == "f":
            return node.input[1 - place], number
    return None, None


def _without_expands(graph: OnnxGraph) -> None:
    """Values that were given a shape already are not expanded to it."""
    for node in [node for node in graph.nodes if node.op_type == "Expand"]:
        before = graph.producers.get(node.input[0])
        same = before is not None and before.op_type == "Reshape"
        if same and before.input[1] == node.input[1]:
            graph.drop(node, before.output[0])


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

    # By parts of the array itself: the converter pads none whose batch is free.
    for axis, counts in enumerate(params["padding"]):
        edges = [
            jax.numpy.full_like(jax.lax.slice_in_dim(array, 0, count, axis=axis), -np.inf)
            for count in counts
        ]
        parts = [part for part in (edges[0], array, edges[1]) if part.shape[axis]]
        array = jax.lax.concatenate(parts, axis) if any(counts) else array
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
