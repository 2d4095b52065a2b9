"""Models as recipes: by name, by a config.json, by a folder, by a Bundle."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import systolic
from systolic import recipes
from systolic.cli.main import main
from systolic.core.errors import LayoutError, NotFoundError, OptionError
from systolic.job import Layout, Remat
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.families import CONFIG, family, published
from systolic.recipes.models import BUNDLE
from systolic.runs.bundle.folder import MANIFEST, model_record
from tests.compiles import cheap
from tests.models import speech
from tests.models.foreign import structure
from tests.tiers import some

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    made = tmp_path / "tiny-llama"
    made.mkdir()
    (made / CONFIG).write_text(json.dumps(LLAMA))
    return made


def test_a_published_model_is_lm_with_its_sizes() -> None:
    found = recipes.find("llama-3.1-70b")
    job = found({"sequence": 2048})
    assert job.name == "llama-3.1-70b"
    assert job.model == published()["llama-3.1-70b"].model()
    assert (job.batch.per_device, job.layout.remat) == (1, Remat.full)
    assert found({"batch": 64}).batch.total == 64
    assert "pass, by default 1;" in (found.function.__doc__ or "")
    assert found.summary.startswith("The published meta-llama/Llama-3.1-70B, 70,553,706,496")


def test_an_unknown_name_has_its_nearest() -> None:
    with pytest.raises(NotFoundError, match=r"'llama-3.1-71b'; did you mean llama-3.1-70b\?"):
        recipes.find("llama-3.1-71b")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gemma", "of that family it knows gemma-3-27b, and takes the config.json of any other;"),
        ("llama", "of that family it knows llama-3.1-8b, llama-3.1-70b, llama-3.1-405b, and"),
        ("google/gemma-2-9b", "of that family it knows gemma-3-27b, and"),
        ("bert", "'bert'; systolic recipes lists them"),
        ("imagee", "did you mean image?"),
    ],
)
def test_another_model_is_no_misspelt_one(name: str, told: str) -> None:
    with pytest.raises(NotFoundError) as raised:
        recipes.find(name)
    assert told in str(raised.value)
    assert ("did you mean" in str(raised.value)) == ("did you mean" in told)


def test_a_config_is_found_by_file_and_by_folder(folder: Path) -> None:
    for target in (folder, folder / CONFIG):
        found = recipes.find(str(target))
        job = found({})
        assert job.name == "tiny-llama"
        assert isinstance(job.model, Decoder)
        assert (job.model.d_model, job.model.vocab) == (32, 384)
        assert job.data.fields()["tokens"].shape == (64,)  # no more than the model takes


def test_a_bundle_is_found_by_its_record(tmp_path: Path) -> None:
    assert BUNDLE == MANIFEST
    model = Decoder(layers=3, d_model=32, d_ff=48, heads=2, kv_heads=2, head_dim=16, vocab=300)
    (tmp_path / BUNDLE).write_text(json.dumps({"model": model_record(model)}))
    assert recipes.find(str(tmp_path))({}).model == model


def test_another_class_of_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / BUNDLE).write_text(json.dumps({"model": {"type": "Mystery"}}))
    with pytest.raises(OptionError, match="a model of the class Mystery, and only CNN, Decoder"):
        recipes.find(str(tmp_path))
    (tmp_path / BUNDLE).write_text(json.dumps({"model": {"type": "CNN"}}))
    with pytest.raises(OptionError, match="of the class CNN, which is not forecast by its conf"):
        recipes.find(str(tmp_path))
    (tmp_path / BUNDLE).unlink()
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "mystery"}))
    with pytest.raises(OptionError, match="is of the kind 'mystery'"):
        recipes.find(str(tmp_path))


def test_a_config_alone_is_forecast(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"forecast {folder / CONFIG} --on cpu --quick --sequence 32 --model.layers 1 --json"
    flags = [f"--flags={flags}"] if (flags := cheap("")) else []
    assert main([*line.split(), *flags]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recipe"] == "tiny-llama"
    assert said["fits"]
    assert said["options"]["model"]["layers"] == 1


BERT = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 4, "vocab_size": 384, "max_position_embeddings": 64}
VIT = {"model_type": "vit", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
VIT |= {"num_attention_heads": 4, "image_size": 30, "patch_size": 5, "num_labels": 7}
WHISPER = speech.config(speech.TINY).to_dict()
OTHERS = {
    "bert": (BERT, "MaskedTokens", {"tokens": (64,)}),
    "vit": (VIT, "Classification", {"image": (30, 30, 3)}),
    "whisper": (WHISPER, "Transcription", {"features": (60, 20), "tokens": (24,)}),
}


COUNTS = {"bert": 30_976, "vit": 18_951, "whisper": 8_288}
"""Trainable parameters of the same models of transformers, the first with the head for masked tokens."""


@pytest.mark.parametrize(("config", "task", "shapes"), OTHERS.values(), ids=OTHERS.keys())
def test_encoders_image_models_and_whisper_are_jobs_by_their_config(
    config: dict, task: str, shapes: dict, tmp_path: Path
) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(config, default=str))
    own = family(config, "it").model(config)
    if isinstance(own, Encoder):
        assert not own.head
        own = replace(own, head=True, pooler=False)  # as BertForMaskedLM
    job = recipes.find(str(tmp_path))({})
    fields = job.data.fields()
    assert (job.model, type(job.task).__name__, job.name) == (own, task, tmp_path.name)
    assert {name: fields[name].shape for name in shapes} == shapes
    assert job.model.flops(fields) == own.flops(fields) > 0
    assert COUNTS[config["model_type"]] == structure(own).num_parameters


@pytest.mark.parametrize("config", some({name: one for name, (one, *_) in OTHERS.items()}, []))
def test_others_are_forecast_by_their_config(config: dict, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(config, default=str))
    assert systolic.forecast(str(tmp_path), on="cpu", quick=True, batch=8).fits


def test_a_layout_that_does_not_divide_it_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"layout.tensor 16 does not divide model.kv-heads 8"):
        systolic.forecast("llama-3.1-8b", on="v6e-16", layout=Layout(fsdp=1, tensor=16))
