"""Which device holds which part of a mixture's experts."""

from pathlib import Path

import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from systolic import recipes
from systolic.chips import slice
from systolic.compiling import Compiled, Compiler, JobProgram, compile
from systolic.job import Axis, Layout
from systolic.steps.target import RULES, SERVING, MeshTarget, parameter_spec

pytestmark = pytest.mark.own_programs

GATE = ("layers", "experts", "expert_embed", "mlp")


def lies(layout: Layout, experts: int, serving: bool = False) -> P:
    """The partition of a gate of 61 layers, some experts, 7168 by 2048."""
    mesh = AbstractMesh(tuple(layout.mesh_shape.values()), tuple(axis.value for axis in Axis))
    rules = SERVING if serving else RULES
    target = MeshTarget(platform="tpu", layout=layout, dtype="bfloat16", mesh=mesh, rules=rules)
    return parameter_spec(target, (61, experts, 7168, 2048), GATE)


@pytest.mark.parametrize(
    ("layout", "experts", "expected"),
    [
        (Layout(fsdp=256), 256, P(None, "fsdp", None, None)),
        (Layout(fsdp=4), 8, P(None, "fsdp", None, None)),
        (Layout(fsdp=16), 8, P(None, None, "fsdp", None)),
        (Layout(fsdp=4, expert=8), 64, P(None, ("expert", "fsdp"), None, None)),
        (Layout(fsdp=8, expert=8), 8, P(None, "expert", "fsdp", None)),
        (Layout(fsdp=4, tensor=2), 8, P(None, "fsdp", None, "tensor")),
        (Layout(fsdp=1), 8, P(None, None, None, None)),
    ],
)
def test_fsdp_splits_experts_by_number_where_it_divides_them(
    layout: Layout, experts: int, expected: P
) -> None:
    assert lies(layout, experts) == expected


def test_serving_splits_experts_over_the_expert_axis_only() -> None:
    assert lies(Layout(fsdp=4), 8, serving=True) == P(None, None, "fsdp", None)


@pytest.mark.slow
def test_mixtral_of_16_layers_fits_where_it_ran(tmp_path: Path) -> None:
    """On v6e-4 (torchprime's CI): split by the embedding it took 34.98 of 31.25 GiB, with a stack of gates copied."""
    pytest.importorskip("libtpu")
    sizes = {"layers": 16, "d_model": 4096, "d_ff": 14336, "heads": 32, "kv_heads": 8}
    more = {"head_dim": 128, "vocab": 32000, "tie_embeddings": False}
    experts = {"experts": 8, "experts_per_token": 2, "capacity_factor": 1.25}
    given = {
        "model": {**sizes, **more, **experts},
        "sequence": 8192,
        "batch": 8,
        "layout": {"fsdp": 4, "remat": "full", "attention_backward": "split"},
        "precision": "bf16",
        "optimizer": {"kind": "adafactor"},
        "dtypes": dict.fromkeys(("parameters", "gradients", "moments"), "bf16"),
    }
    recipe = recipes.find("lm")
    job = recipe(recipes.typed(recipe, given))
    made = compile(JobProgram(job=job), slice("v6e-4"), Compiler(root=tmp_path).quick())
    assert isinstance(made, Compiled)
