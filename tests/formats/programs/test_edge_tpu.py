"""What the Edge TPU takes: each published rule on an operation that breaks it, and on one that keeps it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from systolic.formats.litert.edge_tpu import COMPILED, FIXES, RULES, edge_tpu_report, obstacle
from systolic.formats.litert.graph import OPERATORS, LiteGraph, LiteOp, LiteTensor

IMAGE = (1, 8, 8, 16)


def tensor(*shape: int, dtype: str = "INT8", values: Any = None, **more: Any) -> LiteTensor:
    if values is not None:
        values = np.asarray(values)
        shape, more = values.shape, {**more, "bytes": values.nbytes}
    return LiteTensor(name="t", shape=shape, dtype=dtype, values=values, **more)


def axes(*values: int) -> LiteTensor:
    return tensor(dtype="INT32", values=np.array(values, np.int32))


def constant(*shape: int, dtype: str = "INT8") -> LiteTensor:
    return LiteTensor(name="w", shape=shape, dtype=dtype, bytes=int(np.prod(shape)))


def op(kind: str, *inputs: LiteTensor, out: LiteTensor | None = None, **more: Any) -> LiteOp:
    return LiteOp(
        kind=kind, inputs=inputs or (tensor(*IMAGE),), outputs=(out or tensor(*IMAGE),), **more
    )


def graph(*ops: LiteOp, **more: Any) -> LiteGraph:
    inputs = more.pop("inputs", ops[0].inputs[:1])
    return LiteGraph(ops=ops, inputs=inputs, outputs=ops[-1].outputs, constant_bytes=100, **more)


X = tensor(*IMAGE)
BIAS = constant(16, dtype="INT32")
TAKEN = {
    "conv": op("CONV_2D", X, constant(16, 3, 3, 16), BIAS),
    "same dilation": op("CONV_2D", X, options={"dilation_w_factor": 2, "dilation_h_factor": 2}),
    "dense": op("FULLY_CONNECTED", tensor(1, 64), constant(10, 64), out=tensor(1, 10)),
    "softmax": op("SOFTMAX", tensor(1, 16_000), out=tensor(1, 16_000)),
    "mean of rows and columns": op("MEAN", X, axes(1, 2), out=tensor(1, 16)),
    "mean of 16 channels": op("MEAN", X, axes(-1), out=tensor(1, 8, 8)),
    "padded rows": op("PAD", X, axes(0, 0, 1, 1, 1, 1, 0, 0)),
    "zeros beside it": op("CONCATENATION", X, tensor(values=np.zeros((1, 8, 8, 4), np.int8))),
    "bytes to int8": op("QUANTIZE", tensor(*IMAGE, dtype="UINT8")),
    "strides of 1": op("STRIDED_SLICE", X, axes(0, 0), axes(1, 4), axes(1, 1)),
    "split channels": op("SPLIT", axes(3), X),
    "slopes by channel": op("PRELU", X, constant(1, 1, 16)),
}
LEFT = {
    "TOPK_V2": (op("TOPK_V2", X), "not among the supported", "where the answer is read"),
    "a custom operation": (op("Mine", X, custom=True), "custom", "replace"),
    "float numbers": (op("ADD", tensor(*IMAGE, dtype="FLOAT32")), "float32", "--precision int8"),
    "int16 activations": (op("ADD", tensor(*IMAGE, dtype="INT16")), "int16", "--precision int8"),
    "float weights": (
        op("CONV_2D", X, constant(16, 3, 3, 16, dtype="FLOAT32")),
        "float32",
        "--precision int8",
    ),
    "float to int8": (op("QUANTIZE", tensor(*IMAGE, dtype="FLOAT32")), "float32", "int8"),
    "a batch of two": (op("RELU", tensor(2, 8, 8, 16)), "3 innermost dims", "--batch 1"),
    "dilations": (
        op("CONV_2D", X, options={"dilation_w_factor": 2, "dilation_h_factor": 1}),
        "1 and 2",
        "same dilation",
    ),
    "a fused activation": (op("MAX_POOL_2D", X, activation="RELU6"), "RELU6", "between"),
    "rows of a dense layer": (
        op("FULLY_CONNECTED", tensor(1, 7, 64), constant(10, 64), out=tensor(1, 7, 10)),
        "one row",
        "1 x 1",
    ),
    "computed weights": (
        op("FULLY_CONNECTED", tensor(1, 64), tensor(10, 64), out=tensor(1, 10)),
        "computed",
        "constants",
    ),
    "a scale for each output": (
        op(
            "FULLY_CONNECTED",
            tensor(1, 64),
            replace(constant(10, 64), scales=10),
            out=tensor(1, 10),
        ),
        "10 scales",
        "--edge-tpu",
    ),
    "a long softmax": (op("SOFTMAX", tensor(1, 16_001)), "16001", "leave the softmax out"),
    "rows of a softmax": (op("SOFTMAX", tensor(1, 4, 8)), "one row", "leave the softmax out"),
    "a mean of 3 channels": (op("MEAN", tensor(1, 8, 8, 3), axes(3)), "multiple of 4", "channels"),
    "a sum of the batch": (op("SUM", X, axes(0)), "batch", "inner"),
    "a padded batch": (op("PAD", X, axes(1, 0, 0, 0, 0, 0, 0, 0)), "batch", "inner"),
    "ones beside it": (
        op("CONCATENATION", X, tensor(values=np.ones((1, 8, 8, 4), np.int8))),
        "all zeros",
        "pad with zeros",
    ),
    "strides of 2": (
        op("STRIDED_SLICE", X, axes(0, 0), axes(1, 4), axes(1, 2)),
        "[1, 2]",
        "convolution",
    ),
    "a split batch": (op("SPLIT", axes(0), X), "splits the batch", "inner"),
    "a packed batch": (
        op("PACK", X, X, options={"axis": 0}, out=tensor(1, 1, 8, 8)),
        "packs",
        "inner",
    ),
    "slopes by place": (op("PRELU", X, constant(8, 8, 16)), "slopes", "share"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_an_operation_within_the_rules_is_taken(name: str) -> None:
    assert obstacle(TAKEN[name]) is None


@pytest.mark.parametrize("name", LEFT)
def test_an_operation_outside_the_rules_is_left_with_the_change_that_mends_it(name: str) -> None:
    broken, reason, fix = LEFT[name]
    found = obstacle(broken)
    assert found is not None
    assert reason in found.reason
    assert fix in found.fix


ROW = tensor(1, 64)
MENDED = {
    "float numbers": [op("ADD")],
    "int16 activations": [op("ADD")],
    "float weights": [op("CONV_2D", X, constant(16, 3, 3, 16), BIAS)],
    "float to int8": [op("QUANTIZE", X)],
    "a batch of two": [op("RELU")],
    "dilations": [op("CONV_2D", X, options={"dilation_w_factor": 2, "dilation_h_factor": 2})],
    "a fused activation": [op("MAX_POOL_2D"), op("RELU6")],
    "rows of a dense layer": [op("CONV_2D", tensor(1, 1, 7, 64), constant(10, 1, 1, 64))],
    "computed weights": [op("FULLY_CONNECTED", ROW, constant(10, 64), out=tensor(1, 10))],
    "a scale for each output": [
        op("FULLY_CONNECTED", ROW, replace(constant(10, 64), scales=1), out=tensor(1, 10))
    ],
    "a mean of 3 channels": [op("MEAN", tensor(1, 8, 8, 4), axes(3), out=tensor(1, 8, 8))],
    "a sum of the batch": [op("SUM", X, axes(1), out=tensor(1, 8, 16))],
    "a padded batch": [op("PAD", X, axes(0, 0, 1, 1, 0, 0, 0, 0))],
    "ones beside it": [op("PAD", X, axes(0, 0, 0, 0, 0, 0, 0, 4))],
    "strides of 2": [op("MAX_POOL_2D")],
    "a split batch": [op("SPLIT", axes(3), X)],
    "a packed batch": [op("PACK", ROW, ROW, options={"axis": 1}, out=tensor(1, 2, 64))],
    "slopes by place": [op("PRELU", X, constant(1, 1, 16))],
    "CAST": [op("QUANTIZE")],
    "DIV": [op("MUL")],
    "ELU": [op("RELU")],
    "GELU": [op("RELU")],
    "HARD_SWISH": [op("RELU6")],
    "LEAKY_RELU": [op("RELU"), op("PRELU", X, constant(1, 1, 16))],
    "PADV2": [op("PAD", X, axes(0, 0, 1, 1, 0, 0, 0, 0))],
    "POW": [op("MUL", X, X)],
    "SQRT": [op("RSQRT"), op("MUL", X, X)],
}
"""Case of :data:`LEFT`, or operation, to the operations after its fix."""
REMOVED = {
    *("TOPK_V2", "a custom operation", "a long softmax", "rows of a softmax"),
    *("BATCH_MATMUL", "DEQUANTIZE", "GATHER", "EMBEDDING_LOOKUP", "WHILE"),
}
"""Those whose fix takes the operation out of the model."""


def test_every_fix_mends() -> None:
    assert {*LEFT, *FIXES} == {*MENDED, *REMOVED}
    for name, ops in MENDED.items():
        assert [obstacle(one) for one in ops] == [None] * len(ops), name


def test_what_comes_after_an_unsupported_operation_stays_on_the_cpu() -> None:
    report = edge_tpu_report(graph(op("RELU"), op("GELU"), op("ADD"), op("MUL")))
    assert [one.on_edge_tpu for one in report.placements] == [True, False, False, False]
    assert report.taken == 1
    assert "relu" in report.placements[1].fix
    assert "after GELU (operation 1)" in report.placements[2].reason
    lines = report.lines("m.tflite")
    assert "1 of 4 operations" in lines[0]
    assert any("GELU (operation 1)" in line for line in lines)
    assert any(
        "ADD (operation 2)" in line and "enable_multiple_subgraphs" in line for line in lines
    )
    assert "edgetpu_compiler --show_operations m.tflite" in lines[-1]
    assert "--show_operations 'my m.tflite'  (" in report.lines("my m.tflite")[-1]
    assert report.to_json()["placements"][1]["place"] == "cpu"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (graph(op("RELU", tensor(*IMAGE, dynamic=True))), "--batch 1"),
        (graph(op("RELU", tensor(4, 8, 8, 16))), "a batch of 4"),
        (graph(op("RELU"), graphs=3), "3 graphs"),
        (graph(op("CONV_2D", version=6)), "CONV_2D is of version 6, and compiler 16 reads"),
    ],
)
def test_a_model_that_is_refused_as_a_whole_runs_on_the_cpu(found: LiteGraph, why: str) -> None:
    report = edge_tpu_report(found)
    assert report.taken == 0
    assert any(why in one for one in report.obstacles)


def test_a_compiled_file_is_known() -> None:
    report = edge_tpu_report(graph(op(COMPILED, custom=True)))
    assert report.compiled
    assert "was compiled before" in report.lines("m.tflite")[0]


def test_every_supported_operation_is_one_of_the_format() -> None:
    assert set(RULES) <= set(OPERATORS)
