"""Bundles with weights and activations in int8: what calibration decides, what opens them, and which calibration is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import systolic
from systolic.cli.main import main
from systolic.core.errors import DataError
from systolic.formats.comparison import outputs_of, probe_of
from systolic.formats.matrices import formats_of, matrices_in
from systolic.formats.source import open_source
from systolic.job import MatrixFormat, Read, Sampling, Split, WeightFormat
from systolic.quantizing.calibration import largest_of, moments_of
from systolic.quantizing.quantize import Evaluated, quantize
from systolic.quantizing.rounder import Rounder
from systolic.quantizing.sensitivity import Measure, choose
from systolic.runs.bundle.folder import MANIFEST
from systolic.serving.text.opening import open_engine
from systolic.serving.text.request import SamplingParams, TextRequest
from tests.formats import folders
from tests.formats.test_sentences import folder as encoder_folder
from tests.quantizing.test_quantizing import Given, matrices
from tests.serving.text.engine import SIZES

W8A8 = MatrixFormat(format=WeightFormat.w8a8)
INT8 = MatrixFormat(format=WeightFormat.int8)
TEXT = "the capital of France is Paris\n" * 40
OTHER = "the capital of Spain is Madrid, yes or no " * 80


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as a Hugging Face folder, and texts beside it."""
    home = tmp_path_factory.mktemp("source")
    (home / "text.txt").write_text(TEXT)
    (home / "other.txt").write_text(OTHER)
    return folders.folder(home / "tiny")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same in w8a8."""
    on = Evaluated(data=source.parent / "text.txt", calibration=source.parent / "other.txt")
    out = tmp_path_factory.mktemp("w8a8") / "bundle"
    return quantize(source, out, to=W8A8, keep=["down"], on=on)


def test_matrices_of_layers_have_both_and_the_vocabulary_weights_only(made: Any) -> None:
    formats = {one.path: one.format for one in made.matrices}
    assert formats.pop("blocks/mlp/down") == "float32"
    assert {path for path, how in formats.items() if how == "int8"} == {"embedding", "unembedding"}
    assert {how for path, how in formats.items() if path.startswith("blocks/")} == {"w8a8"}
    assert abs(made.after.lost(made.before)) < 0.01
    assert 0 < made.outputs.max_relative < 0.05
    record = json.loads((made.path / MANIFEST).read_text())
    assert record["quantization"]["blocks/query"]["format"] == "w8a8"
    files = list(made.path.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert made.bytes_after == sum(file.stat().st_size for file in files) - headers


def test_factors_are_those_of_the_inputs_that_transformers_sees(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("systolic.quantizing.calibration.CALIBRATION_BATCHES", 1)
    model, known = systolic.open(source), matrices_in(open_source(source))
    formats, path = formats_of(known, W8A8, []), source.parent / "other.txt"
    found = largest_of(model, known, formats, path)
    assert set(found) == {path for path in known if path.startswith("blocks/")}
    read = Read(split=Split.validation, batch=1, shuffle=False, epochs=1)
    tokens = np.asarray(next(iter(model.job_on(path).data.open(read)))["tokens"])
    other = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    layer, seen = other.model.layers[1], {}
    for path, linear in {
        "blocks/key": layer.self_attn.k_proj,
        "blocks/out": layer.self_attn.o_proj,
        "blocks/mlp/down": layer.mlp.down_proj,
    }.items():
        linear.register_forward_pre_hook(lambda _, x, path=path: seen.update({path: x[0]}))
    with torch.no_grad():
        other(torch.tensor(tokens))
    for path, x in seen.items():
        largest = x.abs().reshape(-1, x.shape[-1]).numpy().max(0)
        np.testing.assert_allclose(found[path][1], largest, rtol=1e-3)


@pytest.mark.slow
def test_a_server_writes_what_generate_does(made: Any) -> None:
    model = systolic.open(made.path)
    (expected,) = model.generate(["the capital of"], tokens=8, sampling=Sampling(temperature=0))
    weights, tokenizer = model.weights, model.job.data.get_tokenizer()
    engine = open_engine(model.setup.steps, weights.params, weights.model_state, SIZES)
    engine.start()
    try:
        asked = TextRequest(
            tokens=tokenizer.prompt("the capital of"),
            max_tokens=8,
            sampling=SamplingParams(temperature=0.0),
        )
        found = [token for piece in engine.submit(asked) for token in piece.token_ids]
    finally:
        engine.stop()
    assert tokenizer.decode(found) == expected


@pytest.mark.slow
def test_it_leaves_as_the_floats_that_its_codes_stand_for(
    made: Any, source: Path, tmp_path: Path
) -> None:
    systolic.import_model(made.path, tmp_path / "plain", parity=False)
    systolic.export(made.path, tmp_path / "home")
    tokens = np.arange(24).reshape(2, 12).astype(np.int32)
    plain = systolic.open(tmp_path / "plain")
    assert not plain.job.quantization
    ours = outputs_of(plain.setup.steps, plain.weights, {"tokens": tokens})
    theirs = folders.logits(tmp_path / "home", tokens.tolist())
    np.testing.assert_allclose(ours[..., : theirs.shape[-1]], theirs, atol=2e-4)
    before = folders.logits(source, tokens.tolist())
    assert np.abs(theirs - before).max() < 0.05 * np.abs(before).max()


@pytest.mark.slow
def test_an_encoder_and_a_network_of_convolutions(tmp_path: Path) -> None:
    encoder_folder(tmp_path / "encoder")
    (tmp_path / "lines.txt").write_text("the capital of France\nis Paris, yes or no\n" * 20)
    torch.manual_seed(0)
    config = transformers.MobileNetV2Config(image_size=32, depth_multiplier=0.25, num_labels=4)
    transformers.MobileNetV2ForImageClassification(config).save_pretrained(tmp_path / "mobile")
    (tmp_path / "pictures").mkdir()
    random = np.random.default_rng(0)
    for number in range(8):
        pixels = random.integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
    for name, data in (("encoder", "lines.txt"), ("mobile", "pictures")):
        out = tmp_path / f"{name}-w8a8"
        on = Evaluated(calibration=tmp_path / data)
        found = quantize(tmp_path / name, out, to=W8A8, on=on)
        assert {one.format for one in found.matrices} == {"w8a8"}
        assert found.outputs is not None
        assert 0 < found.outputs.mean_abs < 0.1
        one, given = systolic.open(out), probe_of(open_source(out)).ours
        again = outputs_of(one.setup.steps, one.weights, given)
        assert np.isfinite(again).all()


def test_a_budget_gives_activations_their_dtype_first() -> None:
    class Costs(Given):
        def lost(self, rounder: Any, formats: Any) -> float:
            self.asked += 1
            share = {WeightFormat.w8a8: 1.0, WeightFormat.int8: 0.2}
            return sum(self.costs[path] * share[how.format] for path, how in formats.items())

    known = matrices(a=64, b=64)
    asked = dict.fromkeys(known, W8A8)
    made = choose(Costs({"a": 0.001, "b": 0.02}), Rounder(known), asked, 0.006)
    assert made.formats == {"a": W8A8, "b": INT8}


@pytest.mark.slow
def test_a_search_measures_activations_too(source: Path) -> None:
    """Codes and factors are in the places of parameters, so that products are those of the Bundle."""
    model, known = systolic.open(source), matrices_in(open_source(source))
    formats = formats_of(known, W8A8, [])
    largest = largest_of(model, known, formats, source.parent / "other.txt")
    measure = Measure(model, source.parent / "text.txt", 1)
    both = measure.lost(Rounder(known, largest), formats)
    weights = measure.lost(Rounder(known), formats_of(known, INT8, []))
    assert both != weights
    assert abs(both - weights) < 0.01


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (None, "activations in int8 have scales by what they are; give data"),
        ("missing.txt", "missing.txt does not exist; check the path of --calibrate"),
        (lambda file: file.write_text(""), "which is empty; give data"),
        (lambda file: file.write_text("too short"), "tokens; give a text of 128 or more"),
        (
            lambda file: Image.new("RGB", (8, 8)).save(file, "PNG"),
            "is binary, not text",
        ),
    ],
    ids=["none", "no file", "empty", "short", "a picture"],
)
def test_wrong_calibration_of_a_text_model_is_one_line(
    make: Callable[[Path], Any] | str | None,
    said: str,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["quantize", str(source), "--to", "int8", "--activations", "--out", str(tmp_path / "a")]
    if isinstance(make, str):
        given += ["--calibrate", str(tmp_path / make)]
    elif make is not None:
        make(tmp_path / "given.txt")
        given += ["--calibrate", str(tmp_path / "given.txt")]
    assert main(given) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[-1]
    assert not (tmp_path / "a").exists()
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]


def test_moments_of_lines_together_are_the_sums_of_those_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of several lengths are padded to the longest, and a batch with empty rows; neither counts."""
    monkeypatch.setattr("systolic.quantizing.calibration.LEAST_TOKENS", 1)
    source = tmp_path / "encoder"
    encoder_folder(source)
    model, known = systolic.open(source), matrices_in(open_source(source))
    int4 = MatrixFormat(format=WeightFormat.int4, group=16)
    paths = [path for path, matrix in known.items() if matrix.watched]
    formats = {path: int4 for path in paths if path.startswith("blocks/")}
    lines = ["the capital", "the capital of Spain is Madrid, yes or no", "no"]
    sums = {}
    for name, part in {"all": lines, **{line: [line] for line in lines}}.items():
        (tmp_path / "lines.txt").write_text("\n".join(part))
        sums[name] = moments_of(model, known, formats, tmp_path / "lines.txt")
    for path in formats:
        parts = sum(sums[line][path] for line in lines)
        np.testing.assert_allclose(sums["all"][path], parts, rtol=1e-3, atol=1e-3)


def test_too_few_tokens_are_no_calibration_of_codes_of_4_bits(source: Path, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("the capital of Spain")
    known = matrices_in(open_source(source))
    formats = formats_of(known, MatrixFormat(format=WeightFormat.int4, group=16), ["embedding"])
    with pytest.raises(DataError, match="tokens; give a text of 128 or more"):
        moments_of(systolic.open(source), known, formats, tmp_path / "few.txt")
