"""Every axis, and the usual pairs, train the same model to the same loss as one device."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices import virtual_devices
from tests.steps import tiny
from tests.steps.layouts_child import ADAPTED, LAYOUTS, job_of

TOLERANCE = 2e-5
"""Relative, after three steps in float32: sums over devices are added in another order."""

QUICK = ["pipeline-tensor-embed", "ngrams-expert-context-tensor"]
"""Every axis once, both splits of the residual stream, experts and n-grams."""


def on_eight_devices(names: list[str]) -> dict[str, dict[str, Any]]:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.steps.layouts_child", *names],
        cwd=root,
        env=virtual_devices(8),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {(one := json.loads(line))["name"]: one for line in done.stdout.splitlines()}


def check(found: dict[str, dict[str, Any]]) -> None:
    for name, one in found.items():
        alone = tiny.trainer(tiny.steps(job_of(name, tiny.ONE_DEVICE)))
        assert one["losses"] == pytest.approx(alone.run()[0], rel=TOLERANCE), name
        if one["gradients"] is not None:
            for path, expected in alone.gradients().items():
                assert one["gradients"][path] == pytest.approx(expected, rel=1e-4, abs=1e-7), path
        assert one["moments"] == one["params"], (
            f"{name}: optimizer state is not sharded like its parameters"
        )


def test_usual_layouts_agree_with_one_device() -> None:
    found = on_eight_devices(QUICK)
    check(found)
    assert found["pipeline-tensor-embed"]["shard"] == 1 / 8
    assert found["ngrams-expert-context-tensor"]["shard"] == 1 / 8
    # Of 16 rows x 32 tokens x 32 wide, expert 2, context 2 and tensor 2: what a device keeps of each layer's input.
    assert found["ngrams-expert-context-tensor"]["inputs"] == ["8,8,32"]


@pytest.mark.slow
def test_all_layouts_agree_with_one_device() -> None:
    found = on_eight_devices([name for name in LAYOUTS if name not in (*QUICK, *ADAPTED)])
    check(found)
    assert found["pipeline"]["shard"] == found["latent-pipeline"]["shard"] == 1 / 4
    assert found["expert"]["shard"] == found["tensor-embed"]["shard"] == 1 / 8
    # Of 16 rows x 32 tokens x 32 wide, fsdp 4 and tensor 2.
    assert found["tensor-sequence"]["inputs"] == ["4,16,32"]
    assert found["tensor-embed"]["inputs"] == ["4,32,16"]
    assert found["tensor-whole"]["inputs"] == ["4,32,32"]


@pytest.mark.slow
def test_adapters_agree_with_one_device() -> None:
    found = on_eight_devices([*ADAPTED])
    check(found)
    # B is [layers, rank, d_ff]: its layers are split over the pipeline, its outputs over the tensor axis.
    assert found["lora-tensor"]["shard"] == 1 / 2
    assert found["lora-pipeline"]["shard"] == 1 / 4
