"""Detection of multi-process jobs from the environment, and collectives in a single process."""

import pytest

from systolic.core.errors import OptionError
from systolic.training import distributed


@pytest.mark.parametrize(
    "environ",
    [
        {"JAX_COORDINATOR_ADDRESS": "10.0.0.2:1234"},
        {"SLURM_STEP_NUM_TASKS": "4"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"MEGASCALE_NUM_SLICES": "2"},
        {"TPU_WORKER_HOSTNAMES": "t1k-0,t1k-1"},
    ],
)
def test_one_of_several(environ: dict[str, str]):
    assert distributed.belongs(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": ""},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    ],
)
def test_alone(environ: dict[str, str]):
    assert not distributed.belongs(environ)
    assert not distributed.join(environ)


def test_half_a_description_is_refused():
    environ = {"JAX_COORDINATOR_ADDRESS": "10.0.0.2:1234", "JAX_PROCESS_ID": "1"}
    with pytest.raises(OptionError, match="JAX_NUM_PROCESSES is not set"):
        distributed.join(environ)


def test_a_single_process_agrees_with_itself():
    assert distributed.is_first()
    assert not distributed.several()
    assert distributed.share("runs/a") == "runs/a"
    assert distributed.any_of(True)
    assert not distributed.any_of(False)
