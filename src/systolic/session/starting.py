"""Initial weights of a job from an existing model."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from systolic.core.errors import NotFoundError
from systolic.runs.job_record import JobRecord

if TYPE_CHECKING:
    from systolic.runs.weights import Weights
    from systolic.training.setup import Setup


def with_start(
    setup: "Setup", run: Path | None = None, record: JobRecord | None = None
) -> "tuple[Setup, Mapping[str, str | None] | None]":
    """Adds the weights of the job's start to a set-up, and returns their origin; unchanged without a start.

    Args:
        setup: The job on this machine.
        run: A run that was started before.
        record: The run's job.json; its start must be the same.

    Raises:
        NotFoundError: the weights of the start no longer exist.
        RunError: the weights of the start have changed.
    """
    start = setup.job.start
    if start is None:
        return setup, None
    from systolic.formats.weights import starting_weights

    try:
        weights, origin = starting_weights(start, setup.steps)
    except NotFoundError as error:
        if run is None or record is None or record.start is None:
            raise
        raise NotFoundError(
            f"{run} has no copy of the frozen weights of its base model, and {record.start['path']} no longer exists; restore the model there"
        ) from error
    if run is not None and record is not None and record.start is not None:
        origin.require(record.start, run)
    return replace(setup, initial=weights), asdict(origin)


def with_frozen(weights: "Weights", setup: "Setup", run: Path, record: JobRecord) -> "Weights":
    """Adds the frozen weights to those of a checkpoint, which omits them; unchanged if nothing is frozen.

    Raises: as :func:`with_start`.
    """
    if not setup.steps.network.frozen:
        return weights
    begun, _ = with_start(setup, run, record)
    assert begun.initial is not None
    whole = {**weights.model_state, **begun.initial.model_state}
    return replace(weights, model_state=whole)
