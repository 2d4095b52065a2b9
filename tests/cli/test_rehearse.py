"""``systolic train RECIPE --rehearse SLICE``: mistakes show, and what it says is so."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from systolic.chips import slice
from systolic.cli.main import main
from systolic.training.display.view import ROWS
from systolic.training.display.view import rehearsal_lines as lines
from systolic.training.rehearsal import environment

TINY = f"{Path(__file__).with_name('tiny.py')}:job"


def _systolic(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "systolic", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _rehearse(on: str, *options: str) -> dict[str, Any]:
    done = _systolic("train", TINY, "--rehearse", on, "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_child_has_as_many_devices_as_the_slice() -> None:
    given = {
        "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=3",
        "JAX_PLATFORMS": "tpu",
        "HOME": "/h",
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    assert environment(slice("v5p-16"), given) == {
        "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "HOME": "/h",
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("v5e-17", "v5e-17 is not a slice: .*; did you mean v5e-16"),
        ("v5p-12288", "v5p-12288 has 6144 devices and a rehearsal runs up to 1024"),
    ],
)
def test_a_slice_that_cannot_be_rehearsed(capsys, on: str, said: str) -> None:
    assert main(["train", TINY, "--rehearse", on]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line)


@pytest.mark.parametrize(
    ("on", "options", "said"),
    [
        ("v5e-8", ["--layout.fsdp", "3"], "layout (fsdp 3) is for 3 devices, but 8 are available"),
        ("v5e-8", ["--layout.tensor", "3"], "needs a multiple of 3 devices, but 8 are available"),
        ("v5e-8", ["--layout.tensor", "4"], "layout.tensor 4 does not divide model.kv-heads 2"),
        ("v5e-8", ["--batch", "12"], "batch of 12 does not divide by 8"),
        ("2xv5e-4", ["--layout.fsdp", "8"], "layout.data 1 is not a multiple of the 2 slices"),
    ],
)
def test_a_layout_that_does_not_fit_is_one_line(
    capsys, on: str, options: list[str], said: str
) -> None:
    assert main(["train", TINY, "--rehearse", on, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("on", "options", "said"),
    [
        (
            "v5e-8",
            ["--layout.context", "8", "--layout.fsdp", "1", "--sequence", "36"],
            "layout.context 8 does not divide the sequence of 36",
        ),
        ("v5e-1", ["--model.d-ff", "4000000"], "weights and optimizer state need .* GiB on each"),
    ],
)
def test_what_only_the_child_sees_is_one_line(
    capfd: pytest.CaptureFixture[str], on: str, options: list[str], said: str
) -> None:
    assert main(["train", TINY, "--rehearse", on, *options]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(said, line)


@pytest.mark.slow
def test_sixteen_devices() -> None:
    record = _rehearse("v5e-16", "--layout.fsdp", "8", "--layout.tensor", "2")
    assert record["layout"] == {
        "data": 1,
        "pipeline": 1,
        "fsdp": 8,
        "expert": 1,
        "context": 1,
        "tensor": 2,
    }
    assert (record["devices"], record["precision"], record["batch_size"]) == (16, "bf16", 16)
    parameters = {part["path"]: part for part in record["parameters"]}
    assert sum(math.prod(part["shape"]) for part in parameters.values()) == record["num_parameters"]
    up = parameters["blocks/mlp/up"]
    assert (up["shape"], up["spec"]) == ([2, 64, 128], "-, fsdp, tensor")
    assert up["bytes_per_device"] == 2 * 64 * 128 * 4 // 16
    held = record["bytes_per_device"]
    # AdamW's two moments, sharded as the parameters are, and its count of steps.
    assert held["optimizer"] - 2 * held["parameters"] in (4, 8)
    whole = [part for part in parameters.values() if part["spec"] == "whole"]
    assert whole
    assert all("norm" in part["path"] for part in whole)
    share = sum(part["bytes_per_device"] for part in whole) / held["parameters"]
    assert record["whole_share"] == pytest.approx(share)
    assert record["batch"][0]["bytes_per_device"] == 16 * 32 * 4 // 8
    assert len(record["rehearsed"]["losses"]) == 3
    assert record["rehearsed"]["batch_size"] == 8
    assert {"loss", "bits_per_byte", "accuracy"} <= set(record["rehearsed"]["metrics"])
    assert "32 and 32" in record["notes"][0]
    text = lines(record)
    assert any(note in line for line in text for note in record["notes"])
    assert f"  … and {len(parameters) - ROWS} smaller parameters; the batch:" in text


def test_what_stays_whole_is_said() -> None:
    record = {
        "slice": "v5e-4",
        "devices": 4,
        "notes": ["plain attention"],
        "bytes_per_device": {"parameters": 3000},
        "parameters": [{"path": "w", "shape": [30, 25], "spec": "whole", "bytes_per_device": 3000}],
        "whole_share": 1.0,
        "batch": [],
        "not_checked": "speed",
        "seconds": 2.0,
    }
    text = "\n".join(lines(record))
    assert "100% of these parameters are whole on every device" in text
    assert "w  30x25  whole  3 kB" in text
    assert "plain attention" in text
    assert "A rehearsal does not check speed." in text


@pytest.mark.slow
def test_two_slices_and_a_pipeline() -> None:
    options = ["--layout.data", "2", "--layout.pipeline", "2", "--layout.accumulate", "2"]
    record = _rehearse("2xv5e-4", *options)
    assert (record["layout"]["data"], record["layout"]["fsdp"]) == (2, 2)
    # Four shards of the batch, two passes, two microbatches of which each has one example.
    assert record["rehearsed"]["batch_size"] == 4 * 2 * 2


@pytest.mark.slow
def test_a_metric_that_the_task_does_not_report() -> None:
    done = _systolic("train", TINY, "--rehearse", "v5e-4", "--metric", "top5")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "systolic: evaluation.metric 'top5' is not reported; choose one of accuracy, bits_per_byte"
    )
