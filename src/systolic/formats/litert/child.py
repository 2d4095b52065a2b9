"""Converts, quantizes and runs, in a process of its own: ``python -m systolic.formats.litert.child FOLDER``.

The converter is a C++ library with its own messages on stderr, and can end the process that it is in.
"""

import json
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from systolic.core.errors import OptionError, SystolicError

MIXED_ROWS = 8
"""Calls that say how large the numbers of a tensor usually are."""

MOST_NOISE = 0.04
"""Largest error of rounding to 8 bits, over the usual size of a tensor's numbers, of a product in whole numbers."""

Ranges = Mapping[str, Mapping[str, np.ndarray]]
"""Tensor to its smallest (``min``) and largest (``max``) number."""
SIGNATURE = "serving_default"
"""Name of the one signature of a file."""
UNCONVERTED = r"= \"?((?:stablehlo|chlo|mhlo)\.\w+)"
"""Names of operations that the converter left as they were."""
LACKING = r"(?:TF Select|Custom) ops: (.+)"
"""Names of operations that no kernel computes."""
TOLD = 300
"""Most characters of a converter's message."""
PROGRAM, REQUEST, OUTCOME = "program.bin", "request.json", "outcome.json"
CALIBRATION, INPUTS, OUTPUTS = "calibration.npz", "inputs.npz", "outputs.npz"
MODEL, STAGE = "model.tflite", "stage.txt"


class Product(NamedTuple):
    """A matrix product of a model."""

    scope: str
    """Its name in a recipe."""
    kind: Any
    dense: bool
    """Whether one side is weights."""
    tensors: tuple[str, ...]
    """Computed tensors among its inputs and outputs."""


def static_plan(*, one_scale: bool) -> Any:
    """All operations in whole numbers.

    Args:
        one_scale: One scale for the matrix of a dense layer, in place of one for each output.
    """
    from ai_edge_quantizer import (  # ty: ignore[import-not-found]
        qtyping,
        recipe,
        recipe_manager,
    )

    manager = recipe_manager.RecipeManager()
    manager.load_quantization_recipe(recipe.static_wi8_ai8())
    if one_scale:
        manager.add_static_config(
            ".*",
            qtyping.TFLOperationName.FULLY_CONNECTED,
            activation_num_bits=8,
            weight_num_bits=8,
            weight_granularity=qtyping.QuantGranularity.TENSORWISE,
        )
    return manager


def attends(products: Sequence[Product]) -> bool:
    """Whether a model has products of two computed matrices, as attention has."""
    return any(not product.dense for product in products)


def mixed_plan(
    products: Sequence[Product],
    ranges: Ranges = MappingProxyType({}),
    sizes: Mapping[str, float] = MappingProxyType({}),
) -> Any:
    """Products in whole numbers, the rest in floating point: masked logits have numbers that no range of 8 bits holds, and norms
    square theirs.

    A product whose inputs or output lose too much has weights in whole numbers, and rounds each row's inputs as it runs.

    Args:
        products: Those of the model.
        ranges: Tensor to its extremes; {} before they are known.
        sizes: Tensor to the root of the mean of its numbers' squares.
    """
    from ai_edge_quantizer import qtyping, recipe_manager  # ty: ignore[import-not-found]

    names = qtyping.TFLOperationName
    manager = recipe_manager.RecipeManager()
    for kind in (names.FULLY_CONNECTED, names.BATCH_MATMUL, names.CONV_2D):
        manager.add_static_config(".*", kind, activation_num_bits=8, weight_num_bits=8)
    manager.add_dynamic_config(".*", names.EMBEDDING_LOOKUP, 8)
    for product in products:
        if max(_noise(name, ranges, sizes) for name in product.tensors) <= MOST_NOISE:
            continue
        scope = f"^{re.escape(product.scope)}$"
        if product.dense:
            manager.add_dynamic_config(scope, product.kind, 8)
        else:
            manager.add_quantization_config(scope, product.kind, algorithm_key="no_quantize")
    return manager


def _noise(name: str, ranges: Ranges, sizes: Mapping[str, float]) -> float:
    """Rounding error of a tensor in 8 bits, over the usual size of its numbers."""
    if name not in ranges or name not in sizes:
        return 0.0
    low = min(float(np.min(ranges[name]["min"])), 0.0)
    high = max(float(np.max(ranges[name]["max"])), 0.0)
    return (high - low) / 255 / np.sqrt(12) / max(sizes[name], 1e-30)


def products_of(model: bytes) -> Iterator[Product]:
    """The matrix products and convolutions of a file."""
    from ai_edge_quantizer import qtyping  # ty: ignore[import-not-found]
    from ai_edge_quantizer.utils import (  # ty: ignore[import-not-found]
        tfl_flatbuffer_utils as flat,
    )

    names = qtyping.TFLOperationName
    read = flat.read_model(model)
    graph = read.subgraphs[0]
    for operation in graph.operators:
        code = read.operatorCodes[operation.opcodeIndex].builtinCode
        kind = flat.TFL_OP_CODE_TO_NAME.get(code)
        if kind not in (names.FULLY_CONNECTED, names.BATCH_MATMUL, names.CONV_2D):
            continue
        operands = [graph.tensors[index] for index in operation.inputs if index >= 0]
        computed = [operand for operand in operands if read.buffers[operand.buffer].data is None]
        tensors = [*computed, graph.tensors[operation.outputs[0]]]
        yield Product(
            scope=flat.get_op_scope(operation, graph.tensors),
            kind=kind,
            dense=kind is not names.BATCH_MATMUL or len(computed) < 2,
            tensors=tuple(tensor.name.decode() for tensor in tensors),
        )


def usual_sizes(
    model: bytes, rows: Sequence[Mapping[str, np.ndarray]], products: Sequence[Product]
) -> dict[str, float]:
    """Root of the mean square of the tensors of products over some calls."""
    from ai_edge_litert.interpreter import Interpreter  # ty: ignore[import-not-found]

    interpreter = Interpreter(model_content=model, experimental_preserve_all_tensors=True)
    call: Any = interpreter.get_signature_runner()
    places = {detail["name"]: detail["index"] for detail in interpreter.get_tensor_details()}
    squares: dict[str, list[float]] = {name: [] for product in products for name in product.tensors}
    known = call.get_input_details()
    for row in rows:
        call(**{name: row[name] for name in known})
        for name, means in squares.items():
            array = interpreter.get_tensor(places[name])
            means.append(float(np.mean(np.square(array, dtype=np.float64))))
    return {name: float(np.sqrt(np.mean(means))) for name, means in squares.items()}


class LiteProgram:
    """A .tflite file's first signature over rows of inputs: numbers are quantized on the way in and out.

    Attributes:
        tensors: Input to the name of its tensor.
    """

    def __init__(self, content: bytes, threads: int = 1) -> None:
        from ai_edge_litert.interpreter import Interpreter  # ty: ignore[import-not-found]

        self._interpreter = Interpreter(model_content=content, num_threads=threads)
        self._call: Any = self._interpreter.get_signature_runner()
        self._inputs = self._call.get_input_details()
        self._outputs = self._call.get_output_details()
        self.tensors = {name: input_["name"] for name, input_ in self._inputs.items()}

    def call(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs of one call; inputs that the file does not have are left out."""
        stored = {name: _stored(inputs[name], input_) for name, input_ in self._inputs.items()}
        outputs = self._call(**stored)
        return {name: _plain(outputs[name], output) for name, output in self._outputs.items()}

    def rows(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs for rows of inputs, [rows, ...] each, as many in a call as the file takes."""
        first = next(iter(self._inputs))
        batch, count = int(self._inputs[first]["shape"][0]), len(inputs[first])
        parts = []
        for start in range(0, count, batch):
            part = {
                name: _filled(inputs[name][start : start + batch], batch) for name in self._inputs
            }
            parts.append(self.call(part))
        return {
            name: np.concatenate([part[name] for part in parts])[:count] for name in self._outputs
        }


def _filled(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows with the last one repeated up to ``count``."""
    missing = count - len(rows)
    return rows if not missing else np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])


def _stored(array: np.ndarray, detail: Mapping[str, Any]) -> np.ndarray:
    """Numbers as a tensor holds them."""
    scale, zero = detail["quantization"]
    dtype: np.dtype[Any] = np.dtype(detail["dtype"])
    if not scale:
        return np.ascontiguousarray(array, dtype)
    limits = np.iinfo(dtype.name)
    rounded = np.round(np.asarray(array, np.float32) / scale) + zero
    return np.clip(rounded, limits.min, limits.max).astype(dtype)


def _plain(array: np.ndarray, detail: Mapping[str, Any]) -> np.ndarray:
    """A tensor's numbers."""
    scale, zero = detail["quantization"]
    return (array.astype(np.float32) - zero) * np.float32(scale) if scale else array


def flatbuffer(program: bytes, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """A .tflite file's content.

    Args:
        program: A portable StableHLO artifact (``Exported.mlir_module_serialized``) of static shapes, weights inside.
        inputs: Names of its arguments.
        outputs: Names of its results.

    Raises:
        OptionError: it has an operation that LiteRT lacks.
    """
    from litert_converter.mlir import ir, passmanager  # ty: ignore[import-not-found]
    from litert_converter.mlir._mlir_libs import (  # ty: ignore[import-not-found]
        converter_api_ext as converter,
    )
    from litert_converter.mlir.dialects import stablehlo  # ty: ignore[import-not-found]

    context = ir.Context()
    converter.prepare_mlir_context(context)
    context.allow_unregistered_dialects = True
    left: list[str] = []
    try:
        with context:
            text = stablehlo.deserialize_portable_artifact_str(program)
            module = ir.Module.parse(text)
            converter.set_signature(
                module.operation,
                signature_name=SIGNATURE,
                input_names=list(inputs),
                output_names=list(outputs),
            )
            merged = converter.merge_modules([module])
            settings = converter.ConvertToTFLConfig()
            settings.model_origin_framework = "JAX"
            settings.unsafe_fuse_dynamic_shaped_broadcast = True
            converter.run_convert_to_tfl_passes(merged, passmanager.PassManager(), settings)
            left = sorted(set(re.findall(UNCONVERTED, str(merged.operation))))
            return bytes(converter.export_flatbuffer_to_bytes(merged.operation))
    except Exception as error:  # the converter's classes of errors are not public
        reason = f"it has no form of {', '.join(left)}" if left else short(error)
        raise OptionError(
            f"LiteRT's converter refuses the model: {reason}; export it to onnx or stablehlo"
        ) from error


def dynamic_range(model: bytes) -> bytes:
    """Weights as int8, one scale a channel; activations stay float32 and are rounded while it runs.

    Raises:
        OptionError: it refuses the model.
    """
    from ai_edge_quantizer import quantizer, recipe  # ty: ignore[import-not-found]

    try:
        result = quantizer.Quantizer(bytearray(model), recipe.dynamic_wi8_afp32()).quantize(
            enable_progress_report=False
        )
    except Exception as error:
        raise OptionError(
            f"the quantizer refuses the model: {short(error)}; export with --precision float"
        ) from error
    return bytes(result.quantized_model)


def full_integer(
    model: bytes,
    rows: Iterable[Mapping[str, np.ndarray]],
    ranges: Mapping[str, tuple[float, float]],
    *,
    one_scale: bool = False,
) -> bytes:
    """Weights and activations as int8: all of them with inputs and outputs, or the matrix products of a model with attention.

    Args:
        model: A float file.
        rows: Representative inputs by name, one call each.
        ranges: Smallest and largest number of inputs whose range is known, whatever the rows have.
        one_scale: One scale for the matrix of a dense layer, in place of one for each output.

    Raises:
        OptionError: it refuses the model.
    """
    from ai_edge_quantizer import calibrator, quantizer  # ty: ignore[import-not-found]
    from ai_edge_quantizer.utils import qsv_utils  # ty: ignore[import-not-found]

    rows = list(rows)
    try:
        products = list(products_of(model))
        mixed = attends(products)
        plan = mixed_plan(products) if mixed else static_plan(one_scale=one_scale)
        # The extremes of all rows: a moving average, the default, forgets the first ones.
        seen = calibrator.Calibrator(
            bytes(model),
            num_threads=1,
            mode=calibrator.CalibrationMode.CALIBRATION_PROFILER_BASED,
            qsv_update_func=qsv_utils.min_max_update,
        )
        seen.calibrate({SIGNATURE: rows}, plan)
        ranges_seen = seen.get_model_qsvs()
        for name, tensor in LiteProgram(model).tensors.items():
            if name in ranges and tensor in ranges_seen:
                low, high = ranges[name]
                for key, value in (("min", low), ("max", high)):
                    ranges_seen[tensor][key] = np.full_like(ranges_seen[tensor][key], value)
        if mixed:
            plan = mixed_plan(
                products, ranges_seen, usual_sizes(model, rows[:MIXED_ROWS], products)
            )
        result = quantizer.Quantizer(bytearray(model), plan.get_quantization_recipe()).quantize(
            ranges_seen, enable_progress_report=False
        )
    except Exception as error:
        raise OptionError(
            f"the quantizer refuses the model: {short(error)}; export with --precision dynamic"
        ) from error
    return bytes(result.quantized_model)


def short(error: Exception) -> str:
    """A converter's message on one line."""
    if "deserialize" in str(error):
        return "an operation is a call of a library, such as those of linear algebra"
    if lacking := re.findall(LACKING, str(error)):
        return f"its runtime has no operation {' and '.join(lacking)} for numbers of this type"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line.partition("error:")[2].strip() for line in lines if "error:" in line]
    return f"{type(error).__name__}: {(errors or lines or [''])[0]}"[:TOLD]


def main() -> int:
    """Does what a folder's request asks for; a mistake is told in its outcome."""
    folder = Path(sys.argv[1])
    try:
        outcome = _work(folder, json.loads((folder / REQUEST).read_bytes()))
    except SystolicError as error:
        outcome = {"error": type(error).__name__, "told": str(error)}
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(str(error).split())[:300]
        outcome = {
            "error": "RunError",
            "told": f"the export to LiteRT failed: {type(error).__name__}: {reason}",
        }
    (folder / OUTCOME).write_text(json.dumps(outcome))
    return 0


def _work(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    # A process that dies says nothing more: its parent reads how far it came.
    stage = folder / STAGE
    stage.write_text("converting")
    content = flatbuffer((folder / PROGRAM).read_bytes(), request["inputs"], request["outputs"])
    sizes = {"float_bytes": len(content)}
    stage.write_text("quantizing")
    if request["quantization"] == "dynamic":
        content = dynamic_range(content)
    elif request["quantization"] == "int8":
        rows = _calls(folder, request["batch"])
        content = full_integer(content, rows, request["ranges"], one_scale=request["one_scale"])
    (folder / MODEL).write_bytes(content)
    stage.write_text("running the file")
    with np.load(folder / INPUTS) as inputs:
        outputs_by_name = LiteProgram(content, request["threads"]).rows(dict(inputs))
    outputs: dict[str, Any] = dict(outputs_by_name)
    np.savez(folder / OUTPUTS, **outputs)
    return sizes


def _calls(folder: Path, batch: int) -> Iterator[dict[str, np.ndarray]]:
    """Whole calls of the representative rows."""
    with np.load(folder / CALIBRATION) as arrays:
        rows = dict(arrays)
    count = min(map(len, rows.values()))
    for start in range(0, count - batch + 1, batch):
        yield {name: row[start : start + batch] for name, row in rows.items()}


if __name__ == "__main__":
    raise SystemExit(main())
