"""Devices of a server are shared out as asked for, or as the model fits."""

from dataclasses import replace

import pytest

from systolic.core.errors import LayoutError
from systolic.models.decoder.config import Decoder
from systolic.steps.serving_layout import EngineNeed, ServingLayout, share

MODEL = Decoder(layers=2, d_model=64, d_ff=96, heads=12, kv_heads=3, head_dim=8, vocab=264)
EXPERTS = replace(MODEL, experts=8, experts_per_token=2)


def need(weights: int, capacity: int = 100):
    return lambda tensor: EngineNeed(bytes=-(-weights // tensor), capacity_bytes=capacity)


def shared(asked: ServingLayout, devices: int, weights: int = 50, model: Decoder = MODEL):
    found = share(asked, devices, model, need(weights))
    return found.engines, found.tensor, found.expert, found.idle


def test_as_asked_for() -> None:
    assert shared(ServingLayout(tensor=4), 4) == (1, 4, 1, 0)
    assert shared(ServingLayout(data=2, tensor=1), 4) == (2, 1, 1, 2)
    assert shared(ServingLayout(data=2, tensor=2), 4) == (2, 2, 1, 0)
    # The remaining devices take more engines.
    assert shared(ServingLayout(tensor=2), 8) == (4, 2, 1, 0)
    assert shared(ServingLayout(tensor=3), 8) == (2, 3, 1, 2)
    assert shared(ServingLayout(tensor=2, expert=2), 8, model=EXPERTS) == (2, 2, 2, 0)
    # Four of three key-value heads: each is copied, since four divides the heads.
    assert share(ServingLayout(tensor=4), 4, MODEL, need(1)).layout.tensor == 4


def test_a_model_that_fits_is_replicated_and_one_that_does_not_is_split() -> None:
    assert shared(ServingLayout(), 1) == (1, 1, 1, 0)
    assert shared(ServingLayout(), 8, weights=90) == (8, 1, 1, 0)
    assert shared(ServingLayout(), 8, weights=91) == (4, 2, 1, 0)
    # 3 devices hold it and would leave two of 8 idle; 4 leave none.
    assert shared(ServingLayout(), 8, weights=250) == (2, 4, 1, 0)
    assert shared(ServingLayout(data=2), 8, weights=250) == (2, 3, 1, 2)
    # SmolLM2's nine heads have no part of 2, 4 or 8.
    nine = replace(MODEL, heads=9)
    assert shared(ServingLayout(), 8, weights=250, model=nine) == (2, 3, 1, 2)
    assert shared(ServingLayout(data=1), 8, weights=90) == (1, 1, 1, 7)
    assert shared(ServingLayout(), 8, weights=10_000) == (1, 6, 1, 2)
    found = share(ServingLayout(), 8, MODEL, need(250 << 30, 100 << 30))
    assert found.reason == (
        "weights and pages of 250.00 GiB of 100.00 GiB do not fit on one device, "
        "weights and pages of 83.33 GiB of 100.00 GiB fit on 3, and 4 leave fewer devices idle"
    )
    found = share(ServingLayout(), 8, nine, need(250 << 30, 100 << 30))
    assert found.told_idle == (
        "2 of 8 devices are idle: 2 engines of 3 take 6 (weights and pages of 250.00 GiB of 100.00 GiB do not fit on one device, "
        "weights and pages of 83.33 GiB of 100.00 GiB fit on 3); take a number of devices that 3 divides, or another --layout.tensor that the model's sizes allow"
    )


def test_what_does_not_divide_is_refused_with_what_does() -> None:
    def refused(asked: ServingLayout, devices: int = 8, model: Decoder = MODEL) -> str:
        with pytest.raises(LayoutError) as caught:
            share(asked, devices, model, need(1))
        return str(caught.value)

    assert refused(ServingLayout(data=2, tensor=8)) == (
        "layout.data 2 x layout.tensor 8 needs 16 devices and 8 devices are here; give less"
    )
    assert refused(ServingLayout(data=2), devices=1).endswith("1 device is here; give less")
    assert refused(ServingLayout(tensor=8)) == (
        "layout.tensor 8 does not divide the heads of 12; this model is served with layout.tensor 1, 2, 3, 4, 6, 12"
    )
    odd = replace(MODEL, d_ff=98)
    assert refused(ServingLayout(tensor=4), model=odd) == (
        "layout.tensor 4 does not divide the d-ff of 98; this model is served with layout.tensor 1, 2"
    )
    assert "the model is dense" in refused(ServingLayout(tensor=1, expert=2))
    assert "does not divide the experts of 8" in refused(
        ServingLayout(tensor=1, expert=3), model=EXPERTS
    )
    with pytest.raises(LayoutError, match=r"layout\.tensor"):
        ServingLayout(tensor=0)
