"""Text written over several devices is that of one, and no step gathers weights, caches or indices."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from systolic.job import Sampling, Served
from systolic.job.layout import Layout
from systolic.models.decoder.config import Decoder
from systolic.steps.decode import Decode
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget
from tests.devices import virtual_devices
from tests.steps import tiny
from tests.steps.decode_child import DENSE, LAYOUTS, MIXTURE, QUICK, ROWS, write


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([n for n in LAYOUTS if n not in QUICK], marks=pytest.mark.slow)],
    ids=["quick", "others"],
)
def test_layouts_write_the_text_of_one_device(names: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.steps.decode_child", *names],
        cwd=Path(__file__).parents[2],
        env=virtual_devices(8),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {(one := json.loads(line))["name"]: one for line in done.stdout.splitlines()}
    assert list(found) == list(names)
    alone = {
        model: write(tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=model)), ROWS, Served())
        for model in {LAYOUTS[name][0] for name in names}
    }
    for name in names:
        model, _, rows = LAYOUTS[name]
        tokens, keys, _ = alone[model]
        assert found[name]["tokens"] == tokens[:rows], name
        np.testing.assert_allclose(found[name]["keys"], keys[:rows], rtol=1e-4)
        # The largest is a row of logits' best ones; a layer's smallest weight has 32 x 2 x 8 elements.
        assert max(found[name]["gathered"], default=0) < 32 * 2 * 8, name


@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_weights_lie_as_a_tpu_reads_them(model: Decoder) -> None:
    """Heads outside of what a projection contracts, and over the expert axis experts only."""
    layout = Layout(data=1, fsdp=1)
    plain = tiny.steps(tiny.job(layout=layout, model=model))
    target = MeshTarget(
        platform="tpu", layout=layout.on(1), dtype="bfloat16", mesh=plain.target.mesh
    )
    placed = Decode(StepFunctions(plain.job, target), Sampling()).placement
    for path in ("blocks/query", "blocks/key", "blocks/value"):
        assert placed[path].layout.major_to_minor == (0, 2, 1, 3)
    assert placed["blocks/out"] == plain.shardings.params["blocks/out"]
    cpu = Decode(plain, Sampling()).placement
    assert cpu == plain.shardings.params
