"""A model's module as programs have it."""

import jax
import pytest
from flax import nnx

from systolic.models.vision.config import CNN
from systolic.steps.network import TracedStream
from tests.formats.programs.tiny import JOBS
from tests.steps import tiny


def test_only_training_normalises_by_its_own_batch() -> None:
    network = tiny.steps(JOBS["digits"]()).network
    assert isinstance(network.model, CNN)
    for train in (True, False):
        module = network.module(*network.shapes, train=train)
        norms = [one for _, one in nnx.iter_modules(module) if isinstance(one, nnx.BatchNorm)]
        assert norms
        assert {norm.use_running_average for norm in norms} == {not train}


@pytest.mark.parametrize("name", ["digits", "decoder", "whisper", "mobilenet"])
def test_no_traced_value_is_asked_for_its_sharding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX would walk all that was traced so far, for each random key of a module."""
    askers: list[object] = []
    monkeypatch.setattr(jax.core.Tracer, "sharding", property(askers.append))
    tiny.steps(JOBS[name]())
    assert askers == []


def test_keys_are_those_of_flax() -> None:
    key = jax.random.key(3)
    streams = (TracedStream(key, tag="default"), nnx.RngStream(key, tag="default"))
    ours, theirs = ([stream() for _ in range(3)] for stream in streams)
    assert ours == theirs
    ours, theirs = (stream.fork() for stream in streams)
    assert isinstance(ours, TracedStream)
    assert ours() == theirs()
