"""Which operations of a file compute in whole numbers: all of a convolutional network, and of a model with attention those that keep their numbers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

MIXED_ROWS = 8
"""Calls that say how large the numbers of a tensor usually are."""
MOST_NOISE = 0.04
"""Largest error of rounding to 8 bits, over the usual size of a tensor's numbers, of a product in whole numbers."""
Ranges = Mapping[str, Mapping[str, np.ndarray]]
"""Tensor to its smallest (``min``) and largest (``max``) number."""


class Product(NamedTuple):
    """A matrix product of a model."""

    scope: str
    """Its name in a recipe."""
    kind: Any
    dense: bool
    """Whether one side is weights."""
    tensors: tuple[str, ...]
    """What is computed among its inputs and outputs."""


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
    return any(not one.dense for one in products)


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
    for one in products:
        if max(_noise(name, ranges, sizes) for name in one.tensors) <= MOST_NOISE:
            continue
        scope = f"^{re.escape(one.scope)}$"
        if one.dense:
            manager.add_dynamic_config(scope, one.kind, 8)
        else:
            manager.add_quantization_config(scope, one.kind, algorithm_key="no_quantize")
    return manager


def _noise(name: str, ranges: Ranges, sizes: Mapping[str, float]) -> float:
    """What rounding a tensor to 8 bits adds, over the usual size of its numbers."""
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
        given = [graph.tensors[index] for index in operation.inputs if index >= 0]
        computed = [one for one in given if read.buffers[one.buffer].data is None]
        tensors = [*computed, graph.tensors[operation.outputs[0]]]
        yield Product(
            scope=flat.get_op_scope(operation, graph.tensors),
            kind=kind,
            dense=kind is not names.BATCH_MATMUL or len(computed) < 2,
            tensors=tuple(one.name.decode() for one in tensors),
        )


def usual_sizes(
    model: bytes, rows: Sequence[Mapping[str, np.ndarray]], products: Sequence[Product]
) -> dict[str, float]:
    """Root of the mean square of the tensors of products over some calls."""
    from ai_edge_litert.interpreter import Interpreter  # ty: ignore[import-not-found]

    interpreter = Interpreter(model_content=model, experimental_preserve_all_tensors=True)
    call: Any = interpreter.get_signature_runner()
    places = {one["name"]: one["index"] for one in interpreter.get_tensor_details()}
    squares: dict[str, list[float]] = {name: [] for one in products for name in one.tensors}
    known = call.get_input_details()
    for row in rows:
        call(**{name: row[name] for name in known})
        for name, found in squares.items():
            array = interpreter.get_tensor(places[name])
            found.append(float(np.mean(np.square(array, dtype=np.float64))))
    return {name: float(np.sqrt(np.mean(found))) for name, found in squares.items()}
