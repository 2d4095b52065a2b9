"""Quantized Bundles: they compute what their restored weights compute elsewhere, and are opened as any other."""

import json
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

import systolic
from systolic.cli.main import main
from systolic.core.errors import OptionError
from systolic.formats.comparison import outputs_of, probe_of
from systolic.formats.export import file_payload, floats_line
from systolic.formats.matrices import Matrix, formats_of, matrices_in, whole
from systolic.formats.source import open_source
from systolic.formats.weights import structure_of
from systolic.inference.evaluation import splits
from systolic.inference.model import PreparedModel, TrainedModel, set_up_here
from systolic.job import AdapterKind, MatrixFormat, Sampling, Split, WeightFormat
from systolic.models.decoder.config import Decoder
from systolic.models.quantized.codes import Quantized, held_dtype
from systolic.quantizing.calibration import moments_of
from systolic.quantizing.quantize import Evaluated, quantize
from systolic.quantizing.rounder import Rounder
from systolic.quantizing.sensitivity import Measure, choose
from systolic.report.output import print_json
from systolic.runs.bundle.folder import MANIFEST
from systolic.serving.text.converting import restored_on_cpu
from systolic.serving.text.opening import open_engine
from systolic.serving.text.request import SamplingParams, TextRequest
from systolic.steps.paged import PagedSteps, with_copied_heads
from systolic.steps.programs import evaluation
from tests.formats import folders
from tests.formats.test_sentences import folder as encoder_folder
from tests.serving.text.engine import SIZES
from tests.tiers import some

INT8 = MatrixFormat(format=WeightFormat.int8)
INT4 = MatrixFormat(format=WeightFormat.int4, group=32)
NARROW = MatrixFormat(format=WeightFormat.int4, group=8)
"""Of heads of 8 too."""
STAND = "are written as the floats that their codes stand for"
TEXT = "the capital of France is Paris\n" * 40
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as a Hugging Face folder."""
    return folders.folder(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def int8(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same in int8, made by the command, with a text to measure on."""
    home = tmp_path_factory.mktemp("int8")
    (home / "text.txt").write_text(TEXT)
    given = Evaluated(data=home / "text.txt")
    return quantize(source, home / "bundle", to=INT8, on=given)


@pytest.mark.parametrize("kind", some(["int8", "int4", "nf4", "fp8"], ["nf4"]))
def test_it_computes_what_transformers_does_with_the_restored_weights(
    kind: str, source: Path, tmp_path: Path
) -> None:
    if kind == "nf4":  # also with an embedding that is the output matrix
        source = folders.folder(tmp_path / "tied", folders.llama(tie_word_embeddings=True))
    wanted = WeightFormat(kind)
    how = MatrixFormat(format=wanted, group=16 if wanted.bits == 4 else 0)
    made = quantize(source, tmp_path / "bundle", to=how, keep=["blocks/value"])
    assert {one.path: one.format for one in made.matrices if one.format == "float32"} == {
        "blocks/value": "float32"
    }
    model = systolic.open(tmp_path / "bundle")
    held = model.weights.model_state["blocks/query/codes"]
    assert held.dtype.name == held_dtype(how, "cpu")
    vocabulary = model.weights.model_state["embedding/codes"]
    assert vocabulary.dtype.name == ("float8_e4m3fn" if kind == "fp8" else "int8")
    tokens = np.arange(24).reshape(2, 12).astype(np.int32)
    ours = outputs_of(model.setup.steps, model.weights, {"tokens": tokens})
    written = systolic.export(tmp_path / "bundle", tmp_path / "home")
    compared, restored, *_ = written.lines()
    assert compared.startswith("parity with the source over")
    assert restored.startswith(f"{len(made.matrices) - 1} quantized matrices are written")
    theirs = folders.logits(tmp_path / "home", tokens.tolist())
    np.testing.assert_allclose(ours[..., : theirs.shape[-1]], theirs, atol=2e-4)
    plain = folders.logits(source, tokens.tolist())
    assert 1e-3 < np.abs(theirs - plain).max() < 0.5 * np.abs(plain).max()


@pytest.mark.slow
def test_sizes_and_quality_are_those_of_the_files(int8: Any) -> None:
    files = list(int8.path.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert int8.bytes_after == sum(file.stat().st_size for file in files) - headers
    assert int8.bytes_after < int8.bytes_before
    assert int8.before.name == "perplexity"
    assert abs(int8.after.lost(int8.before)) < 0.01
    again = systolic.open(int8.path).evaluate(path=int8.path.parent / "text.txt")
    (metrics,) = again.values()
    assert np.exp(metrics["loss"]) == pytest.approx(int8.after.value)
    assert int8.outputs.max_relative < 0.05
    record = json.loads((int8.path / MANIFEST).read_text())
    assert record["format"] == 2
    assert record["quantization"]["blocks/query"]["format"] == "int8"


def test_an_interrupt_while_it_is_timed_costs_the_times_alone(
    int8: Any,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("systolic.quantizing.quantize.quantize", lambda *_, **__: int8)
    monkeypatch.setattr(
        "systolic.comparing.speeds.server_call", lambda *_: signal.raise_signal(signal.SIGINT)
    )
    # A shell that starts the tests in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["quantize", str(source), "--to", "int8", "--out", str(int8.path)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    shown = capsys.readouterr()
    assert "  perplexity  " in shown.out
    assert "blocks/mlp/down  int8" in shown.out
    assert "prefill" not in shown.out
    said = shown.err.splitlines()[-1]
    assert said.startswith("systolic: interrupted while timing; all files are written, and ")


def test_its_outputs_and_evaluations_are_on_record(
    int8: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = json.loads((int8.path / MANIFEST).read_text())["evaluations"]
    assert (one["on"], one["batches"], one["step"]) == ("text.txt", one["of"], 0)
    assert np.exp(one["before"]["loss"]) == pytest.approx(int8.before.value)
    assert np.exp(one["metrics"]["loss"]) == pytest.approx(int8.after.value)
    assert main(["verify", str(int8.path)]) == 0
    told = capsys.readouterr().out
    assert "replayed 2 recorded rows" in told
    (before,) = [line for line in told.splitlines() if "text.txt before quantization" in line]
    assert f"loss {one['before']['loss']:.4f}" in before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", pytest.param("nf4", marks=pytest.mark.slow)])
def test_a_server_writes_what_generate_does(
    kind: str, int8: Any, source: Path, tmp_path: Path
) -> None:
    path = int8.path
    if kind == "nf4":
        how = MatrixFormat(format=WeightFormat.nf4, group=16)
        path = quantize(source, tmp_path / "nf4", to=how).path
    model = systolic.open(path)
    (expected,) = model.generate(["the capital of"], tokens=12, sampling=GREEDY)
    weights, tokenizer = model.weights, model.job.data.get_tokenizer()
    sizes = replace(SIZES, rows=1, programs=(1, 1, 1))
    engine = open_engine(model.setup.steps, weights.params, weights.model_state, sizes)
    engine.start()
    try:
        asked = TextRequest(
            tokens=tokenizer.prompt("the capital of"),
            max_tokens=12,
            sampling=SamplingParams(temperature=0.0),
        )
        found = [token for piece in engine.submit(asked) for token in piece.token_ids]
    finally:
        engine.stop()
    assert tokenizer.decode(found) == expected
    held = PagedSteps(model.setup.steps, SIZES.page_size).abstract_weights
    codes = {"int8"} if kind == "int8" else {"int8", "uint8"}
    assert codes <= {array.dtype.name for array in jax.tree.leaves(held)}


@pytest.mark.slow
def test_a_server_on_a_cpu_holds_codes_without_a_product_as_floats(
    int8: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = MatrixFormat(format=WeightFormat.nf4, group=16)
    model = systolic.open(quantize(source, tmp_path / "nf4", to=how).path)
    told: list[str] = []
    plain = PreparedModel(setup=model.setup, read=lambda: model.weights)
    held = restored_on_cpu(plain, set_up_here, told.append)
    weights, before = held.read(), model.weights.model_state
    codes, scales = (before[f"blocks/mlp/down/{one}"] for one in ("codes", "scales"))
    wanted = Quantized(codes=codes, scales=scales).restored("float32")
    np.testing.assert_array_equal(weights.params["blocks/mlp/down"], wanted)
    # Those of the vocabulary, and of heads of 8, are int8, which is multiplied as it is.
    assert {path for path in weights.model_state if path.endswith("codes")} == {
        "blocks/out/codes",
        "embedding/codes",
        "unembedding/codes",
    }
    asked = {"tokens": 8, "sampling": GREEDY}
    made = TrainedModel(model.path, held.setup, weights).generate("the capital of", **asked)
    assert made == model.generate("the capital of", **asked)
    (line,) = told
    assert re.search(r"\d matrices in nf4, whose codes this CPU .* held as float32: .*B of w", line)
    monkeypatch.setattr("systolic.serving.text.converting.capacity_bytes", lambda _: 0)
    assert restored_on_cpu(plain, set_up_here, told.append) is plain
    assert "are restored in each step: as floats they need" in told[1]
    one = systolic.open(int8.path)
    same = PreparedModel(setup=one.setup, read=lambda: one.weights)
    assert restored_on_cpu(same, set_up_here, told.append) is same
    assert len(told) == 2


def test_copies_of_heads_are_copies_of_their_codes(int8: Any) -> None:
    model = systolic.open(int8.path)
    own: Any = model.job.model
    served = SimpleNamespace(
        model=Decoder(**{**vars_of(own), "kv_heads": 4}), adapter=model.job.adapter
    )
    arrays = {**model.weights.params, **model.weights.model_state}
    made = with_copied_heads(arrays, own, served)  # ty: ignore[invalid-argument-type]
    for part in ("codes", "scales"):
        before, after = (one[f"blocks/key/{part}"] for one in (arrays, made))
        np.testing.assert_array_equal(np.repeat(before, 2, axis=-2), after)


def vars_of(model: Any) -> dict[str, Any]:
    """Fields of a model."""
    return {name: vars(type(model))[name].__get__(model) for name in type(model).__slots__}


def resnet() -> Any:
    """A network with few convolutions."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [1] * 4}
    config = transformers.ResNetConfig(**sizes, layer_type="basic", num_labels=4)
    return transformers.ResNetForImageClassification(config)


def mobile() -> Any:
    """One with depthwise ones."""
    config = transformers.MobileNetV2Config(image_size=32, depth_multiplier=0.25, num_labels=4)
    return transformers.MobileNetV2ForImageClassification(config)


@pytest.mark.parametrize("network", some([resnet, mobile, None], [resnet]))
def test_an_encoder_and_a_network_of_convolutions(
    network: Callable[[], Any] | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    if network is None:
        encoder_folder(tmp_path / "model")
    else:
        network().save_pretrained(tmp_path / "model")
    made = quantize(tmp_path / "model", tmp_path / "int8", to=INT8)
    assert made.before is None
    assert made.outputs is not None
    assert 0 < made.outputs.mean_abs < 0.05
    assert made.bytes_after < made.bytes_before
    # A Bundle of the floats that the codes stand for.
    systolic.import_model(made.path, tmp_path / "plain", parity=False)
    given = probe_of(open_source(made.path)).ours
    one, other = (systolic.open(tmp_path / kind) for kind in ("int8", "plain"))
    assert one.job.quantization
    np.testing.assert_allclose(
        outputs_of(one.setup.steps, one.weights, given),
        outputs_of(other.setup.steps, other.weights, given),
        atol=1e-3,
    )


@pytest.mark.slow
def test_vectors_of_an_encoder_in_4_bits(tmp_path: Path) -> None:
    """By a program that is compiled ahead of time."""
    encoder_folder(tmp_path / "encoder")
    made = quantize(tmp_path / "encoder", tmp_path / "codes", to=INT4)
    systolic.import_model(made.path, tmp_path / "plain", parity=False)
    vectors = [
        systolic.open(tmp_path / name).predict(["the capital"])[0]["embedding"]
        for name in ("codes", "plain", "encoder")
    ]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-3)
    assert 1e-3 < np.abs(np.array(vectors[0]) - vectors[2]).max() < 0.3


def test_the_stem_and_the_head_of_a_network_stay() -> None:
    from systolic.models.vision.config import CNN, MobileNetV2

    for model, first, taken in (
        (MobileNetV2(multiplier=0.25, num_classes=4), "stem/", "blocks/0/depthwise/kernel"),
        (CNN(num_classes=4), "convs/0/", "convs/1/kernel"),
    ):
        names = [path for path in structure_of(model).params if model.quantizable(path)]
        assert taken in names
        assert not [path for path in names if path.startswith((first, "head/"))]


def test_what_has_too_few_inputs_beside_each_other_is_int8() -> None:
    """A depthwise convolution sums over its taps alone: in 4 bits each weight would have a scale of its own."""
    from systolic.models.vision.config import MobileNetV2

    formats = whole(MobileNetV2(multiplier=0.25, num_classes=4), WeightFormat.int4).by_path()
    assert formats["blocks/0/depthwise/kernel"] == INT8
    assert formats["blocks/9/expand/kernel"] == MatrixFormat(format=WeightFormat.int4, group=16)


def test_codes_of_4_bits_are_fitted_to_the_inputs_that_transformers_sees(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One document that fills rows: transformers sees no ends of others in them.
    (tmp_path / "new.txt").write_text("the capital of Spain is Madrid, yes or no " * 80)
    monkeypatch.setattr("systolic.quantizing.calibration.CALIBRATION_BATCHES", 1)
    model = systolic.open(source)
    known = matrices_in(open_source(source))
    formats = formats_of(known, NARROW, [])
    found = moments_of(model, known, formats, tmp_path / "new.txt")
    job = model.job_on(tmp_path / "new.txt")
    feed = evaluation(job, model.setup.steps, splits(job, None)[0])
    tokens = np.asarray(next(iter(feed))["tokens"])
    feed.close()
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
        flat = x.reshape(-1, x.shape[-1]).numpy()
        np.testing.assert_allclose(found[path][1], flat.T @ flat, rtol=1e-3, atol=1e-3)
    on = Evaluated(calibration=tmp_path / "new.txt")
    quantize(source, tmp_path / "codes", to=NARROW, on=on)
    opened, steps = systolic.open(tmp_path / "codes"), model.setup.steps
    before = outputs_of(steps, model.weights, {"tokens": tokens})
    fitted = outputs_of(opened.setup.steps, opened.weights, {"tokens": tokens})
    rounded = Rounder(known).rounded(model.weights, formats)
    plain = outputs_of(steps, rounded, {"tokens": tokens})
    assert np.abs(fitted - before).mean() < 0.8 * np.abs(plain - before).mean()
    with pytest.raises(
        OptionError, match="--calibrate has an effect on int4 and nf4, and with --activations"
    ):
        quantize(source, tmp_path / "int8", to=INT8, on=on)


def test_a_quantized_model_is_quantized_once(int8: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"is quantized already \(blocks/key in int8\)"):
        quantize(int8.path, tmp_path / "again", to=INT4)
    assert not list(tmp_path.iterdir())


def test_a_quantized_model_is_imported_in_floats(int8: Any, tmp_path: Path) -> None:
    imported = systolic.import_model(int8.path, tmp_path / "plain", parity=False)
    # What was measured is of the codes.
    assert not json.loads((tmp_path / "plain" / MANIFEST).read_text())["evaluations"]
    assert "evaluations of the codes are not of them and were left out" in imported.notes[-1]
    plain, codes = systolic.open(tmp_path / "plain"), systolic.open(int8.path)
    assert not plain.job.quantization
    tokens = {"tokens": np.arange(12, dtype=np.int32)[None]}
    np.testing.assert_allclose(
        outputs_of(plain.setup.steps, plain.weights, tokens),
        outputs_of(codes.setup.steps, codes.weights, tokens),
        atol=2e-4,
    )


def test_floats_of_codes_say_where_they_were_rounded(int8: Any) -> None:
    exact = floats_line(file_payload(open_source(int8.path)).restored)
    assert exact == [f"{len(int8.matrices)} quantized matrices {STAND}"]
    (rounded,) = floats_line(["bfloat16", "float32"])
    assert rounded.startswith(f"2 quantized matrices {STAND}, rounded to bfloat16: what was")


def matrices(**sizes: int) -> dict[str, Matrix]:
    """Matrices of some names and sizes."""
    return {
        name: Matrix(
            path=name,
            shape=(size, size),
            stacked=False,
            inputs=(0,),
            dtype=np.dtype("float32"),
            watched=True,
        )
        for name, size in sizes.items()
    }


class Given(Measure):
    """Costs that are known: of 4 bits those given, of int8 a hundredth."""

    def __init__(self, costs: Mapping[str, float]) -> None:
        self.costs, self.asked = costs, 0

    def fewer(self, batches: int) -> "Given":
        return self

    def lost(self, rounder: Any, formats: Mapping[str, MatrixFormat]) -> float:
        self.asked += 1
        share = {WeightFormat.int4: 1.0, WeightFormat.int8: 0.01}
        return sum(self.costs[path] * share[how.format] for path, how in formats.items())


def test_a_budget_gives_the_worst_more_bits() -> None:
    known, measure = matrices(a=64, b=64, c=64), Given({"a": 0.001, "b": 0.02, "c": 0.004})
    asked = formats_of(known, INT4, ())
    made = choose(measure, Rounder(known), asked, 0.006)
    assert made.formats == {"a": INT4, "b": INT8, "c": INT4}
    assert made.lost == pytest.approx(0.0052)
    assert [(one.path, one.lost, one.chosen) for one in made.sensitivities] == [
        ("b", 0.02, "int8"),
        ("c", 0.004, "int4 in groups of 32"),
        ("a", 0.001, "int4 in groups of 32"),
    ]
    assert measure.asked == 3 + 2
    none = choose(Given({"a": 0.0, "b": 1.0, "c": 0.0}), Rounder(known), asked, 0.005)
    assert set(none.formats) == {"a", "c"}
    assert none.sensitivities[0].chosen == "float32"
    with pytest.raises(OptionError, match="no matrix can be quantized within --budget 0"):
        choose(Given({"a": 1.0, "b": 1.0, "c": 1.0}), Rounder(known), asked, 0.0)


class Counted(Measure):
    """Accuracy of a model that is not there, and how often it was measured."""

    def __init__(self, digest: str) -> None:
        contents = SimpleNamespace(digest=digest)
        self.job = SimpleNamespace(task=None, data=SimpleNamespace(contents=lambda split: contents))  # ty: ignore[invalid-assignment]
        self.model = SimpleNamespace(weights=None)  # ty: ignore[invalid-assignment]
        self.split, self.batches, self.known, self.file = Split.validation, 2, {}, None
        self.metrics, self.asked = {"accuracy": 0.9}, 0
        self.keep("weights")

    def of(self, weights: Any) -> dict[str, float]:
        self.asked += 1
        return {"accuracy": 0.8}


def test_a_search_that_was_cut_off_measures_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYSTOLIC_CACHE", str(tmp_path))
    rounder: Any = SimpleNamespace(rounded=lambda weights, formats: None, moments={})
    for digest, asked in (("a", 2), ("a", 0), ("b", 2)):
        measure = Counted(digest)
        for how in (INT8, INT4):
            assert measure.lost(rounder, {"blocks/out": how}) == pytest.approx(0.1)
        assert measure.asked == asked
    next((tmp_path / "sensitivity").iterdir()).write_text("{")
    assert {Counted(name).known == {} for name in "ab"} == {True, False}


def test_patterns_of_matrices_that_stay() -> None:
    known = matrices(**{"blocks/mlp/down": 64, "blocks/mlp/up": 64, "blocks/out": 48})
    assert set(formats_of(known, INT4, ["down"])) == {"blocks/mlp/up", "blocks/out"}
    assert set(formats_of(known, INT4, ["blocks/mlp/*"])) == {"blocks/out"}
    assert formats_of(known, INT4, [])["blocks/out"].group == 16  # divides 48
    with pytest.raises(OptionError, match="--keep donw fits none of the matrices"):
        formats_of(known, INT4, ["donw"])
    with pytest.raises(OptionError, match="--keep leaves no matrix"):
        formats_of(known, INT4, ["*"])


def test_the_command_prints_a_table(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    given = ["--to", "int4", "--data", str(tmp_path / "text.txt"), "--auto", "--budget", "50%"]
    given += ["--repeats", "1"]
    assert main(["quantize", str(source), "--out", str(tmp_path / "a"), *given]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'a'}: int4 in groups of 64, in " in said
    assert "as matrices of the vocabulary or with" in said
    assert "unembedding, embedding\n" in said
    assert "  left as they are, 896 B: " in said
    for part in ("weights", "perplexity", "largest difference", "blocks/mlp/down", "alone"):
        assert part in said
    assert "prompt tokens 128, output tokens 16, repeats 1" in said
    for row in ("prefill here", "decode here"):
        (line,) = [one for one in said.splitlines() if row in one]
        assert len(re.findall(r"[0-9.]+ (?:µs|ms|s)", line)) == 2


@pytest.mark.slow
def test_both_are_forecast_on_slices(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the bytes of the weights that the compiled program takes."""
    given = ["--to", "int8", "--repeats", "0", "--on", "v5e-1,v6e-1", "--quick", "--json"]
    assert main(["quantize", str(source), "--out", str(tmp_path / "a"), *given]) == 0
    before, after = json.loads(capsys.readouterr().out)["speeds"]
    assert list(before["forecasts"]) == list(after["forecasts"]) == ["v5e-1", "v6e-1"]
    for name in before["forecasts"]:
        wide, narrow = before["forecasts"][name], after["forecasts"][name]
        assert narrow["weights_bytes"] < wide["weights_bytes"]
        assert wide["points"][0]["time_per_output_token_seconds"] > 0


@pytest.mark.slow
def test_a_run_is_measured_on_its_own_data(source: Path, tmp_path: Path) -> None:
    """With its adapters merged before."""
    pairs = [{"prompt": f"a question {n}", "completion": f"yes {n}"} for n in range(30)]
    file = tmp_path / "some.jsonl"
    file.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    given = {"from_": source, "data": file, "sequence": 48, "batch": 4, "steps": 4}
    adapter = {"adapter": AdapterKind.lora, "rank": 2, "alpha": 4.0}
    systolic.train("sft", run=tmp_path / "run", validation=file, **given, **adapter)
    made = quantize(tmp_path / "run", tmp_path / "out", to=INT8, on=Evaluated(batches=2))
    assert made.before is not None
    assert made.after is not None
    (metrics,) = systolic.open(tmp_path / "run").evaluate(batches=2).values()
    assert np.exp(metrics["loss"]) == pytest.approx(made.before.value, rel=1e-4)
    assert abs(made.after.lost(made.before)) < 0.01
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out", "some.jsonl"}


def test_python_writes_what_the_command_writes_and_prints_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["--to", "int4", "--group", "32", "--keep", "down", "--batches", "1", "--repeats", "0"]
    data = str(tmp_path / "text.txt")
    command = ["quantize", str(source), "--out", str(tmp_path / "a"), *words, "--data", data]
    assert main([*command, "--json", "--quiet"]) == 0
    shown, told = capsys.readouterr()
    assert told == ""
    made = systolic.quantize_model(
        str(source), tmp_path / "b", to="int4", group=32, keep=["down"], batches=1, data=data
    )
    assert capsys.readouterr() == ("", "")
    print_json(made.to_json())
    one, other = json.loads(shown), json.loads(capsys.readouterr().out)
    assert one.pop("bundle") == str(tmp_path / "a")
    assert other.pop("bundle") == str(tmp_path / "b")
    assert one.pop("seconds") > 0
    assert other.pop("seconds") > 0
    assert one == other
    assert {one.path: one.format for one in made.matrices}["blocks/query"].startswith("int4")
    files = [sorted(path.glob("*.safetensors")) for path in (tmp_path / "a", tmp_path / "b")]
    assert [one.read_bytes() for one in files[0]] == [one.read_bytes() for one in files[1]]


def test_an_interrupt_of_the_timing_leaves_the_result_to_python(
    int8: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("systolic.quantizing.quantize.quantize", lambda *_, **__: int8)
    monkeypatch.setattr("systolic.comparing.speeds.server_call", interrupted)
    made = systolic.quantize_model(source, int8.path, to=WeightFormat.int8, repeats=1)
    assert type(made.stopped_by) is KeyboardInterrupt
    assert (made.path, made.bytes_after, made.speeds) == (int8.path, int8.bytes_after, ())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"to": "int9"}, "to is 'int9'; did you mean int8?; it takes int8, int4, fp8, nf4, w8a8"),
        ({"to": INT4, "activations": True}, "activations has no int4: "),
        ({"to": INT4, "group": 3}, "group is 3, and int4 has a scale for each group"),
        ({"to": WeightFormat.fp8, "group": 32}, "group is 32, and fp8 has one scale"),
        ({"to": "int8", "budget": 0.01}, "budget has an effect with auto only"),
        ({"to": "int8", "auto": True, "budget": 1.0}, "budget is 1.0; it takes a share"),
        ({"to": "int8", "auto": True, "budget": "a%"}, "budget is 'a%'; it takes a share"),
        ({"to": "int8", "on": "v5"}, "v5 is not the name of a slice; did you mean v5e?"),
        ({"to": "int8", "batches": -1}, "batches is -1; it must be at least 0"),
    ],
)
def test_python_is_refused_what_the_command_refuses(options: Any, told: str) -> None:
    with pytest.raises(systolic.SystolicError) as raised:
        systolic.quantize_model("nowhere", "out", **options)
    assert str(raised.value).startswith(told)
