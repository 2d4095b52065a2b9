"""Bits per byte: the bits of all targets over the bytes of text, whoever reports it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from systolic.data.text.documents import Documents, StandardLibrary
from systolic.data.text.text_data import TextData
from systolic.inference.predictions import RowPrograms, predictions
from systolic.job import Split
from systolic.models.decoder.config import Decoder
from systolic.runs.weights import Weights
from systolic.setup import Setup, set_up
from systolic.training.evaluate import evaluate
from tests.cli.tiny import job

SMALL = Decoder(layers=1, d_model=16, d_ff=16, heads=2, kv_heads=1, head_dim=8, vocab=264)


def measured(data: TextData) -> tuple[Setup, Weights, dict[str, float]]:
    setup = set_up(replace(job(model=SMALL), data=data))
    params, rest = jax.jit(setup.steps.network.init)(jax.random.key(0))
    given = (setup.job, setup.steps, setup.jitted_evaluate, params, rest)
    weights = Weights(params=params, model_state=rest, step=0, skipped=[])
    return setup, weights, evaluate(*given, Split.validation)


def test_eval_and_predict_agree_on_a_documents_bits_per_byte(tmp_path: Path):
    lines, text = tmp_path / "tiny.jsonl", tmp_path / "tiny.txt"
    lines.write_text((json.dumps({"text": "ab"}) + "\n") * 300)
    text.write_text("ab")
    data = Documents(path=lines, validation=lines, sequence=30)
    setup, weights, found = measured(data)
    binary = tmp_path / "bin.txt"
    binary.write_bytes(b"words \x00\x01\xff" * 100)
    (_, answer), (_, refused) = predictions(RowPrograms(setup.steps, weights), [text, binary])
    assert "bin.txt is binary, not text (a zero byte at 6)" in refused["error"]
    # Three targets, two of which are bytes: a, b and the document's end.
    assert answer["tokens"] == 3
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * 3 / 2 / math.log(2), rel=1e-5)
    assert answer["bits_per_byte"] == pytest.approx(found["bits_per_byte"], rel=1e-5)


def test_text_without_ends_of_documents_has_a_byte_a_target(tmp_path: Path):
    for number in range(40):
        (tmp_path / f"{number}.py").write_text(f"value = {number}\n" * 3)
    data = StandardLibrary(sequence=32, root=tmp_path)
    _, _, found = measured(data)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=1e-6)
