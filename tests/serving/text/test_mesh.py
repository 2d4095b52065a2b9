"""An engine on several devices answers as one on one device does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.text.mesh_child import MODELS

DEVICES = "--xla_force_host_platform_device_count=4"


def on_four_devices(*words: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.text.mesh_child", *words],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "XLA_FLAGS": DEVICES, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(alone: dict[str, Any], others: list[dict[str, Any]], name: str) -> None:
    layers, width = MODELS[name].layers, MODELS[name].d_model
    assert alone["step"] == alone["choice"] == {}
    for one in others:
        for text, expected in zip(one["answers"], alone["answers"], strict=True):
            assert [token for token, _ in text] == [token for token, _ in expected], one["name"]
            logprobs = [value for _, value in expected]
            assert [value for _, value in text] == pytest.approx(logprobs, abs=1e-4), one["name"]
        # Two sums a layer, and one for the embedding where its rows are split; nothing else moves.
        sums = one["step"].pop(f"all-reduce f32[4,1,{width}]")
        assert sums == 2 * layers + (MODELS[name].vocab % one["tensor"] == 0), one["name"]
        assert one["step"] == {}, one["name"]
        assert set(one["choice"]) <= {f"all-gather f32[4,{MODELS[name].vocab}]"}, one["name"]
        # Pages are written where they lie, and the table's bytes are those of one device.
        assert one["aliased_bytes"] == one["pages_bytes"] == one["held_bytes"], one["name"]
        assert one["weights_bytes"] < alone["weights_bytes"]
        assert (one["pages"], one["in_use"]) == (alone["pages"], 0)


def test_heads_over_two_devices() -> None:
    alone, two = on_four_devices("grouped:1:1", "grouped:2:1")
    check(alone, [two], "grouped")
    assert 2 * two["pages_bytes"] == alone["pages_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_families_over_two_and_four_devices(name: str) -> None:
    alone, *others = on_four_devices(f"{name}:1:1", f"{name}:2:1", f"{name}:4:1")
    check(alone, others, name)
