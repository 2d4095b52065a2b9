"""Multi-process training: each process reads its devices' rows and part of the sequence; losses equal one process's."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.children import environment, together
from tests.training.distributed.hosts_child import CASES

ONE_SLICE = [name for name in CASES if not name.startswith("v5e-16")]
TOLERANCE = 2e-5
"""Relative tolerance after three float32 steps, since sums over devices differ in order."""


def run(
    what: str, names: list[str], cache: Path, count: int, num_devices: int
) -> list[dict[str, dict[str, Any]]]:
    """Result of each case, for each process."""
    told = together(
        ["tests.training.distributed.hosts_child", what, *names],
        environment(cache, num_devices // count),
        count,
    )
    # Gloo prints a line or two as well.
    lines = [[line for line in out.splitlines() if line.startswith("{")] for out in told]
    return [{(one := json.loads(line))["name"]: one for line in each} for each in lines]


def read_right(told: list[dict[str, dict[str, Any]]]) -> None:
    wrong = {
        f"process {process}, {name}": result["wrong"][:5]
        for process, results in enumerate(told)
        for name, result in results.items()
        if result["wrong"]
    }
    assert not wrong


@pytest.mark.slow
def test_two_processes_hold_what_one_would_read(tmp_path: Path):
    told = run("batches", ONE_SLICE, tmp_path, 2, 4)
    read_right(told)
    readers = {name: result["readers"] for name, result in told[0].items()}
    assert readers == dict.fromkeys(ONE_SLICE, 1) | {"alternating": 2}


@pytest.mark.slow
def test_four_hosts_of_v5e_16_hold_what_one_would_read(tmp_path: Path):
    told = run("batches", ["v5e-16", "v5e-16-ring"], tmp_path, 4, 16)
    read_right(told)
    assert [results["v5e-16"]["readers"] for results in told] == [1] * 4
    assert [results["v5e-16-ring"]["readers"] for results in told] == [4] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "names"),
    [
        (2, ["data", "fsdp", "tensor", "context", "pipeline", "expert-tensor"]),
        (4, ["data", "fsdp", "tensor", "context", "pipeline"]),
        (4, ["slices-pipeline", "expert", "accumulate"]),
    ],
)
def test_the_losses_are_those_of_one_process(tmp_path: Path, count: int, names: list[str]):
    alone = run("losses", names, tmp_path, 1, 4)[0]
    for found in run("losses", names, tmp_path, count, 4):
        for name in names:
            for have, want in zip(found[name]["losses"], alone[name]["losses"], strict=True):
                assert have == pytest.approx(want, rel=TOLERANCE), name
