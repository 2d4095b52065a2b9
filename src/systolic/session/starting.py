"""The model that a job begins with, opened for a session of training or use."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from systolic.artifact.job_record import JobRecord
from systolic.core.errors import NotFoundError

if TYPE_CHECKING:
    from systolic.artifact.weights import Weights
    from systolic.training.setup import Setup


def with_start(
    setup: "Setup", run: Path | None = None, record: JobRecord | None = None
) -> "tuple[Setup, Mapping[str, str | None] | None]":
    """A set-up that begins with the weights of its job's start, and where these are from; unchanged without a start.

    Args:
        setup: The job on this machine.
        run: A run that has begun before.
        record: Its job.json: the start must be the same.

    Raises:
        NotFoundError: there are no weights at the start any more.
        RunError: they are others.
    """
    start = setup.job.start
    if start is None:
        return setup, None
    from systolic.interop.starting import starting_weights

    try:
        weights, origin = starting_weights(start, setup.steps)
    except NotFoundError as error:
        if run is None or record is None or record.start is None:
            raise
        raise NotFoundError(
            f"{run} has no copy of the frozen weights that it trains beside, and {record.start['path']} is gone; put the model back there"
        ) from error
    if run is not None and record is not None and record.start is not None:
        origin.require(record.start, run)
    return replace(setup, initial=weights), asdict(origin)


def with_frozen(weights: "Weights", setup: "Setup", run: Path, record: JobRecord) -> "Weights":
    """The weights of a checkpoint with the frozen ones that it leaves out; as they are where nothing is frozen.

    Raises: as :func:`with_start`.
    """
    if not setup.steps.network.frozen:
        return weights
    begun, _ = with_start(setup, run, record)
    assert begun.initial is not None
    whole = {**weights.model_state, **begun.initial.model_state}
    return replace(weights, model_state=whole)
