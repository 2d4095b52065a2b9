"""A job on fewer devices than it was made for: the same batch, in more passes where it needs them."""

from dataclasses import dataclass, replace

from systolic.core.errors import LayoutError
from systolic.job.job import Batch, Job
from systolic.job.layout import Axis, Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Fewer:
    """A job that was made for more devices than there are."""

    meant: Job
    """With the definite layout and batch that it was made for."""
    job: Job
    """For the devices that are there."""
    text: str
    """Summary of the change, on one line."""


def on_fewer(job: Job, meant: int, num_devices: int, num_slices: int = 1) -> Fewer | None:
    """The job with the same batch in every step; None where no device is missing.

    The axis that crosses slices shrinks with the devices, or one at -1 does, or fsdp; passes grow so that no device
    has more examples at a time.

    Args:
        job: With its layout for all devices.
        meant: Devices that layout and batch are for.
        num_devices: Devices that are there.
        num_slices: Slices that they are in.

    Raises:
        LayoutError: there are more devices than ``meant``, no axis shrinks to a whole number, or the batch does not divide.
    """
    if num_devices > meant:
        raise LayoutError(
            f"for-devices is {meant} and {num_devices} devices are available; give --for-devices {num_devices}, or leave it out"
        )
    if num_devices == meant:
        return None
    full = job.layout.on(meant)
    total = job.batch.resolve(full)
    shrunk = _shrunk(job.layout, full, num_devices).on(num_devices, num_slices)
    most = total // (full.batch_ways * full.accumulate)
    rows = next((n for n in range(most, 0, -1) if total % (shrunk.batch_ways * n) == 0), 0)
    if not rows:
        raise LayoutError(
            f"batch of {total} does not divide by the {shrunk.batch_ways} parts that {num_devices} of {meant} devices have (data {shrunk.data} x fsdp {shrunk.fsdp} x expert {shrunk.expert}); start all devices, or give a layout for {num_devices}"
        )
    layout = replace(shrunk, accumulate=total // (shrunk.batch_ways * rows))
    changes = ", ".join(
        f"{axis.value} {layout.size(axis)} (was {full.size(axis)})"
        for axis in Axis
        if layout.size(axis) != full.size(axis)
    )
    passes = f"{layout.accumulate} (was {full.accumulate})"
    return Fewer(
        meant=replace(job, layout=full, batch=Batch(total=total)),
        job=replace(job, layout=layout, batch=Batch(total=total)),
        text=f"{num_devices} of {meant} devices are here: batch {total} as before, passes a step {passes}, {changes}",
    )


def _shrunk(layout: Layout, full: Layout, num_devices: int) -> Layout:
    """The layout with an axis that is smaller in proportion, or still takes the remaining devices.

    Raises:
        LayoutError: there is none.
    """
    crossing = layout.slices
    for axis in (crossing, Axis.fsdp, Axis.data):
        size = full.size(axis) * num_devices
        if layout.size(axis) > 1 and size % full.num_devices == 0:
            return replace(layout, **{axis.value: size // full.num_devices})
        if axis is crossing and not layout.definite and layout.fits(num_devices):
            return layout
    raise LayoutError(
        f"layout {full.text} is for {full.num_devices} devices, and neither {crossing.value} nor fsdp shrinks to {num_devices}; start all of them, or give a layout for {num_devices}"
    )
