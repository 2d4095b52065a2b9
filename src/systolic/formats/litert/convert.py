"""StableHLO as a LiteRT flatbuffer, and its quantization; these run in a process of their own."""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from systolic.core.errors import OptionError
from systolic.formats.litert.plan import (
    MIXED_ROWS,
    attends,
    mixed_plan,
    products_of,
    static_plan,
    usual_sizes,
)

SIGNATURE = "serving_default"
"""Name of the one signature of a file."""
UNCONVERTED = r"= \"?((?:stablehlo|chlo|mhlo)\.\w+)"
"""Names of operations that the converter left as they were."""
LACKING = r"(?:TF Select|Custom) ops: (.+)"
"""Names of operations that no kernel computes."""
TOLD = 300
"""Most characters of a converter's message."""


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
        told = f"it has no form of {', '.join(left)}" if left else short(error)
        raise OptionError(
            f"LiteRT's converter refuses the model: {told}; export it to onnx or stablehlo"
        ) from error


def dynamic_range(model: bytes) -> bytes:
    """Weights as int8, one scale a channel; activations stay float32 and are rounded while it runs.

    Raises:
        OptionError: it refuses the model.
    """
    from ai_edge_quantizer import quantizer, recipe  # ty: ignore[import-not-found]

    try:
        made = quantizer.Quantizer(bytearray(model), recipe.dynamic_wi8_afp32()).quantize(
            enable_progress_report=False
        )
    except Exception as error:
        raise OptionError(
            f"the quantizer refuses the model: {short(error)}; export with --precision float"
        ) from error
    return bytes(made.quantized_model)


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
        found = seen.get_model_qsvs()
        for name, tensor in _input_tensors(model).items():
            if name in ranges and tensor in found:
                low, high = ranges[name]
                for key, value in (("min", low), ("max", high)):
                    found[tensor][key] = np.full_like(found[tensor][key], value)
        if mixed:
            plan = mixed_plan(products, found, usual_sizes(model, rows[:MIXED_ROWS], products))
        made = quantizer.Quantizer(bytearray(model), plan.get_quantization_recipe()).quantize(
            found, enable_progress_report=False
        )
    except Exception as error:
        raise OptionError(
            f"the quantizer refuses the model: {short(error)}; export with --precision dynamic"
        ) from error
    return bytes(made.quantized_model)


def _input_tensors(model: bytes) -> dict[str, str]:
    """Input to the name of its tensor."""
    from systolic.formats.litert.run import LiteProgram

    return LiteProgram(model).tensors


def short(error: Exception) -> str:
    """A converter's message on one line."""
    if "deserialize" in str(error):
        return "an operation is a call of a library, such as those of linear algebra"
    if lacking := re.findall(LACKING, str(error)):
        return f"its runtime has no operation {' and '.join(lacking)} for numbers of this type"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.partition("error:")[2].strip() for line in lines if "error:" in line]
    return f"{type(error).__name__}: {(told or lines or [''])[0]}"[:TOLD]
