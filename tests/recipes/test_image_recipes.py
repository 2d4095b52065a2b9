"""The image recipes as a person runs them, on data made here or brought by scikit-learn."""

import json
from pathlib import Path
from typing import Any, get_type_hints

import jax
import numpy as np
import pytest
from PIL import Image

from systolic import recipes
from systolic.cli.main import main
from systolic.core.errors import NotFoundError, OptionError
from systolic.data.image.sets import DEBIAN, Digits
from systolic.job import Layout, OptimizerChange, Read, Schedule, Split
from systolic.job.data import MASK
from systolic.models.vision.config import Stem
from systolic.recipes.digits import DigitsModel, digits
from systolic.recipes.fashion import CLASSES, FashionModel, fashion
from systolic.recipes.image import PRESETS, ImageModel, image, network
from systolic.runs import Run
from systolic.steps.step_functions import StepFunctions, schedule
from systolic.steps.target import MeshTarget, make_mesh
from tests.tiers import some


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def systolic(capsys: pytest.CaptureFixture[str], *args: Any) -> dict[str, Any]:
    """What a verb prints as JSON."""
    assert main([*map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_digits_trains_evaluates_and_predicts(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    summary = systolic(capsys, "train", "digits", "--steps", 60, "--run", run)
    accuracy = summary["final"]["metrics"]["test_accuracy"]
    assert accuracy > 0.95
    assert summary["examples_per_second"] > 0
    batch = next(Digits().open(Read(split=Split.test, batch=20, shuffle=False)))
    files = []
    for index, picture in enumerate(batch["image"]):
        files.append(tmp_path / f"{index}.png")
        Image.fromarray(picture[:, :, 0]).save(files[-1])
    found = systolic(capsys, "predict", run, *files)["predictions"]
    names = [answer["label"] for answer in found]
    assert sum(int(name) == label for name, label in zip(names, batch["label"], strict=True)) >= 18
    assert all(0.1 <= answer["probability"] <= 1 for answer in found)
    assert len(found[0]["top"]) == 5
    files[1].write_bytes(files[1].read_bytes()[:40])
    missing = tmp_path / "missing.png"
    assert main(["predict", str(run), *map(str, [*files[:3], missing]), "--json"]) == 1
    out, err = capsys.readouterr()
    again = json.loads(out)["predictions"]
    assert [again[0], again[2]] == [found[0], found[2]], "the rest is answered"
    assert str(files[1]) in again[1]["error"]
    assert str(missing) in again[3]["error"]
    assert err.splitlines()[-1] == "systolic: no answer for 2 of 4 files; see the lines above"


@pytest.mark.slow
def test_image_trains_on_a_folder_of_pictures(tmp_path: Path, capsys) -> None:
    rng = np.random.default_rng(0)
    for name, colour in (("red", 0), ("green", 1), ("blue", 2)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(20):
            pixels = rng.integers(0, 100, (20, 24, 3)).astype(np.uint8)
            pixels[..., colour] += 100
            Image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{index}.png")
    (tmp_path / "pictures" / "later").mkdir()
    (tmp_path / "pictures" / "red" / "7.png").write_bytes(b"damaged")
    summary = systolic(
        capsys,
        *("train", "image", "--path", tmp_path / "pictures", "--model", "vit-ti", "--size", 16),
        *("--patch", 8, "--steps", 12, "--batch", 12, "--optimizer.learning-rate", 1e-3),
        *("--run", tmp_path / "run"),
    )
    assert summary["final"]["metrics"]["test_accuracy"] == 1.0
    assert summary["skipped_files"] == 1
    told = {r["name"]: r["detail"] for r in Run.open(tmp_path / "run").records("event")}
    assert "red/7.png is not a picture" in told["skipped_file"]
    assert "later has no picture" in told["data"]

    # The folder is gone: what was trained is used without, and evaluated on pictures elsewhere.
    (tmp_path / "pictures").rename(tmp_path / "elsewhere")
    for name in ("red", "green"):
        file = tmp_path / "elsewhere" / name / "3.png"
        (answer,) = systolic(capsys, "predict", tmp_path / "run", file)["predictions"]
        assert answer["label"] == name
    (tmp_path / "elsewhere" / "blue").rename(tmp_path / "blue")
    measured = systolic(capsys, "eval", tmp_path / "run", "--path", tmp_path / "elsewhere")
    assert measured["metrics"][str(tmp_path / "elsewhere")]["accuracy"] == 1.0
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"systolic: {tmp_path / 'pictures'} is not a folder; give {tmp_path / 'run'} other data with --path [not-found]"
    )


@pytest.mark.parametrize(
    "model",
    some(
        list(ImageModel),
        [ImageModel.resnet18, ImageModel.resnet50, ImageModel.mobilenet_v2, ImageModel.vit_ti],
    ),
)
def test_every_network_builds_for_the_size(model: ImageModel) -> None:
    layout = Layout().on(1)
    mesh = make_mesh(layout, jax.devices()[:1])
    target = MeshTarget(platform="cpu", layout=layout, dtype="float32", mesh=mesh)
    patch = {"patch": 8} if model in PRESETS else {}
    job = image(path=Path("."), model=model, size=32, **patch, classes=10)
    of = StepFunctions(job, target)
    assert of.network.num_parameters > 2e6
    batch = {
        name: jax.ShapeDtypeStruct((2, *field.shape), field.dtype)
        for name, field in job.data.fields().items()
    }
    batch[MASK] = jax.ShapeDtypeStruct((2,), "float32")
    answer = jax.eval_shape(of.predict, of.shapes.params, of.shapes.model_state, batch)
    assert answer["label"].shape == (2, 5)


def test_small_pictures_keep_their_resolution() -> None:
    stems = [network(ImageModel.resnet18, size, 16, 10).stem for size in (32, 224)]
    assert stems == [Stem.small, Stem.imagenet]


def test_options_of_another_network_are_one_line() -> None:
    for model, changes, says in (
        (ImageModel.mobilenet_v2, {"patch": 8}, "--patch is for vision transformers only"),
        (ImageModel.mobilenet_v2, {"stem": Stem.half}, "--stem is for residual networks only"),
        (ImageModel.vit_ti, {"norm_examples": 8}, "--norm-examples is for networks with batch"),
    ):
        with pytest.raises(OptionError, match=says) as caught:
            image(path=Path("."), model=model, classes=10, **changes)
        assert "\n" not in str(caught.value)
    job = image(path=Path("."), model=ImageModel.mobilenet_v2, classes=10, batch=64)
    assert job.optimizer.learning_rate == 0.045 / 4


def test_the_default_learning_rate_follows_the_batch() -> None:
    rates = [
        image(path=Path("."), classes=10, batch=batch).optimizer.learning_rate
        for batch in (256, 1024)
    ]
    assert rates == [0.1, 0.4]
    change = OptimizerChange(learning_rate=0.3)
    given = image(path=Path("."), classes=10, batch=1024, optimizer=change)
    assert given.optimizer.learning_rate == 0.3
    with pytest.raises(OptionError, match=r"add --optimizer\.learning-rate"):
        image(path=Path("."), classes=10, batch_per_device=8)
    open_batch = image(path=Path("."), classes=10, batch_per_device=8, optimizer=change)
    assert open_batch.batch.per_device == 8


@pytest.mark.parametrize("name", recipes.shipped())
def test_every_recipe_has_the_common_options(name: str) -> None:
    hints = get_type_hints(recipes.find(name).function)
    assert {"batch", "batch_per_device", "steps", "optimizer", "schedule"} <= set(hints)
    assert "learning_rate" not in hints
    assert "warmup" not in hints


def test_a_short_run_warms_up_for_a_tenth_of_its_steps_unless_told_otherwise() -> None:
    assert digits(steps=100).schedule.warmup == 10
    assert digits(steps=100, schedule=Schedule(warmup=40)).schedule.warmup == 40
    assert digits().schedule.warmup == 30


@pytest.mark.parametrize("name", ["lm", "bytes"])
def test_a_short_language_model_run_warms_up_for_a_tenth_and_decays(name: str) -> None:
    recipe = recipes.find(name)
    job = recipe({"steps": 40})
    assert job.schedule.warmup == 4
    note = job.schedule.note(40)
    assert note is not None
    assert "the job has 40 steps, so it is shortened to 4" in note
    rate = schedule(job.schedule, 40, 1.0)
    assert [float(rate(step)) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    # A decay to its last share, but for the step that would follow.
    assert float(rate(39)) < job.schedule.final + 0.05
    given = recipe({"steps": 40, "schedule": Schedule(warmup=39)}).schedule
    assert (given.warmup, given.note(40)) == (39, None)
    assert [recipe({"steps": n}).schedule.warmup for n in (1, 2, 9)] == [0, 1, 1]
    assert recipe({}).schedule.note(1000) is None


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--patch 15 does not divide --size 224"):
        image(path=tmp_path, model=ImageModel.vit_s, patch=15, classes=3)
    with pytest.raises(OptionError, match="classes is 0"):
        image(path=tmp_path, classes=0)
    with pytest.raises(NotFoundError, match="none"):
        image(path=tmp_path / "none")
    job = fashion(path=DEBIAN / "fashion-nowhere")
    with pytest.raises(NotFoundError, match="apt-get install dataset-fashion-nowhere"):
        job.data.size(Split.train)


def test_fashion_names_its_classes() -> None:
    for model in FashionModel:
        job = fashion(model=model)
        assert job.data.labels() == CLASSES
        assert len(CLASSES) == job.model.num_classes == 10


@pytest.mark.slow
@pytest.mark.parametrize("model", DigitsModel)
def test_digits_reaches_its_accuracy(tmp_path: Path, capsys, model: DigitsModel) -> None:
    assert digits(model=model).steps <= 800
    args = ("train", "digits", "--model", model.value, "--run", tmp_path / "run")
    assert systolic(capsys, *args)["final"]["metrics"]["test_accuracy"] >= 0.97


@pytest.mark.slow
@pytest.mark.skipif(
    not (DEBIAN / "fashion-mnist").is_dir(), reason="apt-get install dataset-fashion-mnist"
)
def test_fashion_reaches_its_accuracy(tmp_path: Path, capsys) -> None:
    args = ("train", "fashion", "--run", tmp_path / "run")
    assert systolic(capsys, *args)["final"]["metrics"]["test_accuracy"] >= 0.9
