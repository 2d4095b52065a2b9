"""Published models from their packages: what they say, and that they compute what transformers computes."""

from pathlib import Path

import pytest

import systolic
from systolic.job import Sampling
from tests import weights

pytestmark = pytest.mark.slow
GREEDY = Sampling(temperature=0)
RIVER = """The river rises in the mountains and flows north to the sea. In winter it freezes, and people cross it on
foot; in summer, boats carry grain and timber to the towns along its banks.
"""


def test_smollm2_knows_the_capital_of_france(tmp_path: Path) -> None:
    made = systolic.import_model(weights.smollm2(), tmp_path / "smollm2")
    assert made.parameters == 134_515_008
    assert made.parity is not None
    assert made.parity.max_relative < 1e-4
    assert made.parity.argmax_agreement == 1.0
    model = systolic.open(tmp_path / "smollm2")
    ask = {"tokens": 24, "sampling": GREEDY}
    assert model.generate("What is the capital of France?", chat=True, **ask) == [
        "The capital of France is Paris."
    ]
    assert model.generate("The capital of France is", **ask)[0].startswith(" Paris")
    # Its words split before each digit, and a text begins with no token of its own.
    tokenizer = model.job.data.get_tokenizer()
    assert [tokenizer.decode([i]) for i in tokenizer.prompt("in 2024")] == ["in", " ", *"2024"]


def test_gemma_3_continues_a_text(tmp_path: Path) -> None:
    made = systolic.import_model(weights.gemma(tmp_path), tmp_path / "gemma")
    assert made.parameters == 268_098_176
    assert made.parity is not None
    assert made.parity.max_relative < 1e-4
    model = systolic.open(tmp_path / "gemma")
    asked = ["Monday, Tuesday, Wednesday,", "The opposite of hot is"]
    days, cold = model.generate(asked, tokens=8, sampling=GREEDY)
    assert days == " Thursday, Friday, Saturday, Sunday,"
    assert cold.startswith(" cold.")
    (tmp_path / "text.txt").write_text(RIVER)
    assert model.predict(tmp_path / "text.txt")[0]["bits_per_byte"] < 1.0
    tokenizer = model.job.data.get_tokenizer()
    assert [tokenizer.token(i) for i in tokenizer.prompt("hello world")] == [
        "<bos>",
        "hello",
        "▁world",
    ]
    plain = "  Two spaces,\n\n\ta tab, naïve 東京 🜁"
    assert tokenizer.decode(tokenizer.encode(plain)) == plain
