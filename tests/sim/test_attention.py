"""Attention kernels against chips, against floors, and by what their grid lets the cores share."""

import re

import pytest

from systolic.chips import slice
from systolic.hlo import parse
from systolic.sim.attention import Attention, Grid, attention_of, cut_share
from systolic.sim.simulate import simulate
from tests.recorded import hlo

MEASURED = {"fwd": 9.41e-3, "dkv": 13.87e-3}
"""Seconds a call on v6e (vlasenkoalexey/tpu_performance_autoresearch_wiki, commit 6dbda52: MaxText, Qwen3 8B, jax 0.6.1)."""


def kernels(text: str, on: str) -> dict[str, tuple[float, float]]:
    """Seconds and FLOPs of the kernels by the name of their part."""
    return {
        found[1]: (span.seconds, span.flops)
        for span, _ in simulate(parse(text), slice(on)).leaves()
        if (found := re.match(r"splash_mha_(\w+?)_", span.name))
    }


def test_a_layer_s_attention_takes_what_a_chip_took() -> None:
    found = kernels(hlo.text("splash_layer-v6e-1"), "v6e-1")
    blocks = 3 * 32 * 10  # of 4 x 4 blocks the mask leaves 10
    for name, matmuls in (("fwd", 2), ("dkv", 5)):
        seconds, flops = found[name]
        assert flops == 2 * matmuls * blocks * 2048 * 2048 * 128
        # Arrays are 256 wide: a head dim of 128 fills half of them.
        assert seconds > 2 * flops / 918e12
        assert seconds == pytest.approx(MEASURED[name], rel=0.06)


def test_tokamax_compares_positions_only_where_the_mask_cuts_a_block() -> None:
    # 131,072 keys and 16,384 queries a device, in balanced order: 8 of 260 blocks of 2,048 lie on the diagonal of their row.
    text = hlo.text("splash_tokamax-tpu7x-512")
    forward, backward = (attention(text, name) for name in ("splash_mha_fwd", "splash_mha_dkv"))
    assert (forward.block_q, forward.block_kv, forward.staged) == (2048, 2048, True)
    # The maximum is given (max_logit_const): JAX's 6.5 operations less one, and one for the segments.
    assert forward.vector_ops == pytest.approx(6.5 - 1 + 1 + 8 / 260)
    # Of 278 listed blocks of 1,024 x 4,096 each row of queries has one that is cut.
    assert backward.vector_ops == pytest.approx(6.0 + 1 + 16 / 278)
    taken = attention(
        text.replace('max_logit_const\\": 30', 'max_logit_const\\": null'), "splash_mha_fwd"
    )
    assert taken.vector_ops == forward.vector_ops + 1


def test_a_backward_kernel_whose_mask_is_data_computes_what_the_forward_one_lists() -> None:
    # A ring over 64 devices without balance: in its turns the last device computes all 64 blocks, and the others wait for it.
    text = hlo.text("splash_ring-v5p-128")
    forward, backward = (attention(text, name) for name in ("splash_mha_fwd", "splash_mha_dkv"))
    assert (forward.share, backward.share, backward.assumed) == (1.0, 1.0, "")
    alone = attention(text.replace("splash_mha_fwd", "another"), "splash_mha_dkv")
    assert alone.share == 36 / 64
    assert alone.assumed == "attention taken as causal"


def test_blocks_that_a_mask_cuts() -> None:
    square, wide = Grid(rows=4, columns=4), Grid(rows=8, columns=4)
    assert cut_share(square, 10 / 16, 2048, 2048) == 4 / 10
    assert cut_share(wide, 20 / 32, 1024, 2048) == 8 / 20
    assert cut_share(Grid(rows=4, columns=8), 20 / 32, 2048, 1024) == 8 / 20  # two a row
    assert cut_share(square, 7 / 16, 2048, 2048) == 1.0  # a window
    assert cut_share(Grid(rows=1, columns=1), 1.0, 512, 512) == 1.0


def attention(text: str, name: str) -> Attention:
    """What the call of a kernel says."""
    module = parse(text)
    (call,) = [one for one in module.entry if one.name.startswith(name)]
    found = attention_of(module, module.entry, call, {})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "block", "matmuls"),
    [
        ("splash_named-v6e-1", 2048, {"fwd": 2, "dkv": 4, "dq": 3}),
        ("splash_named_fused-v6e-1", 1024, {"fwd": 2, "dkv": 5}),
    ],
)
def test_blocks_are_read_from_the_names_of_older_kernels(
    name: str, block: int, matmuls: dict[str, int]
) -> None:
    """As JAX before 0.8 names them; the forward kernel's name has the blocks of the others too."""
    found = kernels(hlo.text(name), "v6e-1")
    assert found.keys() == matmuls.keys()
    rows = 8192 // block
    blocks = 2 * 8 * rows * (rows + 1) / 2
    for kind, many in matmuls.items():
        seconds, flops = found[kind]
        assert flops == 2 * many * blocks * block * block * 128
        assert 2 * flops / 918e12 < seconds < 5 * flops / 918e12


def test_steps_in_order_run_on_one_core() -> None:
    """JAX's backward kernels let no two steps of their grid run at once; without a batch one of two cores works."""
    found = kernels(hlo.text("splash_causal-v5e-1"), "v5p-8")
    for name in ("dkv", "dq"):
        seconds, flops = found[name]
        assert flops / (459e12 / 2) < seconds < 1.6 * flops / (459e12 / 2)
    seconds, flops = found["fwd"]
    assert flops / 459e12 < seconds < 2 * flops / 459e12


def test_a_grid_that_says_so_runs_on_both_cores() -> None:
    text = hlo.text("splash_causal-v5e-1")
    alone = kernels(text, "v5p-8")
    said = text.replace(
        '"custom_call_config":{', '"custom_call_config":{"counted":{"parallel":[2],"grid":[]},'
    )
    assert said != text
    assert kernels(said, "v5p-8")["dkv"][0] == pytest.approx(alone["dkv"][0] / 2, rel=1e-6)
    odd = said.replace('"parallel":[2]', '"parallel":[3]')
    assert kernels(odd, "v5p-8")["dkv"][0] == pytest.approx(alone["dkv"][0] * 2 / 3, rel=1e-6)


def test_f32_operands_take_the_matrix_units_their_passes() -> None:
    """Tiles of 8 x 128 in an array of 256 x 256: an eighth of the rate, which is above the softmax's time."""
    text = hlo.text("splash_causal-v5e-1")
    wide = re.sub(r"bf16(\[8,8192,128\]\{2,1,0:T\(8,128\))\(2,1\)", r"f32\1", text)
    plain, more = kernels(text, "v6e-1"), kernels(wide, "v6e-1")
    for name, (seconds, flops) in plain.items():
        assert more[name][0] > 8 * flops / 918e12
        assert more[name][0] > 1.5 * seconds


def test_a_soft_cap_costs_vector_time() -> None:
    text = hlo.text("splash_causal-v5e-1")
    capped = text.replace(
        '"custom_call_config":{', '"custom_call_config":{"counted":{"tanh":1.0,"grid":[]},'
    )
    plain, more = kernels(text, "v6e-1"), kernels(capped, "v6e-1")
    for name, (seconds, _) in plain.items():
        assert seconds < more[name][0] < 1.4 * seconds


def test_blocks_that_the_mask_empties_cost_their_step() -> None:
    """The grid visits them all: 256 steps a head, of which 136 compute."""
    text = hlo.text("splash_causal-v5e-1")
    whole = text.replace(
        '"custom_call_config":{', '"custom_call_config":{"counted":{"grid":[8,16,16]},'
    )
    # A grid with as many steps as the mask leaves blocks.
    shrunk = whole.replace('"grid":[8,16,16]', '"grid":[8,8,17]')
    more = kernels(whole, "v5e-1")["fwd"][0] - kernels(shrunk, "v5e-1")["fwd"][0]
    assert more == pytest.approx(8 * (256 - 136) * 3e-7, rel=0.01)
