"""``systolic import`` of PyTorch, Keras and TensorFlow models: a Bundle that needs none of them, compared in a fresh process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from systolic.cli.main import main
from systolic.formats.program.export import relative_error
from systolic.formats.program.model import ExportedProgram
from systolic.formats.registry import framework_format
from systolic.models.program.config import made_by
from systolic.models.program.torch_function import torch_function
from tests.models.program import zoo
from tests.tiers import some

ZOO = Path(__file__).parents[1] / "models" / "program" / "zoo.py"
ROOT = Path(__file__).parents[2]
TENSORFLOW = os.environ.get("SYSTOLIC_TENSORFLOW_PYTHON")
"""Python of an environment with the extra ``tf``."""
PREDICT = """
import json, sys
import systolic
model = systolic.open(sys.argv[1])
print(json.dumps([model.predict(sys.argv[2]), [n for n in ("torch", "keras", "tensorflow") if n in sys.modules]]))
"""


def imported(source: str, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert main(["import", source, "--out", str(out), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def predicted(bundle: Path, tmp_path: Path, **inputs: np.ndarray) -> dict[str, Any]:
    """Outputs of a Bundle in a process that loads no framework."""
    np.savez(tmp_path / "inputs.npz", **inputs)  # ty: ignore[invalid-argument-type]
    args = [sys.executable, "-c", PREDICT, str(bundle), str(tmp_path / "inputs.npz")]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (answer,), loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded == []
    return answer


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("net.py:model", "function"),
        ("net.py", "function"),
        ("net.pt2", "torch-export"),
        ("net.keras", "keras"),
        ("net.gguf", None),
    ],
)
def test_kinds_by_name(source: str, kind: str | None) -> None:
    form = framework_format(source)
    assert (None if form is None else form.kind) == kind


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("gone.py:model", "gone.py is not a file"),
        (f"{ZOO}:cnn --dtype bf16", "dtype is bf16, but"),
        (f"{ZOO.parent} --signature other", "--signature is other, but"),
    ],
)
def test_a_mistake_is_one_line(source: str, told: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["import", *source.split(), "--out", str(tmp_path / "out")]) != 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("systolic: ")]
    assert len(lines) == 1
    assert told in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_module_becomes_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = imported(f"{ZOO}:cnn", tmp_path / "cnn", capsys)
    assert made["parity"]["passed"]
    assert made["parity"]["max_relative"] < 1e-5
    assert made["parity"]["framework"].startswith("torch ")
    assert made["parity"]["rows"] == 4
    assert made["parameters"] == 16 * 9 + 16 + 32 + 2560 + 10
    answer = predicted(tmp_path / "cnn", tmp_path, input=np.zeros((3, 1, 8, 8), np.float32))
    # The same input gives the same output, whichever example it is.
    assert np.shape(answer["output"]) == (3, 10)
    assert answer["output"][0] == answer["output"][2]


@pytest.mark.slow
def test_outputs_are_written_as_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle"
    imported(f"{ZOO}:encoder", bundle, capsys, "--no-parity")
    there = torch_function(made_by(zoo.encoder, "torch", "zoo.py"), "zoo.py")
    rng = np.random.default_rng(1)
    tokens, mask = rng.integers(0, 50, (5, 8)), np.zeros((5, 8), bool)
    mask[1, 6:] = mask[4, 3:] = True
    # A batch marks its padding as mask, so the model's input of that name has another one.
    given = {"tokens": tokens, "mask_input": mask}
    inputs, out = tmp_path / "inputs.npz", tmp_path / "new" / "outputs.npz"
    np.savez(inputs, **given)  # ty: ignore[invalid-argument-type]
    command = ["predict", str(bundle), str(inputs), "--out"]
    assert main([*command, str(out)]) == 0
    assert "logits float32[5, 8, 50]" in capsys.readouterr().out
    assert there.source is not None
    wanted = there.source({"tokens": tokens, "mask": mask})
    with np.load(out, allow_pickle=False) as found:
        assert sorted(found) == sorted(wanted)
        for name, one in wanted.items():
            assert found[name].dtype == one.dtype
            assert relative_error(found[name], one) < 1e-5
    # Nothing is left beside it, and a mistake leaves what was there.
    before = out.read_bytes()
    assert list(out.parent.iterdir()) == [out]
    np.savez(inputs, **{name: one[:0] for name, one in given.items()})
    assert main([*command, str(out)]) == 1
    assert "inputs.npz has no examples" in capsys.readouterr().err
    assert out.read_bytes() == before
    for line, told in (
        ([*command, "outputs.txt"], "name a file that ends in .npz"),
        ([*command[:3], str(inputs), "--out", str(out)], "2 files were given"),
    ):
        assert main(line) == 2
        assert told in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "bloom", "coupled", "sequential", "functional"])
def test_models_agree(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = imported(f"{ZOO}:{name}", tmp_path / name, capsys)
    assert made["parity"]["max_relative"] < 1e-5
    assert len(made["notes"]) == (name == "coupled")


@pytest.mark.slow
def test_a_file_goes_in_whole_batches_where_examples_depend_on_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = imported(f"{ZOO}:coupled_by_three", tmp_path / "bundle", capsys)
    assert "computed in batches of 3" in made["notes"][0]
    x = np.random.default_rng(0).normal(size=(36, 3)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    np.savez(tmp_path / "four.npz", x=x[:4])
    command, out = ["predict", str(tmp_path / "bundle")], tmp_path / "out.npz"
    # More than the 32 examples of a call, which 3 does not divide.
    assert main([*command, str(tmp_path / "x.npz"), "--out", str(out)]) == 0
    with np.load(out, allow_pickle=False) as found:
        wanted = x.reshape(12, 3, 3) - x.reshape(12, 3, 3).mean(1, keepdims=True)
        np.testing.assert_allclose(found["output"], wanted.reshape(36, 3), atol=1e-6)
    assert main([*command, str(tmp_path / "four.npz"), "--out", str(out)]) == 1
    assert "has 4 examples, and the model's outputs for one depend" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_tensor", "returns str, which is no tensor"),
        ("dynamic", "layer 1 (Turned) needs the values"),
        ("dies", "was ended by SIGSEGV"),
        ("nothing", "has no function nothing"),
    ],
)
def test_what_a_child_says(name: str, told: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["import", f"{ZOO}:{name}", "--out", str(tmp_path / "out")]) == (
        2 if name in ("dynamic", "nothing") else 1
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("systolic: ")]
    assert len(lines) == 1
    assert told in lines[0]
    assert not (tmp_path / "out").exists()


SAVED_PROGRAMS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, zoo
from torch.export import Dim, export, save
if sys.argv[3] == "keras":
    zoo.functional().save(sys.argv[2] + "/net.keras")
else:
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.head = zoo.cnn()[0].eval(), torch.nn.Linear(10, 3)
        def forward(self, image, power, *, mask=None):
            return self.head(self.net(image) ** power).masked_fill(mask, 0)
    net, (args, mask) = Scaled(), ((torch.randn(2, 1, 8, 8), 2), torch.eye(2, 3, dtype=torch.bool))
    save(export(net, args, {"mask": mask}), sys.argv[2] + "/fixed.pt2")
    some = Dim("b", max=64)
    sizes = {"image": {0: some}, "power": None, "mask": {0: some}}
    save(export(net, args, {"mask": mask}, dynamic_shapes=sizes), sys.argv[2] + "/net.pt2")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch"), [("net.keras", None), ("net.pt2", None), ("fixed.pt2", 2)]
)
def test_saved_files(
    name: str, batch: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    suffix = name.partition(".")[2]
    args = [sys.executable, "-c", SAVED_PROGRAMS, str(ZOO.parent), str(tmp_path), suffix]
    done = subprocess.run(args, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    made = imported(str(tmp_path / name), tmp_path / "bundle", capsys)
    assert made["parity"]["max_relative"] < 1e-5
    about = ExportedProgram.of(tmp_path / "bundle").about
    assert about.batch == batch
    assert list(about.inputs) == (
        ["image", "size"] if suffix == "keras" else ["image", "mask_input"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("suffix", some(["keras", "pt2"], ["pt2"]))
def test_a_damaged_file(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"bad.{suffix}").write_text("no")
    assert main(["import", str(tmp_path / f"bad.{suffix}"), "--out", str(tmp_path / "out")]) != 0
    assert f"bad.{suffix} does not load" in capsys.readouterr().err


SAVED = """
import sys
import numpy as np, tensorflow as tf
from jax.experimental import jax2tf
rng, out = np.random.default_rng(0), sys.argv[1]
class Net(tf.Module):
    def __init__(self):
        self.kernel = tf.Variable(rng.normal(size=(3, 3, 1, 4)).astype("f4"))
        self.weight = tf.Variable(rng.normal(size=(64, 10)).astype("f4"))
        self.scale = tf.Variable(2.0, trainable=False)
    @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 1], tf.float32)])
    def __call__(self, image):
        x = tf.reshape(tf.nn.relu(tf.nn.conv2d(image, self.kernel, 2, "SAME")), [-1, 64])
        return {"logits": self.scale * tf.matmul(x, self.weight)}
net = Net()
tf.saved_model.save(net, out + "/net", signatures={"one": net.__call__, "two": net.__call__})
other = tf.Module()
shapes = [tf.TensorSpec([None, 4], tf.float32)]
other.f = tf.function(jax2tf.convert(lambda x: x * 2, polymorphic_shapes=["(b, 4)"]), input_signature=shapes, autograph=False)
tf.saved_model.save(other, out + "/jax", signatures={"serving_default": other.f})
"""


@pytest.mark.slow
@pytest.mark.skipif(
    TENSORFLOW is None,
    reason="python -m venv tf && tf/bin/pip install 'tensorflow>=2.21,<2.22' tf2jax==0.3.8 jax==0.10.2, then SYSTOLIC_TENSORFLOW_PYTHON=tf/bin/python",
)
def test_a_saved_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert TENSORFLOW is not None
    args = [TENSORFLOW, "-c", SAVED, str(tmp_path)]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    python = ("--python", TENSORFLOW)
    made = imported(str(tmp_path / "net"), tmp_path / "b", capsys, "--signature", "two", *python)
    assert made["parity"]["max_relative"] < 1e-5
    assert made["parity"]["rows"] == 4
    assert made["parameters"] == 3 * 3 * 4 + 640
    for wrong, told in (
        (("net",), "has the signatures one, two; choose one with --signature"),
        (("net", "--signature", "tow"), "has no signature tow; did you mean"),
        (("jax",), "was written by jax2tf"),
    ):
        line = [
            "import",
            str(tmp_path / wrong[0]),
            *wrong[1:],
            "--out",
            str(tmp_path / "c"),
            *python,
        ]
        assert main(line) != 0
        assert told in capsys.readouterr().err
