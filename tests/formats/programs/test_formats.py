"""Every format on one small model. Bad requests are one line that names the next step, and nothing under the name that was asked for."""

import json
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from safetensors import safe_open

import systolic
from systolic.cli.main import main
from systolic.core.errors import SystolicError
from systolic.formats.examples import example_inputs
from systolic.formats.inference import PORTABLE, functions_of
from systolic.formats.litert.writer import export_litert
from systolic.formats.onnx import export_onnx
from systolic.formats.packages import installed
from systolic.job import MatrixFormat, Quantization, WeightFormat
from systolic.quantizing.quantize import quantize
from tests.formats import folders
from tests.formats.programs import tiny
from tests.formats.programs.test_saved_model import PYTHON
from tests.house.budget import ROOT
from tests.steps.tiny import MODEL
from tests.tiers import some

SUFFIXES = {"gguf": ".gguf", "litert": ".tflite", "onnx": ".onnx"}
FORMATS = ("hf", "gguf", "docker", "stablehlo", "savedmodel", "litert", "onnx")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small language model, which every format takes."""
    folder = tmp_path_factory.mktemp("model")
    source = folders.folder(folder / "source")
    systolic.import_model(source, folder / "bundle", parity=False)
    return folder / "bundle"


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file grows beyond ``size`` bytes, but for what JAX and Python keep compiled, whose truncated files would outlast the test."""
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    before, written = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = written
        jax.config.update("jax_enable_compilation_cache", cached)
        compilation_cache.reset_cache()


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line of a command that fails."""
    capsys.readouterr()
    assert main(["export", *args]) != 0
    told = [one for one in capsys.readouterr().err.splitlines() if one.startswith("systolic: ")]
    assert len(told) == 1
    return told[0]


def test_the_documentations_lines_export(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's Python, on a small model in the place of its run."""
    page = (ROOT / "docs" / "exporting.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = [one for one in blocks if "systolic.export(" in one]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").symlink_to(bundle)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(block, found)
    assert found["made"].differences["logits"].max_relative < 1e-5
    about = json.loads((tmp_path / "exported" / "digits-8" / "manifest.json").read_bytes())
    assert about["functions"]["logits"]["inputs"]["tokens"]["shape"] == [8, "sequence"]


def test_the_matrix_of_n_grams_may_be_quantized() -> None:
    """As ``quantize`` makes it of the recipe ``bytes``."""
    model = replace(MODEL, ngrams=3, ngram_rows=16, ngram_dim=8)
    how = Quantization.of({"ngrams/out": MatrixFormat(format=WeightFormat.int8)})
    job = replace(tiny.decoder(model), layout=tiny.ALONE, quantization=how)
    network = tiny.local(job).network
    assert network.model_state["ngrams/out/codes"].dtype == "int8"
    (function,) = functions_of(job, PORTABLE, "float32")
    made = function.outputs({**network.params, **network.model_state})
    assert made["logits"].shape == ("batch", "sequence", MODEL.vocab)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "dtype", "told"),
    [
        (WeightFormat.int8, "I8", ["that stay in codes, which the program widens: 9"]),
        # Both matrices of the vocabulary, and the one with inputs in heads of 8, have 8 bits in both.
        (
            WeightFormat.int4,
            "F32",
            [
                "that stay in codes, which the program widens: 3",
                "that are written as the floats that their codes stand for: 6",
            ],
        ),
    ],
    ids=["int8", "int4"],
)
def test_quantized_matrices_are_codes_or_floats_and_the_export_says_which(
    how: WeightFormat, dtype: str, told: list[str], bundle: Path, tmp_path: Path
) -> None:
    quantize(bundle, tmp_path / "small", to=MatrixFormat(format=how, group=how.group))
    made = systolic.export(tmp_path / "small", tmp_path / "out", to="stablehlo")
    assert made.differences["logits"].max_relative < 1e-5
    assert [note.removeprefix("quantized matrices ") for note in made.notes] == told
    (file,) = (tmp_path / "out").glob("weights*.safetensors")
    with safe_open(file, "np") as weights:
        names = {one for one in weights.keys() if one.startswith("blocks/query")}  # noqa: SIM118
        assert {weights.get_slice(one).get_dtype() for one in names} >= {dtype}
        assert ("blocks/query" in names) == (dtype == "F32")


# NumPy before 2.3 leaves what it could not write to be closed later.
@pytest.mark.filterwarnings("ignore:.*ZipFile.__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    to: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if to in ("litert", "onnx") and installed(to) is None:
        pytest.skip("needs the format's packages: python -m systolic.formats.packages")
    if to == "savedmodel" and PYTHON is None:
        pytest.skip("needs TensorFlow: SYSTOLIC_TENSORFLOW_PYTHON")
    out = tmp_path / f"made{SUFFIXES.get(to, '')}"
    more = ["--python", str(PYTHON)] if to == "savedmodel" else []
    with full_disk(4000):
        told = refused(capsys, str(bundle), "--to", to, "--out", str(out), *more)
    assert "File too large" in told
    assert "free some space" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", some(["litert", "onnx"], ["onnx"]))
def test_packages_that_cannot_be_installed_are_one_line(
    to: str,
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SYSTOLIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    out = tmp_path / f"made{SUFFIXES[to]}"
    told = refused(capsys, str(bundle), "--to", to, "--out", str(out))
    assert "pip could not install" in told
    assert "PIP_INDEX_URL" in told
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize(
    ("to", "more", "told"),
    [
        ("litert", ("--precision", "int8", "--data", "EMPTY"), "holds no files"),
        ("litert", ("--precision", "int8", "--data", "BINARY"), "is not UTF-8 text"),
        ("litert", ("--precision", "int8", "--data", "GONE"), "does not exist"),
        ("litert", ("--precision", "bf16"), "f32, dynamic and int8"),
        ("onnx", ("--precision", "bf16"), "leave it out"),
        ("stablehlo", ("--precision", "q8_0"), "is for gguf files"),
        ("gguf", ("--batch", "2"), "--to gguf writes none"),
        ("hf", ("--data", "EMPTY"), "--data is for programs"),
        ("onnx", ("--edge-tpu",), "only --to litert has"),
        ("stablehlo", ("--sequence", "-1"), "sequence"),
        ("docker", ("--sequence", "8"), "--to docker writes none"),
    ],
)
def test_a_wrong_option_is_one_line(
    to: str,
    more: tuple[str, ...],
    told: str,
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if to in ("litert", "onnx") and installed(to) is None:
        pytest.skip("needs the format's packages: python -m systolic.formats.packages")
    empty, binary = tmp_path / "EMPTY", tmp_path / "BINARY"
    empty.mkdir()
    binary.write_bytes(bytes(range(256)))
    given = [str(tmp_path / one) if one.isupper() else one for one in more]
    out = tmp_path / f"made{SUFFIXES.get(to, '')}"
    assert told in refused(capsys, str(bundle), "--to", to, "--out", str(out), *given)
    assert sorted(os.listdir(tmp_path)) == ["BINARY", "EMPTY"]


class Spectral(tiny.Scores):
    """Names eigenvalues, which a library computes."""

    def outputs(self, model: Any, batch: Any) -> Any:
        return {"score": jnp.linalg.eigvalsh(model(batch["x"])[:, :, None] * jnp.ones(2))}


@pytest.mark.slow
@pytest.mark.parametrize(("to", "write"), [("litert", export_litert), ("onnx", export_onnx)])
def test_an_operation_that_a_format_lacks_is_one_line(to: str, write: Any, tmp_path: Path) -> None:
    if installed(to) is None:
        pytest.skip("needs the format's packages: python -m systolic.formats.packages")
    model = tiny.model(tiny.own(Spectral()))
    with pytest.raises(SystolicError, match=r"export it to .*stablehlo") as error:
        write(model, example_inputs(model), tmp_path / f"made{SUFFIXES[to]}")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
