"""Jobs on fewer devices than they were made for: same examples, smaller axes, more passes."""

from typing import Any

import pytest

from systolic.core.errors import LayoutError
from systolic.job import Axis, Batch, Evaluation, Layout, on_fewer
from systolic.job.job import Job
from tests.steps import tiny


def job(layout: Layout, batch: Batch, **more: Any) -> Job:
    return tiny.job(layout=layout, batch=batch, **more)


@pytest.mark.parametrize(
    ("layout", "devices", "axes", "passes"),
    [
        # One of two slices: a replica less, twice the passes.
        (Layout(data=2, fsdp=4), 4, {"data": 1, "fsdp": 4}, 2),
        (Layout(data=2), 4, {"data": 1, "fsdp": 4}, 2),
        # The remaining devices fill the axis that takes them.
        (Layout(), 4, {"fsdp": 4}, 2),
        (Layout(tensor=2), 4, {"fsdp": 2, "tensor": 2}, 2),
        # A replica is on both slices.
        (Layout(fsdp=8), 4, {"fsdp": 4}, 2),
        (Layout(fsdp=8, accumulate=3), 4, {"fsdp": 4}, 6),
        # Three of four slices: no device takes more examples at a time than before.
        (Layout(data=4, fsdp=2), 6, {"data": 3, "fsdp": 2}, 2),
        (Layout(pipeline=2, fsdp=4, slices=Axis.pipeline), 4, {"pipeline": 1, "fsdp": 4}, 1),
    ],
)
def test_the_batch_stays(layout: Layout, devices: int, axes: dict[str, int], passes: int) -> None:
    made = on_fewer(job(layout, Batch(per_device=3)), 8, devices)
    assert made is not None
    full, here = made.intended, made.job
    total = 24 * layout.accumulate
    assert full.batch.resolve(full.layout) == here.batch.resolve(here.layout) == total
    assert here.layout.num_devices == devices
    assert {name: size for name, size in here.layout.mesh_shape.items() if size > 1} == {
        name: size for name, size in axes.items() if size > 1
    }
    assert here.layout.accumulate == passes
    rows = [total // (one.layout.batch_ways * one.layout.accumulate) for one in (full, here)]
    assert rows[1] <= rows[0]
    assert f"{devices} of 8 devices are here: batch {total} as before, passes a step" in made.text


def test_evaluations_stay() -> None:
    """Their batches are those of the layout that was meant; three examples a device become two."""
    evaluation = Evaluation(every=10, batches=1, final_batches=0)
    made = on_fewer(job(Layout(accumulate=2), Batch(total=96), evaluation=evaluation), 3, 2)
    assert made is not None
    assert "passes a step 3 (was 2), fsdp 2 (was 3)" in made.text
    assert made.job.evaluation == made.intended.evaluation == evaluation


def test_all_devices_change_nothing() -> None:
    assert on_fewer(job(Layout(), Batch(total=16)), 8, 8) is None


def test_more_devices_are_refused() -> None:
    """A batch per device would be another batch than the one that is meant."""
    with pytest.raises(LayoutError, match="for-devices is 8 and 16 devices are available"):
        on_fewer(job(Layout(), Batch(per_device=2)), 8, 16)


@pytest.mark.parametrize(
    ("layout", "batch", "devices", "says"),
    [
        (Layout(fsdp=1, tensor=8), 16, 4, "neither data nor fsdp shrinks to 4"),
        (Layout(data=2, fsdp=1, tensor=4), 16, 6, "neither data nor fsdp shrinks to 6"),
        (Layout(data=4, fsdp=2), 16, 6, "batch of 16 does not divide by the 6 parts that 6 of 8"),
        (Layout(data=4), 16, 6, "batch of 16 does not divide by the 6 parts"),
        (Layout(data=3), 16, 4, "needs a multiple of 3 devices"),
    ],
)
def test_what_does_not_shrink_is_refused(
    layout: Layout, batch: int, devices: int, says: str
) -> None:
    with pytest.raises(LayoutError, match=says):
        on_fewer(job(layout, Batch(total=batch)), 8, devices)
