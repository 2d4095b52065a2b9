"""The bodies of Pallas kernels, as JAX lowers them for a TPU, counted and priced."""

import json
import re

import jax
import pytest

from systolic.aot.kernels import counted, counted_elsewhere
from systolic.chips import slice
from systolic.sim import simulate
from tests.recorded import hlo
from tests.recorded.hlo.programs import MATMUL_ARGUMENTS, pallas_matmul

CALL = '"custom_call_config":{{"body":"{body}"}}'


def lowered() -> str:
    """The body in the form in which a schedule has it; JAX writes it without a TPU."""
    text = (
        jax.jit(pallas_matmul).trace(*MATMUL_ARGUMENTS).lower(lowering_platforms=("tpu",)).as_text()
    )
    found = re.search(
        r'body(?:"|\\22|\\")[^A-Za-z0-9+/\\]*(?:"|\\22|\\")([A-Za-z0-9+/=]{200,})', text
    )
    assert found is not None
    return CALL.format(body=found[1])


def test_a_body_is_counted_as_by_hand() -> None:
    text = counted(lowered())
    found = re.search(r'"counted":(\{.*?\}),"body"', text)
    assert found is not None
    assert json.loads(found[1]) == {
        "grid": [4, 4, 2],
        "steps": 32,
        "flops": {"f32": 2 * 2048 * 1024 * 2048},
        "vector": 2048 * 2048 * 2,  # each product is added to the total
        # A block of a megabyte for each of 32 steps from both sides, and 16 of the result.
        "bytes": (32 + 32 + 16) * 2**20,
        "whole": True,
    }
    assert counted(text) == text


def test_what_is_no_kernel_or_can_t_be_read_stays() -> None:
    for text in ("HloModule m", CALL.format(body="A" * 100), "tpu_custom_call"):
        assert counted(text) == text
        assert counted_elsewhere(text) == text


def test_a_kernel_without_an_estimate_takes_what_its_body_does() -> None:
    made = simulate(hlo.module("kernel-v6e-1"), slice("v6e-1"))
    span = max((s for s, _ in made.leaves()), key=lambda s: s.seconds)
    assert span.priced_by == "kernel"
    assert span.flops == 2 * 2048 * 1024 * 2048
    # No faster than its blocks' bytes and its bf16 passes; such a matmul was measured at 75.7 us on a v6e
    # (vlasenkoalexey/xprof-cli, tests/fixtures, blocks of 512 x 512 x 1024).
    assert span.seconds > 80 * 2**20 / 1640e9
    assert span.seconds == pytest.approx(75.7e-6, rel=0.25)
