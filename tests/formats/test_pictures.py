"""Image models of transformers and torchvision, with the steps before them, as models that label files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from sklearn.datasets import load_sample_images

import systolic
from systolic.core.errors import DataError, OptionError
from systolic.data.image.images import Images
from systolic.formats.command import import_model
from systolic.formats.hugging_face.preprocessor import PREPROCESSOR, fields_of_job, preprocessor
from systolic.formats.source import open_source
from systolic.formats.torch import open_state_dict, resnet, resnet_name
from systolic.job import Batch, Job
from systolic.models.vision.config import Pixels, Pooling, Positions, ViT
from systolic.steps.tasks import Classification
from tests.formats.foreign_images import picture
from tests.formats.foreign_images import resnet as small_resnet
from tests.runs import bundled
from tests.tiers import some

RECORDED = Path(__file__).parent.parent / "recorded" / "torchvision_names.json"

PLAIN_FIELDS = {
    "image_processor_type": "CLIPFeatureExtractor",
    "do_resize": True,
    "size": {"height": 224, "width": 224},
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTImageProcessorPil", {}),
    "vit-cut": (
        "ViTImageProcessorPil",
        {
            "size": {"height": 250, "width": 250},
            "do_center_crop": True,
            "crop_size": {"height": 225, "width": 225},
        },
    ),
    "bytes": ("ViTImageProcessorPil", {"do_normalize": False, "resample": 3}),
    "scaled": ("ViTImageProcessorPil", {"rescale_factor": 1 / 127.5}),
    "resnet": ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 224}}),
    "convnext-384": ("ConvNextImageProcessorPil", {}),
    "mobilenet": ("MobileNetV2ImageProcessorPil", {}),
    "clip": ("CLIPImageProcessorPil", {}),
    "deit": ("DeiTImageProcessorPil", {}),
    "too-small": (
        "MobileNetV2ImageProcessorPil",
        {"size": {"shortest_edge": 101}, "crop_size": {"height": 128, "width": 128}},
    ),
}


@pytest.mark.parametrize(("name", "fields"), PROCESSORS.values(), ids=PROCESSORS.keys())
@pytest.mark.parametrize("upright", [False, True])
def test_pixels_are_those_of_transformers(
    name: str, fields: dict[str, Any], upright: bool, tmp_path: Path
) -> None:
    picture = Image.fromarray(load_sample_images().images[0])
    picture = picture.rotate(90, expand=True) if upright else picture
    picture.save(tmp_path / "china.png")
    theirs = getattr(transformers, name)(**fields)
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / PREPROCESSOR).read_text())
    steps = preprocessor(written, PREPROCESSOR)
    ours = steps.preparation.apply(tmp_path / "china.png", 3)
    expected = np.moveaxis(theirs(picture)["pixel_values"][0], 0, -1)
    made = (ours / 255 - np.array(steps.mean)) / np.array(steps.std)
    np.testing.assert_allclose(made, expected, atol=1e-5)
    assert 30 < ours.std() < 100


def test_fields_that_a_file_leaves_out_are_its_processors_own() -> None:
    """Old files of the hub name the steps' class and little else."""
    old = {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 224, "crop_pct": 0.875}
    steps = preprocessor({**old, "image_mean": [0.1, 0.2, 0.3]}, "it").preparation
    assert (steps.side, steps.shorter, steps.resample.value) == (224, 256, "bicubic")
    steps = preprocessor({"feature_extractor_type": "ViTFeatureExtractor", "size": 384}, "it")
    assert (steps.preparation.side, steps.preparation.shorter) == (384, None)
    assert steps.mean == steps.std == (0.5, 0.5, 0.5)
    for fields, says in (
        ({"image_processor_type": "CLIPImageProcessor"}, "defaults, which are known of ConvNext"),
        ({"do_pad": True}, "has do_pad"),
        ({"rescale_offset": True}, "has rescale_offset, which this import does not follow"),
        ({"resample": 9}, "has resample 9; it takes 0 to 5"),
        ({"image_processor_type": "LevitImageProcessor"}, "a LevitImageProcessor, whose steps"),
        ({**PLAIN_FIELDS, "size": 224}, "has size 224, which each processor reads in its own way"),
        ({**PLAIN_FIELDS, "resample": None}, "write resample into it"),
        ({**PLAIN_FIELDS, "do_center_crop": True}, "write crop_size into it"),
        ({"size": {"height": 2, "width": 3}}, "only squares"),
        ({"size": {"shortest_edge": 256}, "image_processor_type": "ViT"}, "does not crop"),
        ({"do_resize": False}, "neither resizes nor crops"),
    ):
        with pytest.raises(OptionError, match=says) as caught:
            preprocessor(fields, "it")
        assert "\n" not in str(caught.value)


def test_a_folder_of_transformers_labels_files_as_transformers_does(tmp_path: Path, capsys) -> None:
    folder, file = tmp_path / "cats", picture(tmp_path)
    model = small_resnet(folder)
    processor = transformers.ConvNextImageProcessorPil.from_pretrained(folder)
    with torch.no_grad():
        inputs = processor(Image.open(file), return_tensors="pt")
        chances = model(**inputs).logits.softmax(-1)[0].numpy()
    order = chances.argsort()[::-1][:5]
    opened = systolic.open(folder)
    answer = opened.predict(file)[0]
    assert list(answer["top"]) == [f"kind {index}" for index in order]
    np.testing.assert_allclose(list(answer["top"].values()), chances[order], rtol=1e-3)
    assert answer["label"] == f"kind {order[0]}"

    bundle = import_model(folder, tmp_path / "bundle", parity=False).path
    assert systolic.open(bundle).predict([file]) == [answer]
    assert open_source(bundle).model == open_source(folder).model

    from systolic.cli.main import main

    assert main(["predict", str(bundle), str(file)]) == 0
    told = capsys.readouterr().out
    assert f"label kind {order[0]}" in told
    assert f"kind {order[4]} {chances[order[4]]:.4f}" in told

    # Class folders are evaluated with the same steps before the model.
    classes = tmp_path / "pictures"
    for index in (order[0], order[1]):
        (classes / f"kind {index}").mkdir(parents=True)
        (classes / f"kind {index}" / "china.png").write_bytes(file.read_bytes())
    metrics = opened.evaluate(path=classes)[str(classes)]
    assert metrics["accuracy"] == 0.5
    expected = -np.log(chances[order[:2]]).mean()
    assert metrics["loss"] == pytest.approx(expected, rel=1e-3)


def test_a_model_without_names_says_so_and_a_vit_of_another_size_is_refused(tmp_path: Path) -> None:
    folder, file = tmp_path / "cats", picture(tmp_path)
    small_resnet(folder, names=False)
    opened = systolic.open(folder)
    assert opened.warnings == [
        "the model does not say the names of its classes; labels are their numbers"
    ]
    assert opened.predict(file)[0]["label"].isdigit()
    (folder / PREPROCESSOR).unlink()
    warned = systolic.open(folder).warnings
    assert len(warned) == 2
    assert "has no preprocessor_config.json, so how it wants its pictures is a guess" in warned[1]
    assert "224 x 224 from the centre, mean 0.485, 0.456, 0.406 and deviation" in warned[1]
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=32,
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessorPil().save_pretrained(tmp_path / "vit")
    with pytest.raises(OptionError, match="makes images of 224 pixels, and the model takes 32"):
        systolic.open(tmp_path / "vit")


def test_names_of_torchvisions_resnets_are_those_of_transformers() -> None:
    recorded = json.loads(RECORDED.read_text())
    for kind in ("resnet18", "resnet50"):
        shapes = {name: torch.zeros(shape, device="meta") for name, shape in recorded[kind].items()}
        config = transformers.ResNetConfig(**resnet(shapes))
        with torch.device("meta"):
            theirs = transformers.ResNetForImageClassification(config).state_dict()
        found = {resnet_name(name): tensor.shape for name, tensor in shapes.items()}
        assert found == {name: tensor.shape for name, tensor in theirs.items()}


def test_a_file_of_pickled_objects_is_not_executed(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    file = tmp_path / "model.pth"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (ran,))

    torch.save({"weights": Evil()}, file)
    with pytest.raises(DataError, match="more than tensors, which are not executed") as caught:
        open_state_dict(file)
    assert "\n" not in str(caught.value)
    assert not ran.exists()
    torch.save({"anything": torch.zeros(2)}, file)
    with pytest.raises(OptionError, match="no model that is known"):
        open_state_dict(file)
    file.write_bytes(b"no file of torch")
    with pytest.raises(DataError, match="is damaged"):
        open_state_dict(file)


def test_equal_names_of_classes_stay_apart(tmp_path: Path) -> None:
    folder = tmp_path / "cats"
    small_resnet(folder)
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {str(number): "crane" for number in range(7)}
    (folder / "config.json").write_text(json.dumps(config))
    labels = systolic.open(folder).job.data.labels()
    assert labels[:3] == ("crane", "crane (1)", "crane (2)")
    assert replace(systolic.open(folder).job.data).notes() == ()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a small ViT on digits, and its Bundle."""
    folder = tmp_path_factory.mktemp("trained")
    job = bundled.job("vit", folder)
    theirs = {"pooling": Pooling.token, "positions": Positions.learned, "token_position": True}
    model = replace(bundled.MODELS["vit"], **theirs)
    run = folder / "run"
    systolic.train(replace(job, model=model), run=run)
    return run, systolic.export(run, folder / "bundle", to="bundle").path


@pytest.mark.parametrize("kind", some(["run", "bundle"], ["bundle"]))
def test_a_trained_model_leaves_with_its_preparation_and_its_classes(
    kind: str, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    systolic.export(trained[kind == "bundle"], home, to="hf")
    pixels = np.random.default_rng(0).integers(0, 255, (12, 8), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "three.png")
    wanted, found = (
        next(iter(systolic.open(path).predict([tmp_path / "three.png"])))
        for path in (trained[0], home)
    )
    assert (found["label"], list(found["top"])) == (wanted["label"], list(wanted["top"]))
    assert found["top"] == pytest.approx(wanted["top"], abs=1e-5)
    processor = transformers.AutoImageProcessor.from_pretrained(home)
    assert (*processor.image_mean, *processor.image_std) == (0.305, 0.376)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(home)
    with torch.no_grad():
        given = processor(Image.open(tmp_path / "three.png"), return_tensors="pt")
        chances = theirs(**given).logits.softmax(-1)[0]
    assert theirs.config.id2label[int(chances.argmax())] == wanted["label"]
    assert float(chances.max()) == pytest.approx(max(wanted["top"].values()), abs=1e-4)


def test_pictures_of_a_folder_leave_with_nearly_the_same_pixels(tmp_path: Path) -> None:
    """Cut and resized at once here, one after the other there."""
    data = Images(path=tmp_path, side=56, classes=("a", "b"))
    model = ViT(num_classes=2, patch=8, pixels=Pixels(size=56))
    job = Job(
        name="p", model=model, task=Classification(), data=data, steps=1, batch=Batch(total=1)
    )
    steps = preprocessor(fields_of_job(job), "the file")
    assert (steps.preparation.side, steps.preparation.shorter) == (56, 64)
    assert (steps.mean, steps.std) == (model.pixels.mean, model.pixels.std)
    file = tmp_path / "half.png"
    Image.fromarray(load_sample_images().images[0][:320]).save(file)
    here, there = data.load(file)["image"], steps.preparation.apply(file, 3)
    assert np.abs(here.astype(int) - there.astype(int)).max() <= 1
