"""Encoders as models of embeddings, beside transformers with the pooling that sentence-transformers describes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

import systolic
from systolic.cli.main import main
from systolic.core.errors import OptionError
from systolic.formats.command import import_model

TEXTS = [
    "a cat sat on the mat",
    "the kitten sat",
    "shares fell, and shares rose, and shares fell again on the market in the city",
]
STEPS = ("Transformer", "Pooling", "Normalize")


def folder(path: Path, steps: tuple[str, ...] = STEPS, mode: str = "mean_tokens") -> Any:
    """A small BERT with a WordPiece tokenizer, as sentence-transformers keeps it; the model."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special)
    )
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    # A file may ask for padding, which would change vectors if it were followed.
    made.enable_padding(length=30)
    made.enable_truncation(30)
    fast = transformers.BertTokenizerFast(tokenizer_object=made)
    config = transformers.BertConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=40,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    model.save_pretrained(path)
    fast.save_pretrained(path)
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "",
            "type": f"sentence_transformers.models.{step}",
        }
        for index, step in enumerate(steps)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "sentence_bert_config.json").write_text(
        '{"max_seq_length": 12, "do_lower_case": false}'
    )
    (path / "1_Pooling").mkdir()
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    pooling = {f"pooling_mode_{name}": name == mode for name in names}
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, **pooling})
    )
    return model


def reference(path: Path, model: Any, mode: str, normalise: bool) -> np.ndarray:
    """Vectors of the texts by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    encoded = tokenizer(TEXTS, padding=True, truncation=True, max_length=12, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**encoded).last_hidden_state
    there = encoded["attention_mask"][..., None]
    if mode == "mean_tokens":
        vector = (hidden * there).sum(1) / there.sum(1)
    elif mode == "cls_token":
        vector = hidden[:, 0]
    else:
        vector = hidden.masked_fill(there == 0, -torch.inf).max(1).values
    return (torch.nn.functional.normalize(vector) if normalise else vector).numpy()


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("cls_token", STEPS[:2]),
        pytest.param("mean_tokens", STEPS, marks=pytest.mark.parity),
        pytest.param("max_tokens", STEPS, marks=pytest.mark.parity),
    ],
)
def test_vectors_are_those_of_transformers(
    mode: str, steps: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "tiny"
    model = folder(path, steps, mode)
    expected = reference(path, model, mode, normalise=len(steps) == 3)
    opened = systolic.open(path)
    assert opened.job.data.fields()["tokens"].shape == (12,)
    found = np.array([answer["embedding"] for answer in opened.predict(TEXTS)])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # Alone and in another company a text has the same vector.
    alone = opened.predict(TEXTS[1])[0]["embedding"]
    np.testing.assert_allclose(alone, expected[1], atol=1e-5)


def test_the_command_takes_texts_and_files(tmp_path: Path, capsys, monkeypatch) -> None:
    path = tmp_path / "tiny"
    model = folder(path)
    bundle = import_model(path, tmp_path / "bundle", parity=False).path
    expected = reference(path, model, "mean_tokens", normalise=True)
    monkeypatch.chdir(tmp_path)
    Path("kitten.txt").write_text(TEXTS[1])
    Path("empty.txt").write_text("")
    asked = ["predict", str(bundle), TEXTS[0], "kitten.txt", "--json"]
    assert main(asked) == 0
    told = json.loads(capsys.readouterr().out)["predictions"]
    assert [one["file"] for one in told] == [TEXTS[0], "kitten.txt"]
    np.testing.assert_allclose([one["embedding"] for one in told], expected[:2], atol=1e-5)
    # The empty string has no vector here either, as in /v1/embeddings.
    assert main(["predict", str(bundle), TEXTS[0], ""]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "systolic: a text is empty; give a text",
        "systolic: no answer for 1 of 2 inputs; see the lines above",
    ]
    assert main(["predict", str(bundle), TEXTS[0], "empty.txt"]) == 1
    shown = capsys.readouterr()
    assert f"{expected[0][0]:.4f} {expected[0][1]:.4f}" in shown.out
    assert "(32 numbers, --json prints all)" in shown.out
    assert "empty.txt is empty; give a text" in shown.err


def test_case_prompts_and_lengths_are_those_of_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    folder(path)
    plain = np.array(systolic.open(path).predict(["query: a b"])[0]["embedding"])
    prompts = {"prompts": {"query": "QUERY: "}, "default_prompt_name": "query"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    lengths = {"max_seq_length": 9, "do_lower_case": True}
    (path / "sentence_bert_config.json").write_text(json.dumps(lengths))
    bundle = import_model(path, tmp_path / "bundle", parity=False).path
    for opened in (systolic.open(path), systolic.open(bundle)):
        assert opened.job.data.fields()["tokens"].shape == (9,)
        ids = opened.job.data.encode(["A b"])[0]
        np.testing.assert_array_equal(
            ids, replace(opened.job.data, before="", lower=False).encode(["query: a b"])[0]
        )
        found = opened.predict(["A b"])[0]["embedding"]
        np.testing.assert_allclose(found, plain, atol=1e-6)
    (path / "config_sentence_transformers.json").write_text('{"default_prompt_name": "x"}')
    with pytest.raises(OptionError, match="default_prompt_name 'x' and prompts of no name"):
        systolic.open(path)
    (path / "config_sentence_transformers.json").unlink()
    (path / "sentence_bert_config.json").unlink()
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 7}))
    assert systolic.open(path).job.data.fields()["tokens"].shape == (7,)


@pytest.mark.parametrize(
    ("mode", "included"),
    [
        ("mean_tokens", False),
        ("max_tokens", False),
        pytest.param("cls_token", False, marks=pytest.mark.parity),
        ("mean_tokens", True),
    ],
)
def test_a_prompt_is_pooled_or_not_as_the_folder_says(
    mode: str, included: bool, tmp_path: Path
) -> None:
    """Without it the tokens of the prompt and the one before it are read and not pooled (sentence-transformers' Pooling)."""
    path = tmp_path / "tiny"
    model = folder(path, STEPS, mode)
    prompts = {"prompts": {"query": "the market: "}, "default_prompt_name": "query"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    file = path / "1_Pooling" / "config.json"
    said = json.loads(file.read_text()) | {"include_prompt": included}
    file.write_text(json.dumps(said))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.backend_tokenizer.no_padding()
    expected = []
    for text in TEXTS:
        asked = tokenizer(f"the market: {text}", truncation=True, max_length=12, return_tensors="pt")  # fmt: skip
        with torch.no_grad():
            hidden = model(**asked).last_hidden_state[0]
        # The prompt alone, without the [SEP] that ends it.
        start = len(tokenizer("the market: ")["input_ids"]) - (
            len(tokenizer("the market: ")["input_ids"]) if included else 1
        )
        made = {
            "mean_tokens": hidden[start:].mean(0),
            "max_tokens": hidden[start:].max(0).values,
            "cls_token": hidden[0],
        }[mode]
        expected.append(torch.nn.functional.normalize(made, dim=0).numpy())
    found = np.array([answer["embedding"] for answer in systolic.open(path).predict(TEXTS)])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    bundle = import_model(path, tmp_path / "bundle", parity=False).path
    assert systolic.open(bundle).job.task == systolic.open(path).job.task


def test_what_a_folder_leaves_open_is_said(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "tiny"
    folder(path)
    prompts = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert main(["predict", str(path), "a cat"]) == 0
    assert "has the prompts query and no default_prompt_name" in capsys.readouterr().err
    (path / "config_sentence_transformers.json").unlink()
    (path / "modules.json").unlink()
    assert main(["predict", str(path), "a cat"]) == 0
    assert "has no modules.json of sentence-transformers" in capsys.readouterr().err


def test_what_is_not_followed_is_one_line(tmp_path: Path) -> None:
    for number, (steps, mode, says) in enumerate(
        (
            ((*STEPS[:2], "Dense"), "mean_tokens", "has the modules Transformer, Pooling, Dense"),
            (STEPS, "mean_sqrt_len_tokens", "asks for pooling_mode_mean_sqrt_len_tokens"),
        )
    ):
        path = tmp_path / str(number)
        folder(path, steps, mode)
        with pytest.raises(OptionError, match=says) as caught:
            systolic.open(path)
        assert "\n" not in str(caught.value)
    path = tmp_path / "fine"
    folder(path)
    with pytest.raises(OptionError, match="has no data of its own; give the data with --path"):
        systolic.open(path).evaluate()
    (path / "tokenizer.json").unlink()
    with pytest.raises(OptionError, match=r"has no tokenizer\.json"):
        systolic.open(path)
