"""Places in the model, of the names that old and new versions of JAX give ops."""

import pytest

from systolic.sim.timeline import layer_of, phase_of


@pytest.mark.parametrize(
    ("op_name", "layer", "phase"),
    [
        ("jit(train)/transpose(jvp(attention))/while/body/dot_general", "attention", "backward"),
        ("jit(train)/jvp()/while/body/closed_call/attention/bsd,dhe->bshe/dot", "attention", "forward"),
        ("jit(train)/jvp()/while/body/eval_jaxpr/mlp/mul", "mlp", "forward"),
        ("jit(train)/transpose(jvp())/while/body/eval_jaxpr/rematted_computation/mlp/mul", "mlp", "recomputed"),
        ("jit(train)/adam/add", "adam", "update"),
        ("jit(train)/jit(main)/jvp(mlp)/mul", "mlp", "forward"),  # before JAX 0.7
        ("jit(main)/main/mul", "main", "update"),
    ],
)  # fmt: skip
def test_layer_and_phase(op_name: str, layer: str, phase: str) -> None:
    assert (layer_of(op_name), phase_of(op_name)) == (layer, phase)
