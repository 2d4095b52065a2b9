"""Programs that plain JAX reloads, for every kind of model: compared with how the model is used here."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from systolic.cli.main import main
from systolic.compiling.settings import QUIET
from systolic.core.errors import OptionError, RunError
from systolic.data.image.pictures import Preparation
from systolic.data.text.documents import Prompts
from systolic.formats.comparison import difference, joined, outputs_of
from systolic.formats.conversion import described, input_notes, metadata
from systolic.formats.examples import example_inputs
from systolic.formats.hugging_face.preprocessor import OutsidePictures
from systolic.formats.inference import exportable, run
from systolic.formats.registry import ExportSettings
from systolic.formats.stablehlo import export_stablehlo, serialized
from systolic.formats.weights import structure_of
from systolic.job import Precision
from systolic.job.data import MASK
from systolic.models.vision.config import MobileNetV2, Pixels
from tests.formats.programs import tiny
from tests.steps.tiny import MODEL

DEFAULT = ("embeddings", "own")
"""Kinds of models that the default tests export; the others are slow."""
OTHERS = sorted(set(tiny.JOBS) - set(DEFAULT))

ALONE = """
import sys
for name in ("systolic", "flax", "tensorflow", "torch"):
    sys.modules[name] = None  # an import of it fails
import os, numpy as np
os.chdir(sys.argv[1])
text = open("README.txt").read()
code = text.partition("safetensors alone:")[2].partition("manifest.json")[0]
inputs = dict(np.load(sys.argv[2]))
lines = [line for line in code.splitlines() if not line.startswith("inputs = ")]
exec("\\n".join(lines))
np.savez(sys.argv[3], **outputs)
"""
"""Runs the README's own lines on the inputs of a file."""

AHEAD = """
import sys
sys.modules["systolic"] = None
import glob, json
import jax, jax.export
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, Mesh
from safetensors import safe_open
import numpy as np
folder = sys.argv[1]
about = json.load(open(folder + "/manifest.json"))["functions"]["logits"]
program = jax.export.deserialize(bytearray(open(folder + "/" + about["program"], "rb").read()))
slice = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2")
mesh = Mesh(np.array(slice.devices), ("batch",))
whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))
(file,) = glob.glob(folder + "/weights*.safetensors")
with safe_open(file, "np") as weights:
    shapes = {key: weights.get_slice(key).get_shape() for key in weights.keys()}
params = {key: jax.ShapeDtypeStruct(shape, "float32", sharding=whole) for key, shape in shapes.items()}
sizes = {"batch": 8, "sequence": 128}
inputs = {
    key: jax.ShapeDtypeStruct([sizes.get(dim, dim) for dim in one["shape"]], one["dtype"], sharding=split)
    for key, one in about["inputs"].items()
}
lowered = jax.jit(program.call).trace(params, inputs).lower(lowering_platforms=("tpu",))
compiled = lowered.compile()
print(compiled.as_text().count("feature_group_count="))
print(json.dumps(int(compiled.memory_analysis().argument_size_in_bytes)))
"""
"""Compiles a program for four chips of TPU v6e, from the files alone."""


def exported(name: str, folder: Path, **sizes: int) -> Any:
    """A model of a kind, its example inputs, and the export at ``folder``."""
    model = tiny.model(tiny.JOBS[name](), **sizes)
    examples = example_inputs(model)
    made = export_stablehlo(model, examples, folder, ExportSettings(), lambda _: None)
    return model, examples, made


def here(name: str, model: Any, inputs: Any, other: Any) -> np.ndarray:
    """The first function's outputs as this package computes them for its own use."""
    job = tiny.JOBS[name]()
    steps, weights = tiny.local(job), tiny.weights(job)
    given = dict(inputs)
    if name in ("decoder", "windows", "sliding", "learned"):
        return outputs_of(steps, weights, given)
    if name == "masked":
        return outputs_of(steps, weights, {"tokens": given["tokens"]})
    if name == "whisper":
        return outputs_of(steps, weights, {**given, "tokens": other["tokens"]})
    rows = len(next(iter(given.values())))
    batch = {MASK: np.ones(rows, np.float32), **given}
    if name == "embeddings":
        segments = batch.pop(MASK)
        positions = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
        batch |= {"segments": segments, "positions": positions}
    if name == "own":
        batch["y"] = np.zeros(rows, np.float32)
    if "image" in given:
        batch = {"image": given["image"].astype(np.uint8)}
        batch |= {"label": np.zeros(rows, np.int32), MASK: np.ones(rows, np.float32)}
    (*_, made) = jax.jit(steps.predict)(weights.params, weights.model_state, batch).values()
    return np.asarray(made)


@pytest.mark.parametrize(
    "name", [*DEFAULT, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_a_program_computes_what_the_model_does(name: str, tmp_path: Path) -> None:
    model, examples, made = exported(name, tmp_path / "out")
    assert set(made.differences) == set(model.functions)
    for function in model.functions.values():
        assert made.differences[function.name].max_relative < 1e-5
    first = model.function()
    inputs = examples.inputs[first.name]
    if name == "whisper":
        # What is written first is what the logits say after the prompt.
        assert list(model.functions) == ["transcribe", "encode", "decode"]
        given = {**examples.inputs["decode"]}
        prompt = np.tile(np.array([[100, 98]], np.int32), (examples.rows, 1))
        found = model.source_outputs("decode", {**given, "tokens": prompt})["logits"]
        wanted = here(name, model, examples.inputs["encode"], {"tokens": prompt})
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        written = model.source_outputs("transcribe", inputs)["tokens"]
        last = np.delete(wanted[:, -1], [3], axis=1).argmax(-1)
        np.testing.assert_array_equal(written[:, 0], last + (last >= 3))
        return
    found = run(first.call, model.params, inputs)
    wanted = here(name, model, inputs, None)
    (value,) = found.values()
    if "image" in inputs:  # predict lists probabilities, best first
        chances = np.asarray(jax.nn.softmax(value))
        value = -np.sort(-chances, axis=-1)[:, : wanted.shape[1]]
    np.testing.assert_allclose(value, wanted, atol=1e-5)


def test_what_is_written_before_a_text_is_said() -> None:
    job = tiny.JOBS["embeddings"]()
    job = replace(job, data=replace(job.data, before="query: ", lower=True))
    assert described(job) == {"before": "query: ", "lower": True}
    assert metadata(job) == {"before": "query: ", "lower": "true"}
    (before, lower) = input_notes(job)
    assert before.startswith("'query: ' is written before each text here, which no program does")
    assert lower.startswith("texts are read in lower case here")
    assert not input_notes(tiny.JOBS["decoder"]())


def test_what_is_done_to_a_pictures_size_is_said() -> None:
    data = OutsidePictures(preparation=Preparation(side=64, shorter=72), channels=3, classes=())
    job = replace(tiny.JOBS["digits"](), data=data, model=MobileNetV2(pixels=Pixels(size=64)))
    pictures = described(job)["pictures"]
    assert pictures["size"] == {"shortest_edge": 72}
    assert pictures["crop_size"] == {"height": 64, "width": 64}
    assert (pictures["do_resize"], pictures["do_center_crop"]) == (True, True)
    (note,) = input_notes(job)
    assert "72" in note
    assert "pictures" not in described(tiny.JOBS["digits"]())


@pytest.mark.slow
def test_the_readme_reloads_it_without_this_package(tmp_path: Path) -> None:
    """The README's lines, in a process where an import of ours fails, on another batch than was compared."""
    model, examples, made = exported("embeddings", tmp_path / "out")
    inputs = {
        key: np.concatenate([one, one[::-1]])[:, :9]
        for key, one in examples.inputs["embedding"].items()
    }
    np.savez(tmp_path / "inputs.npz", **inputs)
    files = [str(tmp_path / one) for one in ("out", "inputs.npz", "outputs.npz")]
    done = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = model.source_outputs("embedding", inputs)
    with np.load(tmp_path / "outputs.npz") as found:
        assert difference(wanted, dict(found)).max_relative < 1e-5
    assert made.bytes == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    about = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert about["functions"]["embedding"]["inputs"]["tokens"]["shape"] == ["batch", "sequence"]
    assert about["functions"]["embedding"]["outputs"]["embedding"]["shape"] == ["batch", 32]
    assert about["platforms"] == ["cpu", "tpu", "cuda"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "windows", "mobilenet"])
def test_it_compiles_ahead_of_time_for_a_slice(name: str, tmp_path: Path) -> None:
    """From the artifact alone, for four chips of v6e, with examples split over them."""
    model, _, _ = exported(name, tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-I", "-c", AHEAD, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **QUIET},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grouped, argument_bytes = map(json.loads, done.stdout.splitlines()[-2:])
    assert argument_bytes >= sum(array.nbytes for array in model.params.values())
    if name == "mobilenet":  # what is fast on a CPU is not what a TPU runs
        assert grouped > 0
        (function,) = model.functions.values()
        program = jax.export.deserialize(bytearray((tmp_path / "out/logits.bin").read_bytes()))
        here = jax.jit(program.call).lower(model.params, function.abstract({"batch": 2}))
        assert "feature_group_count=" not in here.compile().as_text()


def test_sizes_can_be_fixed(tmp_path: Path) -> None:
    model, examples, made = exported("decoder", tmp_path / "out", batch=3, sequence=12)
    (function,) = model.functions.values()
    assert str(function.inputs["tokens"]) == "int32[3, 12]"
    assert examples.rows == 6  # whole batches
    assert made.differences["logits"].examples == 6
    # Rotary embeddings have no table, and the model a context.
    with pytest.raises(OptionError, match=r"--sequence is 1025, and .* takes texts of 1024 tokens"):
        exportable(model.job, {}, sizes={"sequence": 1025})
    with pytest.raises(OptionError, match=r"--sequence is 99, and .* takes .*32"):
        example_inputs(tiny.model(tiny.JOBS["learned"](), sequence=99))


def test_a_comparison_without_memory_is_refused() -> None:
    """Killed by the system otherwise: attention has a number for each two tokens."""
    job = replace(tiny.decoder(), data=Prompts(sequence=32, positions=1 << 20))
    shapes = structure_of(job.model)
    params = {**shapes.params, **shapes.model_state}
    model = exportable(job, params, sizes={"sequence": 1 << 20})
    with pytest.raises(OptionError, match=r"^--sequence 1048576: .* takes .* TB of memory, and"):
        model.check_memory("logits", {"tokens": np.zeros((1, 1 << 20), np.int32)})


def test_bfloat16_is_near(tmp_path: Path) -> None:
    """Computed in bfloat16 with outputs in float32: compared with the source in the same precision."""
    job = tiny.JOBS["digits"]()
    made = tiny.weights(job)
    given = {**made.params, **made.model_state}
    model = exportable(job, given, Precision.bf16)
    examples = example_inputs(model)
    (function,) = model.functions.values()
    found = run(function.call, given, examples.inputs["logits"])
    assert found["logits"].dtype == np.float32
    wide = exportable(job, given).source_outputs("logits", examples.inputs["logits"])
    assert 1e-5 < difference(wide, found).max_relative < 0.05


def test_what_bfloat16_costs_is_said(tmp_path: Path) -> None:
    """The source is computed in float32, whatever the artifact computes in."""
    job = tiny.JOBS["digits"]()
    made = tiny.weights(job)
    model = exportable(job, {**made.params, **made.model_state}, Precision.bf16)
    examples = example_inputs(model)
    done = export_stablehlo(model, examples, tmp_path / "out", ExportSettings(), lambda _: None)
    assert 1e-4 < done.differences["logits"].max_relative < 0.05


def test_examples_are_the_recipes_own() -> None:
    model = tiny.model(tiny.JOBS["digits"]())
    examples = example_inputs(model, rows=3)
    assert (examples.origin, examples.rows) == ("validation data", 3)
    image = examples.inputs["logits"]["image"]
    assert (image.shape, image.dtype) == ((3, 8, 8, 1), np.float32)
    assert image.max() == 255
    assert [one["image"].shape[0] for one in examples.calls(model.function(), 1)] == [1, 1, 1]
    own = example_inputs(tiny.model(tiny.JOBS["own"]()))
    assert sorted(own.inputs["outputs"]) == ["scale", "x"]  # the outputs do not depend on y


def test_texts_are_longer_than_windows_and_one_call_has_other_sizes() -> None:
    wide = tiny.model(tiny.decoder(replace(tiny.WINDOWED, window=72)))
    made = example_inputs(wide)
    (all_of_them, other) = made.compared(wide.function())
    assert all_of_them["tokens"].shape == (2, 88)  # as many tokens as four rows of others have
    assert other["tokens"].shape == (1, 85)
    padded = tiny.model(tiny.JOBS["embeddings"]())
    examples = example_inputs(padded)
    *_, other = examples.compared(padded.function())
    tokens = examples.inputs["embedding"]["tokens"].shape[1]
    assert other["mask"].shape == (1, tokens - 3)
    assert list(np.unique(other["mask"])) == [0, 1]
    fixed = tiny.model(tiny.JOBS["decoder"](), batch=2, sequence=8)
    assert len(example_inputs(fixed).compared(fixed.function())) == 2


def test_files_are_examples(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.full((8, 8, 1), 7, np.uint8))
    model = tiny.model(tiny.JOBS["digits"]())
    examples = example_inputs(model, files=[tmp_path / "one.npy"])
    assert (examples.origin, examples.rows) == ("files", 1)
    assert (examples.inputs["logits"]["image"] == 7).all()


def test_a_task_without_outputs_is_refused() -> None:
    with pytest.raises(OptionError, match="LossOnly names no outputs of the model"):
        exportable(tiny.own(tiny.LossOnly()), {})


def test_differences_are_found(tmp_path: Path) -> None:
    source = {"a": np.array([[1.0, 2.0], [4.0, 3.0]])}
    same = difference(source, source)
    assert (same.max_abs, same.max_relative, same.argmax_agreement) == (0, 0, 1)
    off = difference(source, {"a": source["a"] + [[0, -1.5], [0, 0]]})
    assert (off.max_abs, off.max_relative, off.argmax_agreement) == (1.5, 0.375, 0.5)
    vectors = difference({"embedding": source["a"]}, {"embedding": 2 * source["a"]})
    assert vectors.argmax_agreement is None
    assert "(1 of the largest output, cosine 1.00000 in the mean, 1.00000 at least) on" in str(
        vectors
    )
    nan = difference(source, {"a": source["a"] * np.nan})
    for one in (off, nan):
        with pytest.raises(RunError, match="nothing was kept"):
            one.check("it", 1e-4)
    with pytest.raises(RunError, match="output a of the exported program is missing"):
        difference(source, {})


def test_calls_of_several_sizes_are_one_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("systolic.formats.comparison.PART", 7)
    rng = np.random.default_rng(0)
    long, short = rng.normal(size=(2, 9, 5)), rng.normal(size=(1, 3, 5))
    long[1, 2, 3] = 40
    away = short.copy()
    away[0, 1, np.argmax(short[0, 1])] -= 4
    found = joined([({"x": long}, {"x": long}), ({"x": short}, {"x": away})], 2)
    assert (found.examples, found.max_abs) == (2, pytest.approx(4))
    assert found.max_relative == pytest.approx(0.1)
    assert found.argmax_agreement == pytest.approx(20 / 21)


def test_another_token_is_no_small_error() -> None:
    tokens = np.array([[400, 1029, 7000, 50257]])
    difference({"tokens": tokens}, {"tokens": tokens.astype(np.int64)}).check("it", 1e-4)
    near = difference({"tokens": tokens}, {"tokens": tokens + np.array([0, 2, -1, 0])})
    near.check("it, in bfloat16", 0.1)
    assert "2 whole numbers are others" in str(near)
    with pytest.raises(RunError, match="it returns 2 whole numbers"):
        near.check("it", 1e-4)


def test_an_operation_of_one_platform_is_one_line() -> None:
    from jax.experimental import pallas as pl

    model = tiny.model(tiny.JOBS["own"]())
    (function,) = model.functions.values()

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...]

    def call(params: Any, inputs: Any) -> Any:
        x = inputs["x"]
        return {"y": pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 3), x.dtype))(x)}

    with pytest.raises(RunError, match="can't be exported for cpu, tpu, cuda"):
        serialized(replace(function.fixed({"batch": 4}), call=call), model.params)

    def reads(params: Any, inputs: Any) -> Any:
        return {"y": inputs["x"][: int(inputs["x"].shape[0])]}

    with pytest.raises(OptionError, match=r"with batch free .*; fix them with --batch N"):
        serialized(replace(function, call=reads), model.params)

    def counts(params: Any, inputs: Any) -> Any:
        return {"y": inputs["x"] + len(range(inputs["x"].shape[0]))}

    with pytest.raises(OptionError, match=r"with batch free .*; fix them with --batch N"):
        serialized(replace(function, call=counts), model.params)


def test_a_window_takes_texts_of_any_length() -> None:
    """As Gemma's, without a soft cap."""
    made = tiny.model(tiny.JOBS["sliding"]()).outputs("logits")["logits"]
    assert str(made) == "float32[batch, sequence, 64]"


@pytest.mark.slow
def test_a_mixture_with_slots_needs_fixed_sizes(tmp_path: Path) -> None:
    """The number of its slots is made of the number of tokens."""
    made = tiny.decoder(replace(MODEL, experts=4))
    with pytest.raises(OptionError, match="fix them with --batch N --sequence N"):
        serialized(tiny.model(made).function(), tiny.model(made).params)
    assert serialized((fixed := tiny.model(made, batch=2, sequence=8)).function(), fixed.params)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a run: the line of the comparison, JSON, and mistakes that leave nothing."""
    assert main(["train", "digits", "--steps", "20", "--run", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    command = ["export", str(tmp_path / "run"), "--to", "stablehlo"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "logits: largest error" in told
    assert "in the order of its outputs: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in told
    assert main([*command, "--out", str(tmp_path / "two"), "--batch", "2", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["functions"]["logits"]["max_relative"] < 1e-5
    assert made["compared_on"] == "validation data"
    for more, told in (
        (["--out", str(tmp_path / "out")], "exists; choose another --out"),
        (["--out", str(tmp_path / "x"), "--to", "hf", "--batch", "2"], "--to hf writes none"),
        (["--out", str(tmp_path / "x"), "--inputs", str(tmp_path / "gone.npy")], "gone.npy"),
    ):
        assert main([*command, *more]) != 0
        (line,) = [
            one for one in capsys.readouterr().err.splitlines() if one.startswith("systolic: ")
        ]
        assert told in line
        assert not (tmp_path / "x").exists()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "run", "two"]
