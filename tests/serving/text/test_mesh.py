"""An engine on several devices answers as one on one device does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices import virtual_devices
from tests.serving.text.mesh_child import MODELS


def on_four_devices(*words: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.text.mesh_child", *words],
        cwd=Path(__file__).parents[3],
        env=virtual_devices(4),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(one: dict[str, Any]) -> None:
    config = MODELS[one["model"]]
    for text, expected in zip(one["answers"], one["expected"], strict=True):
        assert [token for token, _ in text] == [token for token, _ in expected]
        logprobs = [value for _, value in expected]
        assert [value for _, value in text] == pytest.approx(logprobs, abs=1e-4)
    # A sum for each split part of a layer, and one for the embedding where its rows are split; nothing else moves.
    split = one["tensor"] > 1 and config.vocab % one["tensor"] == 0
    parts = (one["tensor"] > 1) + (one["tensor"] * one["expert"] > 1)
    assert one["step"] == {f"all-reduce f32[4,1,{config.d_model}]": parts * config.layers + split}
    assert one["choice"] == ({f"all-gather f32[4,{config.vocab}]": 1} if split else {})
    # Pages are written where they lie, and the table's bytes are those of one device.
    assert one["aliased_bytes"] == one["pages_bytes"] == one["held_bytes"]
    assert one["weights_bytes"] < one["alone"]["weights_bytes"]
    assert (one["pages"], one["in_use"]) == (48, 0)


def test_heads_over_two_devices() -> None:
    (one,) = on_four_devices("grouped:2:1")
    check(one)
    assert 2 * one["pages_bytes"] == one["alone"]["pages_bytes"]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MODELS))
def test_families_over_two_and_four_devices(name: str) -> None:
    for one in on_four_devices(f"{name}:2:1", f"{name}:4:1"):
        check(one)


def test_adapters_of_copied_heads_answer_as_merged() -> None:
    """Two key-value heads over four devices."""
    (one,) = on_four_devices("grouped:4:adapters")
    for answers, expected in zip(one["answers"], one["expected"], strict=True):
        for text, wanted in zip(answers, expected, strict=True):
            assert [token for token, _ in text] == [token for token, _ in wanted]
            logprobs = [value for _, value in wanted]
            assert [value for _, value in text] == pytest.approx(logprobs, abs=2e-4)
    assert len({str(answers) for answers in one["expected"]}) == 3


@pytest.mark.slow
def test_experts_over_devices() -> None:
    for one in on_four_devices("mixture:1:2", "mixture:2:2"):
        check(one)


@pytest.mark.slow
def test_engines_on_devices_of_their_own() -> None:
    (one,) = on_four_devices("grouped:replicas")
    for answers in one["answers"]:
        for text, expected in zip(answers, one["expected"], strict=True):
            assert [token for token, _ in text] == [token for token, _ in expected]
    assert one["devices"] == [[0, 1], [2, 3]]
    fits, split = one["chosen"]
    assert (fits["engines"], fits["tensor"]) == (4, [1] * 4)
    assert fits["devices"] == [[0], [1], [2], [3]]
    # 109 kB of weights and 201 kB of pages: over 90 % of 250 kB, half of them not.
    assert (split["engines"], split["tensor"][0]) == (2, 2)
    assert split["devices"][:2] == [[0, 1], [2, 3]]
    assert one["in_use"] == [0, 0]
    assert sum(one["made"]) == 4
    assert min(one["made"]) > 0


@pytest.mark.slow
def test_texts_that_lose_their_pages_or_are_cancelled_on_a_mesh() -> None:
    (one,) = on_four_devices("grouped:busy")
    assert one["finished"] == ["length"] * 3
    assert one["cancelled"] == "cancelled"
    assert one["preempted"] > 0
    assert (one["in_use"], one["available"]) == (0, 13)


@pytest.mark.long
def test_smollm2_over_three_devices() -> None:
    (one,) = on_four_devices("smollm2")
    assert one["text"].startswith(" Paris")
    assert one["query"] == [[30, 576, 3, 64]] * 3
    assert sum(one["step"].values()) == 2 * 30 + 1
    assert all(name.startswith("all-reduce") for name in one["step"])
