"""Models in files, used as a run's are: generate, evaluate, predict."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import systolic
from systolic.cli.main import main
from systolic.job import Sampling
from tests.interop import folders

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
    assert main(["generate", str(plain), "hello", "--chat"]) == 2
    assert "has no chat template" in capfd.readouterr().err
