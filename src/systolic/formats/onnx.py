"""Exports of ``onnx``: one .onnx file of one function with free dims, run by ONNX Runtime beside its source.

The converter runs in a process with packages of its own: ``python -m systolic.formats.onnx FOLDER``.
"""

import hashlib
import itertools
import json
import logging
import math
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
"""Operator set of ONNX 1.16 (2024): newer operations are not needed, and older runtimes read it.

ONNX Runtime 1.19 to 1.24 were seen to lose digits in LayerNormalization where a row's mean is 100 times its deviation or more;
1.32 does not.
"""
MOST_TAPS = 64
"""Largest window that is pooled by slices."""

Tree = str | float | tuple[Any, ...] | list[Any]
"""Form of a value: a name, the same value wherever it is repeated, a number, an operation and its operands, or a choice of these."""
NUMBERS = ("axes", "epsilon", "least", "most")
"""Names of a form that stand for constants."""

_LESS_MEAN: Tree = ("Sub", "x", ("ReduceMean", "x", "axes"))
_VARIANCE = ("ReduceMean", [("Pow", _LESS_MEAN, 2.0), ("Mul", _LESS_MEAN, _LESS_MEAN)], "axes")
_DEVIATION: Tree = ("Sqrt", ("Add", _VARIANCE, "epsilon"))
_INVERSE: Tree = [("Reciprocal", _DEVIATION), ("Div", 1.0, _DEVIATION)]
LAYER_NORM: Tree = [("Div", _LESS_MEAN, _DEVIATION), ("Mul", _LESS_MEAN, _INVERSE)]
_EXP: Tree = ("Exp", ("Sub", "x", ("ReduceMax", "x", "axes")))
SOFTMAX: Tree = ("Div", _EXP, ("ReduceSum", _EXP, "axes"))
_ERF: Tree = [
    ("Add", 1.0, ("Erf", [("Mul", "x", 0.5**0.5), ("Div", "x", 2**0.5)])),
    ("Sub", 1.0, ("Erf", ("Mul", ("Neg", "x"), 0.5**0.5))),
]
_CUBE: Tree = [("Pow", "x", 3.0), ("Mul", "x", ("Mul", "x", "x"))]
_TANH_OF = ("Mul", (2 / np.pi) ** 0.5, ("Add", "x", ("Mul", 0.044715, _CUBE)))
GELUS: Mapping[str, Tree] = {
    kind: [
        ("Mul", ("Mul", 0.5, "x"), cdf),
        ("Mul", "x", ("Mul", 0.5, cdf)),
        ("Mul", 0.5, ("Mul", "x", cdf)),
    ]
    for kind, cdf in {"none": _ERF, "tanh": ("Add", 1.0, ("Tanh", _TANH_OF))}.items()
}
"""GELU by the attribute ``approximate`` of ONNX's operation."""
RANKS = ("Squeeze", "Unsqueeze")
VIEWS = ("Reshape", "Transpose", *RANKS)
COMMUTATIVE = ("Add", "Mul", "Max", "Min")
BROADCASTING = (*COMMUTATIVE, "Sub", "Div", "Pow", "Where", "And", "Or", "Equal", "Less", "Greater")


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
    """The nodes of an ONNX graph while they are rewritten; :meth:`write` changes the message."""

    _names = itertools.count()  # of all graphs: a file is rewritten more than once

    def __init__(self, model: Any) -> None:
        self._onnx: Any = import_module("onnx")  # of the packages in the cache
        self._helper: Any = import_module("onnx.helper")
        self._arrays: Any = import_module("onnx.numpy_helper")
        self._written: dict[Any, str] = {}
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._outputs = {output.name for output in model.graph.output}
        self._model, self._graph = model, model.graph
        self._read()

    def _read(self) -> None:
        """Reads the message: nodes, what makes each value, and its sizes, words where they are free; those of one word are equal."""
        self.nodes: list[Any] = list(self._graph.node)
        self.producers = {output: node for node in self.nodes for output in node.output}
        inferred = self._onnx.shape_inference.infer_shapes(self._model, data_prop=True).graph
        self.dims: dict[str, list[int | str]]
        self.dims = {tensor.name: list(tensor.dims) for tensor in inferred.initializer}
        for value in (*inferred.value_info, *inferred.input, *inferred.output):
            if value.type.tensor_type.HasField("shape"):
                self.dims[value.name] = [
                    dim.dim_value
                    if dim.HasField("dim_value")
                    else dim.dim_param or f"free {next(self._names)}"
                    for dim in value.type.tensor_type.shape.dim
                ]

    def rewrite(self, rule: Callable[["OnnxGraph", Any], list[Any] | str | None]) -> None:
        """Replaces each node by those that a rule makes of it, of which the last has its output, or by a value that is the same."""
        same: dict[str, str] = {}
        fixed = self._outputs.union(*map(_inner_inputs, self.nodes))
        nodes: list[Any] = []
        for node in self.nodes:
            for place, name in enumerate(node.input):
                node.input[place] = same.get(name, name)
            instead = rule(self, node)
            if isinstance(instead, str) and node.output[0] not in fixed:
                same[node.output[0]] = instead
                continue
            if isinstance(instead, list):
                instead[-1].output[0] = node.output[0]
                self.producers.update({made.output[0]: made for made in instead})
            nodes += instead if isinstance(instead, list) else [node]
        self.nodes = nodes

    def match(self, name: str, tree: Tree, names: Mapping[str, str] = {}) -> dict[str, str] | None:
        """Names of the values that one is computed from in the form of a tree; None where it has another."""
        if isinstance(tree, list):
            matches = (self.match(name, part, names) for part in tree)
            return next((found for found in matches if found is not None), None)
        value = self.value(name)
        if tree in NUMBERS and value is None:
            return None
        if isinstance(tree, str):
            before = names.get(tree, name)
            known = self.value(before)
            same = value is not None and known is not None and np.array_equal(value, known)
            return {**names, tree: before} if same or before == name else None
        if isinstance(tree, (float, int)):
            number = value is not None and not value.ndim and value.dtype.kind == "f"
            return dict(names) if number and value == value.dtype.type(tree) else None
        node = self.producers.get(name)
        fits = node is not None and (node.op_type, len(node.input)) == (tree[0], len(tree) - 1)
        if not fits or not self.attribute(node, "keepdims", 1):
            return None
        for inputs in (node.input, node.input[::-1])[: 1 + (tree[0] in COMMUTATIVE)]:
            found: dict[str, str] | None = dict(names)
            for part, operand in zip(tree[1:], inputs, strict=True):
                found = None if found is None else self.match(operand, part, found)
            if found is not None:
                return found
        return None

    def root(self, name: str) -> str:
        """Name of a value as it was before dims of one entry were added or left out."""
        node = self.producers.get(name)
        return self.root(node.input[0]) if node and node.op_type in RANKS else name

    def attribute(self, node: Any, name: str, default: Any) -> Any:
        """An attribute of a node."""
        known = {each.name: each for each in node.attribute}
        return self._helper.get_attribute_value(known[name]) if name in known else default

    def value(self, name: str) -> np.ndarray | None:
        """A constant; None for what is computed."""
        tensor = self._constants.get(name)
        return None if tensor is None else self._arrays.to_array(tensor)

    def constant(self, array: Any) -> str:
        """Name of a constant of these entries."""
        array = np.asarray(array, order="C")
        key = (array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest())
        if (name := self._written.get(key)) is None:
            name = self._written[key] = f"constant_{next(self._names)}"
            self._constants[name] = self._arrays.from_array(array, name)
            self.dims[name] = list(array.shape)
        return name

    def node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> Any:
        """A new node of one output, in no list yet."""
        return self._helper.make_node(kind, inputs, [f"{kind}_{next(self._names)}"], **attributes)

    def write(self) -> None:
        """Puts what is still used into the message, and infers sizes again."""
        used, kept = set(self._outputs), []
        for node in reversed(self.nodes):
            if not used.isdisjoint(node.output):
                kept.append(node)
                used.update(node.input, _inner_inputs(node))
        del self._graph.node[:], self._graph.initializer[:], self._graph.value_info[:]
        self._graph.node.extend(reversed(kept))
        constants = self._constants.items()
        self._graph.initializer.extend(tensor for name, tensor in constants if name in used)
        domains = {node.domain for node in self._graph.node}
        for version in [each for each in self._model.opset_import if each.domain not in domains]:
            self._model.opset_import.remove(version)
        self._read()


def _inner_inputs(node: Any) -> set[str]:
    """Names that the graphs inside a node read, such as those of an If or a Loop."""
    graphs = [graph for each in node.attribute for graph in (each.g, *each.graphs)]
    inner = [each for graph in graphs for each in graph.node]
    outputs = {output.name for graph in graphs for output in graph.output}
    return outputs.union(*(each.input for each in inner), *map(_inner_inputs, inner))


def simplify(file: Path) -> None:
    """Rewrites a graph so that a runtime finds what it has kernels for: matmuls in place of einsums, convolutions that hold their norms, Clip, Relu, LayerNormalization, Softmax and Gelu.

    ONNX Runtime then takes 0.6 of the time for MobileNetV2 and 0.75 for MiniLM. Its own basic pass computes what depends on weights
    alone, moves transposes until convolutions follow each other, and gives convolutions the sums and products after them.
    """
    onnx: Any = import_module("onnx")  # of the packages in the cache
    # Einsums are matmuls before shapes are read; norms and softmax are found once shapes and expands are out of the way.
    for disabled, groups in (
        ([], [(_matmul, _constant_last, _before_transpose), (_same_order, _narrow)]),
        # A table that is read and multiplied with would be there twice, once transposed.
        (
            ["ConstantFolding"],
            [(_clip, _same_order, _narrow), (_own_reduction, _mean, _fused, _affine)],
        ),
    ):
        _optimize(file, disabled)
        model = onnx.load(file)
        graph = OnnxGraph(model)
        for rules in groups:
            for rule in rules:
                graph.rewrite(rule)
            graph.write()
        onnx.checker.check_model(model)
        onnx.save(model, file)


def _optimize(file: Path, disabled: Sequence[str]) -> None:
    """Rewrites a file by ONNX Runtime's basic pass."""
    onnxruntime: Any = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(file)
    onnxruntime.InferenceSession(
        file.read_bytes(), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
    )


def _matmul(graph: OnnxGraph, node: Any) -> list[Any] | None:
    """An einsum of two operands as nodes around one MatMul; None where it is none."""
    if node.op_type != "Einsum":
        return None
    operands, _, out = node.attribute[0].s.decode().replace(" ", "").partition("->")
    if len(node.input) != 2 or not out or "." in operands:
        return None
    left, right = operands.split(",")
    summed = "".join(letter for letter in left if letter in right and letter not in out)
    weights = graph.value(node.input[1])
    kept, free = left.removesuffix(summed), right.removeprefix(summed)
    dense = len(kept) < len(left) and len(free) < len(right) and out == kept + free
    if weights is not None and dense:
        return _dense(graph, node.input[0], weights, len(kept), len(summed))
    return _batched(graph, node.input, left, right, out, summed)


def _dense(graph: OnnxGraph, x: str, weights: np.ndarray, before: int, summed: int) -> list[Any]:
    """A product with weights [summed ..., outputs ...], the dims ``before`` of ``x`` kept as they are."""
    flat = graph.node("Reshape", [x, graph.constant(np.array([0] * before + [-1]))])
    matrix = graph.constant(weights.reshape(math.prod(weights.shape[:summed]), -1))
    product = graph.node("MatMul", [flat.output[0], matrix])
    shape = graph.constant(np.array([0] * before + list(weights.shape[summed:])))
    return [flat, product, graph.node("Reshape", [product.output[0], shape])]


def _batched(
    graph: OnnxGraph, names: Sequence[str], left: str, right: str, out: str, summed: str
) -> list[Any] | None:
    """A product of two values over one dim, with common dims; the largest free dim of each is the matrix's, others are broadcast."""
    sides = [(left, right, names[0]), (right, left, names[1])]
    free = [[letter for letter in out if letter in a and letter not in b] for a, b, _ in sides]
    repeated = any(len(set(dims)) < len(dims) for dims in (left, right))
    if len(summed) != 1 or repeated or not all(free) or set(out) != set(left + right) - {summed}:
        return None
    sizes = [dict(zip(dims, graph.dims.get(name) or dims, strict=True)) for dims, _, name in sides]
    rows, columns = (
        max(letters, key=lambda c, of=of: of[c] if isinstance(of[c], int) else math.inf)
        for letters, of in zip(free, sizes, strict=True)
    )
    batch = [c for c in out if c not in (rows, columns)]
    if left.index(rows) > left.index(summed) and right.index(columns) < right.index(summed):
        # Neither operand is turned when they change places.
        left, right, rows, columns, names = right, left, columns, rows, [names[1], names[0]]
    nodes: list[Any] = []

    def add(kind: str, inputs: Sequence[str], **more: Any) -> str:
        nodes.append(graph.node(kind, inputs, **more))
        return nodes[-1].output[0]

    operands = []
    pairs = (names[0], left, rows + summed), (names[1], right, summed + columns)
    for name, dims, matrix in pairs:
        perm = [dims.index(letter) for letter in (*batch, *matrix) if letter in dims]
        missing = np.array([index for index, c in enumerate(batch) if c not in dims], np.int64)
        ordered = add("Transpose", [name], perm=perm)
        operands.append(add("Unsqueeze", [ordered, graph.constant(missing)]))
    order = [*batch, rows, columns]
    add("Transpose", [add("MatMul", operands)], perm=[order.index(letter) for letter in out])
    return nodes


def _constant_last(graph: OnnxGraph, node: Any) -> list[Any] | None:
    """A sum or a difference with a constant as ONNX Runtime puts it into a convolution: a sum whose second operand is the constant."""
    if node.op_type == "Add" and graph.value(node.input[0]) is not None:
        return [graph.node("Add", node.input[::-1])]
    value = graph.value(node.input[1]) if node.op_type == "Sub" else None
    if value is None or value.dtype.kind != "f":
        return None
    return [graph.node("Add", [node.input[0], graph.constant(-value)])]


def _before_transpose(graph: OnnxGraph, node: Any) -> list[Any] | None:
    """Operations with constants before a transpose, where a convolution may hold them; after it those on an input of the graph, since a channel's entries lie together there."""
    if node.op_type == "Transpose":
        chain, x, perm = [], node.input[0], graph.attribute(node, "perm", [])
        while (by := graph.producers.get(x)) is not None and by.op_type in ("Add", "Mul"):
            chain.append((by.op_type, _turned(graph, by.input[1], perm)))
            x = by.input[0]
        if by is not None or not all(name for _, name in chain):
            return None
        nodes = [graph.node("Transpose", [x], perm=perm)]
        for kind, name in reversed(chain):
            nodes.append(graph.node(kind, [nodes[-1].output[0], name]))
        return nodes
    two = node.op_type in COMMUTATIVE and len(node.input) == 2
    for x, other in (node.input, node.input[::-1]) if two else ():
        by, value = graph.producers.get(x), graph.value(other)
        if by is not None and by.op_type == "Transpose" and value is not None:
            perm = graph.attribute(by, "perm", [])
            name = _turned(graph, other, np.argsort(perm).tolist())
            if name and (value.size > 1 or node.op_type in ("Max", "Min")):
                early = graph.node(node.op_type, [by.input[0], name])
                return [early, graph.node("Transpose", [early.output[0]], perm=perm)]
    return None


def _turned(graph: OnnxGraph, name: str, perm: Sequence[int]) -> str:
    """Name of a constant that goes with a transposed value; empty where there is none."""
    value = graph.value(name)
    if value is None or value.ndim > len(perm):
        return ""
    wide = value.reshape(*[1] * (len(perm) - value.ndim), *value.shape)
    return graph.constant(wide.transpose(perm))


def _clip(graph: OnnxGraph, node: Any) -> list[Any] | None:
    """The larger of 0 and a value as Relu, with the smaller of a number and that as Clip."""
    if found := graph.match(node.output[0], ("Max", "x", 0.0)):
        return [graph.node("Relu", [found["x"]])]
    larger = [("Max", "x", "least"), ("Relu", "x")]
    found = graph.match(node.output[0], ("Min", larger, "most")) or {}
    most = graph.value(found.get("most", ""))
    least = graph.value(found["least"]) if "least" in found else np.zeros((), np.float32)
    if most is None or least is None or least.ndim or most.ndim or not least <= most:
        return None
    return [graph.node("Clip", [found["x"], graph.constant(least), graph.constant(most)])]


def _same_order(graph: OnnxGraph, node: Any) -> list[Any] | str | None:
    """A change of shape that moves no entry as Squeeze and Unsqueeze of what it began with, any other Reshape with its shape written out, and nothing in place of a maximum with negative infinity."""
    if node.op_type == "Max" and (found := graph.match(node.output[0], ("Max", "x", -np.inf))):
        return found["x"]
    if node.op_type not in (*VIEWS, "Expand"):
        return None
    before, after = graph.dims.get(node.input[0]), graph.dims.get(node.output[0])
    if before is None or after is None:
        return None
    order = range(len(before))
    if node.op_type == "Transpose":
        order = graph.attribute(node, "perm", order[::-1])
    if before == after and sorted(order) == [*order]:
        return node.input[0]
    moved = [place for place in order if before[place] != 1]
    kept = [before[place] for place in moved] == [size for size in after if size != 1]
    if kept and moved == sorted(moved) and node.op_type != "Expand":
        return _viewed(graph, node.input[0], after)
    shape = [
        size if isinstance(size, int) else -(place >= len(before) or before[place] != size)
        for place, size in enumerate(after)
    ]
    if node.op_type != "Reshape" or shape.count(-1) > 1 or 0 in after:
        return None
    return [graph.node("Reshape", [node.input[0], graph.constant(np.array(shape))])]


def _viewed(graph: OnnxGraph, x: str, after: list[int | str]) -> list[Any] | str | None:
    """A value with dims of one entry elsewhere."""
    x = graph.root(x)
    before = graph.dims.get(x)
    if before is None or before == after:
        return None if before is None else x
    gone, new, place = [], [], 0
    for axis, size in enumerate(after):
        while size != 1 and before[place] == 1:
            gone.append(place)
            place += 1
        if size == 1 and before[place : place + 1] != [1]:
            new.append(axis)
        else:
            place += 1
    gone += range(place, len(before))
    nodes: list[Any] = []
    for kind, axes in (("Squeeze", gone), ("Unsqueeze", new)):
        if axes:
            nodes.append(graph.node(kind, [x, graph.constant(np.array(axes))]))
            x = nodes[-1].output[0]
    return nodes


def _narrow(graph: OnnxGraph, node: Any) -> list[Any] | None:
    """An operation on values that were expanded to the size of others reads them as they were before."""
    after = graph.dims.get(node.output[0])
    if node.op_type not in BROADCASTING or after is None:
        return None
    for place, name in enumerate(node.input):
        others = [graph.dims.get(other) for at, other in enumerate(node.input) if at != place]
        narrow = _before_expand(graph, name)
        sizes = [dims for dims in (*others, graph.dims.get(narrow)) if dims is not None]
        if len(sizes) == len(node.input) and all(
            any(dims[-axis:][:1] == [size] and len(dims) >= axis for dims in sizes)
            for axis, size in enumerate(after[::-1], 1)
        ):
            node.input[place] = narrow
    return [node]


def _before_expand(graph: OnnxGraph, name: str) -> str:
    """A value that has the same entries when it is broadcast; the value itself where none is known."""
    origin, node = name, graph.producers.get(name)
    value = graph.value(name)
    if value is not None and value.shape[:1] == (1,):
        wide = [place for place, size in enumerate(value.shape) if size != 1]
        return graph.constant(value.reshape(value.shape[wide[0] if wide else value.ndim :]))
    while (by := graph.producers.get(origin)) is not None and by.op_type in (*VIEWS, "Expand"):
        origin = by.input[0]
    value = graph.value(origin)
    if value is not None and value.size == 1:
        return graph.constant(value.reshape(()))
    if node is not None and node.op_type == "Expand":
        return node.input[0]
    if node is not None and node.op_type == "And":
        for one, other in (node.input, node.input[::-1]):
            value = graph.value(_before_expand(graph, one))
            if value is not None and value.all():
                return _before_expand(graph, other)
    return name


def _reduced(graph: OnnxGraph, name: str) -> tuple[Any, list[int]] | None:
    """The reduction that made a value, whatever dims of one entry it has, and its axes."""
    node = graph.producers.get(graph.root(name))
    reduces = node is not None and node.op_type.startswith("Reduce") and len(node.input) == 2
    axes = graph.value(node.input[1]) if reduces else None
    return None if axes is None or not axes.size else (node, axes.tolist())


def _own_reduction(graph: OnnxGraph, node: Any) -> list[Any] | None:
    """A value minus or over its own reduction over the last dim: the reduction keeps the dim, whatever changed the shape of its result in between."""
    reduction = _reduced(graph, node.input[1]) if node.op_type in ("Sub", "Div") else None
    x, dims = node.input[0], graph.dims.get(node.input[0])
    if not reduction or not dims or graph.dims.get(node.input[1]) != [*dims[:-1], 1]:
        return None
    before, axes = reduction
    wide = graph.dims.get(before.input[0]) or [""]
    same = graph.root(before.input[0]) == graph.root(x)
    if not same or axes != [len(wide) - 1] or wide[-1] != dims[-1]:
        return None
    last = graph.constant(np.array([len(dims) - 1]))
    kept = graph.node(before.op_type, [x, last], keepdims=1)
    return [kept, graph.node(node.op_type, [x, kept.output[0]])]


def _mean(graph: OnnxGraph, node: Any) -> list[Any] | None:
    """A sum of values or their squares over its number of entries as a mean."""
    reduction = _reduced(graph, node.input[0]) if node.op_type == "Div" else None
    count = graph.value(node.input[1]) if reduction else None
    if not reduction or count is None or count.ndim:
        return None
    before, axes = reduction
    x, after = before.input[0], graph.dims.get(node.output[0])
    dims = graph.dims.get(x) or []
    sizes = [dims[axis] for axis in axes if axis < len(dims)]
    sums = before.op_type in ("ReduceSum", "ReduceSumSquare")
    if not sums or not all(isinstance(size, int) for size in sizes) or count != math.prod(sizes):
        return None
    kept = [1 if axis in axes else size for axis, size in enumerate(dims)]
    if after not in (kept, [size for axis, size in enumerate(dims) if axis not in axes]):
        return None
    square = graph.node("Pow", [x, graph.constant(count.dtype.type(2))])
    nodes = [square] if before.op_type == "ReduceSumSquare" else []
    inputs = [nodes[0].output[0] if nodes else x, before.input[1]]
    return [*nodes, graph.node("ReduceMean", inputs, keepdims=int(after == kept))]


def _fused(graph: OnnxGraph, node: Any) -> list[Any] | None:
    """A layer norm without scale and bias, a softmax or a GELU as one operation."""
    out = node.output[0]
    dims = graph.dims.get(out) or [""]
    for kind, tree in GELUS.items():
        if (found := graph.match(out, tree)) and graph.dims.get(found["x"]) == dims:
            return [graph.node("Gelu", [found["x"]], approximate=kind)]
    for tree in (LAYER_NORM, SOFTMAX):
        found = graph.match(out, tree)
        axes = graph.value(found["axes"]) if found and graph.dims.get(found["x"]) == dims else None
        if not found or axes is None or axes.size != 1:
            continue
        if tree is SOFTMAX:
            return [graph.node("Softmax", [found["x"]], axis=axes.item())]
        epsilon = graph.value(found["epsilon"])
        last = axes.item() == len(dims) - 1 and isinstance(dims[-1], int)
        if last and epsilon is not None and epsilon.size == 1:
            inputs = [found["x"], graph.constant(np.ones(dims[-1], epsilon.dtype))]
            return [graph.node("LayerNormalization", inputs, axis=-1, epsilon=epsilon.item())]
    return None


def _affine(graph: OnnxGraph, node: Any) -> list[Any] | None:
    """A product or a sum of a layer norm and a number for each entry of the last dim as the norm's scale or bias."""
    norm = ("LayerNormalization", "x", "scale")
    found = graph.match(node.output[0], [("Mul", norm, "factor"), ("Add", norm, "factor")])
    if not found:
        return None
    scale, factor = graph.value(found["scale"]), graph.value(found["factor"])
    rank = len(graph.dims.get(found["x"]) or ())
    if scale is None or factor is None or factor.ndim > rank or factor.size != scale.size:
        return None
    if factor.shape[-1:] != scale.shape or (node.op_type == "Mul" and (scale != 1).any()):
        return None
    inputs = [found["x"], found["scale"], graph.constant(factor.reshape(-1))]
    if node.op_type == "Mul":
        del inputs[1]
    before = next(filter(None, map(graph.producers.get, node.input)))
    epsilon = graph.attribute(before, "epsilon", None)
    return [graph.node("LayerNormalization", inputs, axis=-1, epsilon=epsilon)]


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
    if name == "reduce_window_max" and math.prod(equation.params["window_dimensions"]) <= MOST_TAPS:
        return [_pooled(operands[0], equation.params)]
    return None


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
