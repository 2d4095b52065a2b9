"""A Bundle with a program of another framework as a recipe: what its step costs, before there is a loss of one's own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from systolic.core.ranges import COUNT, POSITIVE
from systolic.formats.bundle import open_bundled
from systolic.formats.jobs import job_of
from systolic.job import Batch, Job, Layout


def recipe_of_program(folder: Path) -> Callable[..., Job]:
    """The function of a program's recipe.

    Args:
        folder: Of the Bundle.

    Raises:
        NotFoundError: a file of the Bundle is missing.
        DataError: it is damaged.
    """
    source = open_bundled(folder.absolute())
    own = job_of(source)

    def job(
        batch: Annotated[int | None, COUNT] = None,
        batch_per_device: Annotated[float | None, POSITIVE] = None,
        steps: Annotated[int, COUNT] = 1000,
        layout: Layout = Layout(),
    ) -> Job:
        made = Batch.given(batch, batch_per_device, own.batch)
        return replace(own, batch=made, steps=steps, layout=layout)

    job.__doc__ = f"""A program from {source.bundle.record.source.kind}, in float32. The loss of its train step is a stand-in, the mean square of the outputs.

    Args:
        batch: Examples per step.
        batch_per_device: Examples per step and device; by default {own.batch.per_device:g}.
        steps: Steps to train for.
        layout: How to spread the work.
    """
    return job
