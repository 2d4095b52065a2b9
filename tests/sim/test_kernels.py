"""A kernel is priced by what it is, not by the letters of the scopes around it."""

import pytest

from systolic.chips import slice
from systolic.hlo import parse
from systolic.sim.simulate import simulate
from tests.recorded import hlo


@pytest.mark.parametrize("scope", ["mha", "omha_block", "flash_attention", "splash_mha"])
def test_the_name_of_a_scope_changes_no_price(scope: str) -> None:
    text = hlo.text("kernel-v6e-1")
    assert 'op_name="jit(pallas_matmul)/pallas_call"' in text
    inside = text.replace(
        "jit(pallas_matmul)/pallas_call", f"jit(pallas_matmul)/{scope}/pallas_call"
    )
    on = slice("v6e-1")
    assert simulate(parse(inside), on).seconds == simulate(parse(text), on).seconds
