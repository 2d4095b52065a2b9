"""Programs, halves and table of benchmarks/operations, which is no package: in a process of its own."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    child = Path(__file__).with_name("operations_child.py")
    # Without costly passes, which change only rounding, but for a masked gradient that jaxlib 0.12.0.1 makes NaN of.
    few = Version(version("jaxlib")) < Version("0.12")
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(few))}
    command = [sys.executable, child]
    made = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


@pytest.mark.parametrize(
    "name", ["chunked", "backward", "loss", "loss_backward", "pages", "groups"]
)
def test_programs_compute_the_same_by_other_ways(found: dict[str, Any], name: str) -> None:
    assert found[name] < 1e-4


def test_the_gradient_of_attention_computes_maximum_and_sum_again(found: dict[str, Any]) -> None:
    assert found["maxima"] == 1


def test_halves_are_by_program(found: dict[str, Any]) -> None:
    assert 16 < found["halves"] < 48
    assert found["same_half"]


def test_what_is_short_or_a_kernel_without_a_program_is_not_judged(found: dict[str, Any]) -> None:
    assert found["judged"] == [True, False, True, False, True, False]


def test_kernels_are_a_kind_of_their_own(found: dict[str, Any]) -> None:
    assert found["kernel"] == "attention kernel"


def test_rows_that_took_a_product_with_every_group_are_known(found: dict[str, Any]) -> None:
    assert found["dense"] == [True, False, True, False]


def test_a_group_that_has_all_rows_is_in_the_program(found: dict[str, Any]) -> None:
    assert found["arguments"] == [3, 2]
    assert found["twice"] == [2, 2]


def test_a_sample_takes_each_generation_alike(found: dict[str, Any]) -> None:
    assert sorted(found["sample"]) == ["v5p", "v6e"]


def test_the_table_has_median_and_ninetieth_percentile(found: dict[str, Any]) -> None:
    assert found["table"].split("|")[1:5] == [" full ", " fit ", " v6e ", " k "]
    assert [float(cell.strip(" %")) for cell in found["table"].split("|")[5:9]] == [3, 20, 20, 30]
    # By the seconds of all runs: 3 x 10 %, 1 x 20 % and 2 x 30 %.
    assert float(found["table"].split("|")[9].strip(" %")) == pytest.approx(100 * 1.1 / 6, abs=0.05)


def test_an_op_of_a_profile_does_the_work_that_its_line_and_the_profile_say(
    found: dict[str, Any],
) -> None:
    size = 64 * 256
    # Weights from device memory and the result there; the other operand lies in vector memory.
    assert found["traced"]["matmul"][:3] == [2 * 512 * size, 3 * size, 2 * (512 * 256 + 64 * 512)]
    # Four operations and the reduction, which counts its operand.
    assert found["traced"]["sum"][:3] == [0, 5 * size, 2 * size]
    # A gate has a logistic (six operations) beside the profile's two, 16-bit elements two a word.
    assert found["traced"]["gate"][1] == 8 * size / 2
    # A rotation of halves: six operations on 64 of 128 lanes, two a word, and the upper half moves to the lower lanes.
    tiles = 64 * 8 // 8
    assert found["traced"]["rotation"][1:] == [6 * tiles * 1024 / 2, 0, 1.25 * tiles]
    # Halves side by side: conversions and a maximum in f32, and the second half moves to the upper lanes.
    assert found["traced"]["join"][1:] == [4 * tiles * 1024, 0, 1.25 * tiles]
    # Of the result 64 lanes lie as 128.
    assert found["traced"]["copy"][2] == 2 * 4 * size


def test_programs_of_jaxbench_have_its_shapes_and_times(found: dict[str, Any]) -> None:
    assert found["results"] == {
        "8p_GEMM": [8192, 28672],
        "10p_Sparse_MoE": [2, 4096, 4096],
        "11p_Megablox_GMM": [32768, 1536],
        "12p_RMSNorm": [8, 4096, 8192],
        "13p_Cross_Entropy": [],
        "1p_flash": [4, 64, 4096, 128],
        "3p_MLA": [4, 2048, 7168],
        "6p_paged_decode": [64, 64, 128],
    }
    assert found["times"] == [0.005187, 0.005224]  # on the device, or less a call's 0.134 ms
