"""A model's module as programs have it."""

from flax import nnx

from systolic.models.vision.config import CNN
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
