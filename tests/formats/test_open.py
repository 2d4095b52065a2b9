"""Models in files, used as a run's are: generate, evaluate, predict."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import systolic
from systolic.cli.main import main
from systolic.formats.comparison import PASSAGE, probe_of
from systolic.formats.source import open_source
from systolic.job import Sampling
from tests.formats import folders

GREEDY = Sampling(temperature=0)
TEXT = "the capital of France is Rome, the capital of Spain is Paris\n" * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder(tmp_path_factory.mktemp("model") / "small", start=True)


def nats(folder: Path, text: str) -> tuple[float, int]:
    """Sum of the losses that transformers computes over a text, and their number."""
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    logits = torch.tensor(folders.logits(folder, [tokens]))[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum")
    return float(losses), len(tokens) - 1


def test_a_folder_continues_a_prompt_as_transformers_does(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = tokenizer("the capital of", return_tensors="pt")
    assert asked["input_ids"][0, 0] == 1  # its post-processor begins a text
    theirs = model.generate(**asked, max_new_tokens=20, do_sample=False, eos_token_id=-1)[0]
    expected = tokenizer.decode(theirs[asked["input_ids"].shape[1] :], skip_special_tokens=True)
    opened = systolic.open(folder)
    assert opened.generate("the capital of", tokens=20, sampling=GREEDY) == [expected]
    assert opened.step == 0


def test_a_folder_is_compared_on_words_of_its_own(folder: Path) -> None:
    """Numbers drawn at random are for a model without a tokenizer."""
    source = open_source(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PASSAGE, add_special_tokens=False)["input_ids"]
    rows = probe_of(source).ours["tokens"]
    np.testing.assert_array_equal(rows.ravel(), np.resize(ids, rows.size))
    (folder / "tokenizer.json").rename(folder / "kept")
    try:
        drawn = probe_of(open_source(folder)).ours["tokens"]
    finally:
        (folder / "kept").rename(folder / "tokenizer.json")
    assert len(np.unique(drawn)) > 100


def theirs(folder: Path, ids: list[int], count: int) -> list[int]:
    """Tokens with which transformers continues some ids, the likeliest each time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = {"max_new_tokens": count, "do_sample": False, "eos_token_id": -1}
    return model.generate(torch.tensor([ids]), **asked)[0, len(ids) :].tolist()


def test_a_text_ends_with_the_context_and_an_empty_one_begins_with_the_models_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folders.folder(tmp_path / "short", folders.llama(max_position_embeddings=24))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def asked(prompt: str, *more: str) -> tuple[dict[str, Any], str]:
        capfd.readouterr()
        assert main(["generate", str(path), prompt, "--temperature", "0", "--json", *more]) == 0
        out, err = capfd.readouterr()
        return json.loads(out), err

    ids = tokenizer("the capital of")["input_ids"]
    made, told = asked("the capital of")
    room = 24 - len(ids)
    assert made["text"] == tokenizer.decode(theirs(path, ids, room), skip_special_tokens=True)
    assert made["finish_reason"] == "length"
    assert told == (
        f"systolic: the text ended at the 24 tokens that short takes: {len(ids)} of the prompt and {room} of the 200 new ones; give a shorter prompt for a longer answer\n"
    )
    # Its post-processor puts nothing before a text, and tokenizer_config.json names its start.
    made, told = asked("", "--tokens", "6")
    expected = theirs(path, [tokenizer.bos_token_id], 6)
    assert made["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert (made["finish_reason"], told) == ("length", "")
    # Nothing is answered where one of the prompts is too long.
    capfd.readouterr()
    assert main(["generate", str(path), "the", "yes or no, " * 9]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert (
        "tokens and short takes texts of 24 with their answer; give a prompt of at most 23" in err
    )


def test_a_text_costs_what_transformers_says(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    total, count = nats(folder, TEXT)
    opened = systolic.open(folder)
    (answer,) = opened.predict(file)
    assert answer["tokens"] == count
    assert answer["bits_per_byte"] == pytest.approx(total / math.log(2) / len(TEXT), rel=1e-5)
    assert answer["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    found = opened.evaluate(path=file)[str(file)]
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)


def test_commands_take_a_folder(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    assert main(["eval", str(folder), "--path", str(tmp_path / "text.txt")]) == 0
    assert "loss" in capfd.readouterr().out
    assert main(["eval", str(folder)]) == 1 + 1
    assert "--path" in capfd.readouterr().err
    assert main(["generate", str(folder), "the", "--checkpoint", "last"]) == 2
    assert "is no run but a model in files" in capfd.readouterr().err


def test_bf16_weights_stay_bf16(tmp_path: Path) -> None:
    model = systolic.open(folders.folder(tmp_path / "small", dtype=torch.bfloat16))
    assert {str(array.dtype) for array in model.weights.params.values()} == {"bfloat16"}
    assert np.dtype(model.setup.steps.target.dtype) == np.float32  # a CPU computes in f32


def test_a_chat_is_answered_by_the_template(folder: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the capital?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1)[0]
    new = theirs[ids.shape[1] :].tolist()
    opened = systolic.open(folder)
    ask = {"tokens": 12, "sampling": GREEDY, "chat": True}
    assert opened.generate("the capital?", **ask) == [
        tokenizer.decode(new, skip_special_tokens=True)
    ]
    # With the fifth token as the end of a turn the answer ends before it.
    last = next(i for i in range(4, 12) if new[i] not in new[:i])
    ended = folders.folder(tmp_path / "ended", start=True)
    (ended / "generation_config.json").write_text(f'{{"eos_token_id": [2, {new[last]}]}}')
    expected = tokenizer.decode(new[:last], skip_special_tokens=True)
    assert systolic.open(ended).generate("the capital?", **ask) == [expected]


def test_a_model_without_a_template_does_not_chat(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = folders.folder(tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    for words in (["--chat"], ["--system", "be brief"]):
        assert main(["generate", str(plain), "hello", *words]) == 2
        line = "so the model knows no chat; give prompts as text, without --chat and --system"
        assert line in capfd.readouterr().err
