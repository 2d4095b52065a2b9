"""A SavedModel that TensorFlow reloads without this package, in the layout of TensorFlow Serving."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from systolic.cli.main import main
from systolic.core.errors import MissingExtraError
from systolic.formats.comparison import difference
from systolic.formats.examples import example_inputs
from systolic.formats.registry import ExportSettings
from systolic.formats.tensorflow.writer import export_saved_model
from tests.formats.programs import tiny

GIVEN = os.environ.get("SYSTOLIC_TENSORFLOW_PYTHON")
"""Python of an environment with tensorflow and jax."""
PYTHON = GIVEN or (sys.executable if importlib.util.find_spec("tensorflow") else None)
needs_tensorflow = pytest.mark.skipif(
    PYTHON is None,
    reason="python -m venv tf && tf/bin/pip install 'tensorflow>=2.21,<2.22' jax==0.10.2, then SYSTOLIC_TENSORFLOW_PYTHON=tf/bin/python",
)

ALONE = """
import json, sys
for name in ("systolic", "jax", "flax"):
    sys.modules[name] = None  # an import of it fails
import numpy as np
import tensorflow as tf
signatures = tf.saved_model.load(sys.argv[1]).signatures
inputs = {key: tf.constant(one) for key, one in np.load(sys.argv[2]).items()}
made = signatures["serving_default"](**inputs)
np.savez(sys.argv[3], **{key: one.numpy() for key, one in made.items()})
shapes = {key: one.shape.as_list() for key, one in signatures["serving_default"].structured_outputs.items()}
print(json.dumps([sorted(signatures), shapes]))
"""


@pytest.mark.slow
@needs_tensorflow
@pytest.mark.parametrize("name", ["digits", "windows", "embeddings", "whisper"])
def test_tensorflow_reloads_it(name: str, tmp_path: Path) -> None:
    assert PYTHON is not None
    model = tiny.model(tiny.JOBS[name]())
    out = tmp_path / "models" / name
    settings = ExportSettings(python=Path(PYTHON))
    made = export_saved_model(model, example_inputs(model), out, settings, lambda _: None)
    assert all(one.max_relative < 1e-5 for one in made.differences.values())
    assert sorted(one.name for one in out.iterdir()) == ["1"]
    assert (out / "1" / "saved_model.pb").is_file()
    first = model.function()
    given = example_inputs(model, rows=3).inputs[first.name]
    if name == "windows":
        given = {key: one[:, :17] for key, one in given.items()}
    np.savez(tmp_path / "inputs.npz", **given)  # ty: ignore[invalid-argument-type]
    files = [str(out / "1"), str(tmp_path / "inputs.npz"), str(tmp_path / "outputs.npz")]
    done = subprocess.run(
        [PYTHON, "-I", "-c", ALONE, *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    signatures, shapes = json.loads(done.stdout.splitlines()[-1])
    assert signatures == sorted({*model.functions, "serving_default"})
    assert all(shape[0] is None for shape in shapes.values())
    with np.load(tmp_path / "outputs.npz") as found:
        assert difference(model.source_outputs(first.name, given), dict(found)).max_relative < 1e-5


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="it is installed")
def test_a_missing_extra_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.model(tiny.own(tiny.Scores()))
    with pytest.raises(MissingExtraError, match=r"--python .* pip install 'systolic.tf.'"):
        export_saved_model(
            model, example_inputs(model), tmp_path / "out", ExportSettings(), lambda _: None
        )
    # Another Python that has none is asked itself.
    settings = ExportSettings(python=Path(sys.executable))
    with pytest.raises(MissingExtraError, match=r"no package tensorflow of .*python"):
        export_saved_model(model, example_inputs(model), tmp_path / "out", settings, lambda _: None)
    assert list(tmp_path.iterdir()) == []
    told = ["export", str(tmp_path), "--to", "savedmodel", "--out", str(tmp_path / "out")]
    assert main(told) == 1, "the command line is right, and the machine lacks packages"
    assert "pip install 'systolic[tf]'" in capsys.readouterr().err
