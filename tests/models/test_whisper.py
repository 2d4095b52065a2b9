"""Whisper: what it counts, learns, refuses, and how a mesh splits it."""

import json
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest

from systolic.core.errors import LayoutError, OptionError
from systolic.job import Field, Layout, Remat
from systolic.models.whisper.config import Whisper
from systolic.steps import jaxpr
from tests.devices import virtual_devices
from tests.models import speech

ONE = Layout(data=1, fsdp=1)
LARGE = Whisper(
    encoder_layers=32, decoder_layers=32, d_model=1280, d_ff=5120, heads=20, vocab=51_865
)


def test_parameters_are_the_published_ones() -> None:
    # openai/whisper, model-card: 39 M and 1550 M; to the digit from its state dicts without the sinusoids.
    assert Whisper(vocab=51_864).num_parameters == 37_184_256
    assert LARGE.num_parameters == 1_541_384_960
    assert speech.steps(ONE, speech.MODEL).network.num_parameters == speech.MODEL.num_parameters


def test_flops_are_those_of_the_program_and_by_hand() -> None:
    of = speech.steps(ONE, speech.MODEL)

    def run(params, rest, batch):
        return of.sums(params, rest, batch, train=False)[0]["loss"].total

    counted = jaxpr.count(run, of.network.params, of.network.model_state, of.abstract_batch(1))
    # The program multiplies every pair of tokens; those that are seen are n (n + 1) / 2 of n^2.
    hidden = 3 * 2 * 2 * speech.MODEL.d_model * (11 * 11 - 11 * 12 // 2)
    assert of.forward_flops == counted - hidden
    fields = {
        "features": Field(shape=(3000, 80), dtype="float32"),
        "tokens": Field(shape=(1,), dtype="int32"),
    }
    d, f, vocab = 384, 1536, 51_865
    stem = 3000 * 3 * 80 * d + 1500 * 3 * d * d
    encoder = 4 * (1500 * (4 * d * d + 2 * d * f) + 2 * 1500 * 1500 * d)
    decoder = 4 * (6 * d * d + 2 * d * f + 1500 * 2 * d * d + 2 * d + 2 * 1500 * d) + d * vocab
    assert Whisper().flops(fields) == 2 * (stem + encoder + decoder)
    assert Whisper().input_flops(fields) == 2 * 3000 * 3 * 80 * d


@pytest.mark.slow
def test_the_first_loss_is_that_of_chance_and_every_parameter_has_a_gradient() -> None:
    of = speech.steps(ONE)

    @partial(jax.value_and_grad, has_aux=True)
    def loss(params, rest, batch):
        sums, rest = of.sums(params, rest, batch, train=True)
        return sums["loss"].total / sums["loss"].weight, (sums["loss"].weight, rest)

    @jax.jit
    def first(key, batch):
        params, rest = of.network.init(key)
        return loss(params, rest, batch), rest

    ((value, (weight, after)), gradients), rest = first(jax.random.key(0), speech.batch(of))
    assert value == pytest.approx(np.log(101), abs=0.1)
    assert weight == 8 * 8
    assert [path for path, gradient in gradients.items() if not float(abs(gradient).max())] == []
    np.testing.assert_array_equal(after["frames"], rest["frames"])


@pytest.mark.slow
def test_layouts_and_policies_train_the_same_model_and_bf16_one_near_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.models.whisper_child"],
        env=virtual_devices(8),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ran.returncode, ran.stderr[-3000:]
    losses = json.loads(ran.stdout)
    plain, narrow = losses.pop("plain"), losses.pop("bf16")
    assert len(losses) == 3
    assert plain[-1] < plain[0] - 0.1
    for name, other in losses.items():
        np.testing.assert_allclose(other, plain, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(narrow, plain, rtol=2e-2)
    assert narrow != plain


def test_the_tensor_axis_splits_heads_and_fsdp_the_width() -> None:
    specs = speech.steps(Layout(data=1, fsdp=2, tensor=2)).shardings.params
    assert specs["encoder/attention/query"].spec[1:3] == ("fsdp", "tensor")
    assert specs["decoder/cross/out"].spec[1:4] == ("tensor", None, "fsdp")
    assert specs["conv2"].spec[2] == "fsdp"


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(tensor=3), "layout.tensor 3 does not divide model.heads 20"),
        (Layout(context=2), "layout.context is 2 but Whisper"),
        (Layout(loss_chunks=2), "layout.loss-chunks is 2 but the texts"),
        (Layout(remat=Remat.offload, remat_names=("quer",)), "did you mean query"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(layout: Layout, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        LARGE.check(layout)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(
        OptionError, match=r"model.d-model 384 is not an even multiple of model.heads 5"
    ):
        Whisper(heads=5)
    small = LARGE.shrink(Layout(tensor=2, fsdp=3))
    small.check(Layout(tensor=2, fsdp=3))
    assert (small.d_model, small.frames) == (96, 1500)
