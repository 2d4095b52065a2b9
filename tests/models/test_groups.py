"""Batch norm over groups of a batch, and models over several devices, held against one device and a calculation by hand."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from systolic.core.errors import OptionError
from systolic.hlo.groups import parse_groups
from systolic.job import Batch, Layout
from systolic.models.layers import ConvNorm, start
from systolic.models.vision.config import Pixels, ResNet, Stem
from systolic.recipes.image import ImageModel, image
from tests.devices import virtual_devices
from tests.models import encoders, images
from tests.models.groups_child import GROUPS, encoder, example, grouped


def on_eight_devices(what: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.groups_child", what],
        cwd=Path(__file__).parents[2],
        env=virtual_devices(8),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_statistics_of_a_group_by_hand_on_eight_devices() -> None:
    found, x = on_eight_devices("norms"), example()
    for size in GROUPS:
        of, means, variances = found[str(size)], [], []
        for first in range(0, 16, size):
            group = x[first : first + size].reshape(-1, 5)
            means.append(group.mean(axis=0))
            variances.append(group.var(axis=0))
            expected = (x[first : first + size] - means[-1]) / np.sqrt(variances[-1] + 1e-5)
            np.testing.assert_allclose(
                np.array(of["out"])[first : first + size], expected, rtol=1e-3, atol=1e-3
            )
        np.testing.assert_allclose(of["mean"], 0.1 * np.mean(means, axis=0), rtol=1e-4)
        np.testing.assert_allclose(of["var"], 0.9 + 0.1 * np.mean(variances, axis=0), rtol=1e-4)
    # Two devices hold a group of 4 examples, and add up with each other only.
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert any(parse_groups(one, 8).groups == pairs for one in found["4"]["groups"])


@pytest.mark.slow
def test_models_over_eight_devices_train_as_on_one() -> None:
    found = on_eight_devices("training")
    alone = encoder(encoders.ONE_DEVICE, 1)
    for name in ("fsdp-tensor", "data-context"):
        assert found[name] == pytest.approx(alone, rel=2e-5)
    assert found["groups"] == pytest.approx(grouped(4, 1), rel=1e-4)
    assert found["groups"] != pytest.approx(grouped(0, 1), rel=1e-3)


def test_a_stem_in_pairs_is_the_same_network() -> None:
    models = [
        ResNet(depth=images.Depth.d10, width=4, stem=stem, num_classes=7, pixels=images.COLOURED)
        for stem in (Stem.imagenet, Stem.paired)
    ]
    plain, paired = (images.steps(model) for model in models)

    def stem() -> Any:
        with nnx.use_eager_sharding(False):
            made = ConvNorm(3, 4, 7, nnx.Rngs(0), plain.target, stride=2)
            start(made, nnx.Rngs(0))
        made.eval()
        return nnx.split(made)

    assert plain.network.num_parameters == paired.network.num_parameters
    graph, state = stem()
    image = np.random.default_rng(0).normal(size=(2, 16, 12, 3)).astype(np.float32)

    def gradient(paired: bool) -> Any:
        def loss(state: nnx.State) -> jax.Array:
            made = nnx.merge(graph, state)
            out = made.by_pairs(image) if paired else made(image)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

        return jax.jit(jax.value_and_grad(loss))(state)

    one, other = gradient(False), gradient(True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), one, other)
    fields = plain.job.data.fields()
    assert models[0].flops(fields) == models[1].flops(fields)


def test_groups_that_do_not_divide_are_one_line() -> None:
    def job(**changes: Any) -> Any:
        return image(path=Path("."), classes=10, **changes)

    for made, says in (
        (
            lambda: job(batch=48, norm_examples=32).on(4),
            "model.norm-examples 32 does not divide the 48 examples of a pass; use a divisor of 48",
        ),
        (
            lambda: replace(job(batch=64, norm_examples=32), layout=Layout(accumulate=4)).on(1),
            "does not divide the 16 examples of a pass",
        ),
        (lambda: job(model=ImageModel.vit_s, norm_examples=32), "the model is vit-s; leave it out"),
        (lambda: ResNet(stem=Stem.paired, pixels=Pixels(size=225)), "the image size 225 is odd"),
    ):
        with pytest.raises(OptionError, match=says) as caught:
            made()
        assert "\n" not in str(caught.value)
    assert job(batch=64, norm_examples=32).on(4).batch == Batch(total=64)
