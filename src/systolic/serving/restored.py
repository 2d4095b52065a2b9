"""Quantized matrices of a language model that a server on a CPU holds as floats: no product there takes their codes, and each step would restore all of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from systolic.core.units import si
from systolic.inference.model import PreparedModel
from systolic.job import Job, Quantization, WeightFormat
from systolic.models.decoder.config import Decoder

if TYPE_CHECKING:
    from systolic.runs.weights import Weights
    from systolic.setup import Setup

MULTIPLIED = WeightFormat.int8, WeightFormat.w8a8
"""Formats whose codes are multiplied as they are, see :func:`systolic.models.linear.codes_product`."""


def restored_on_cpu(
    model: PreparedModel, again: Callable[[Job], "Setup"], warn: Callable[[str], None]
) -> PreparedModel:
    """The model as a server on a CPU holds it: with floats in place of the codes that it has no product for, where there is memory for them; else as it is.

    Args:
        model: As its files have it.
        again: Sets a job up on the same devices.
        warn: Called with what was done, or why it was not: one line.
    """
    job, machine = model.setup.job, model.setup.machine
    slow = {p: how for p, how in job.quantization.matrices if not _multiplied(job, p, how.format)}
    if machine.platform != "cpu" or not slow or not isinstance(job.model, Decoder):
        return model
    from systolic.serving.text.memory import capacity_bytes

    kept = {p: how for p, how in job.quantization.matrices if p not in slow}
    setup = again(replace(job, quantization=Quantization.of(kept)))
    before, after = (_bytes(prepared) for prepared in (model.setup, setup))
    formats = " and ".join(sorted({how.format.value for how in slow.values()}))
    room = capacity_bytes(machine.devices) * len(machine.devices)
    what = f"{len(slow)} matrices in {formats}, whose codes this CPU has no product for"
    if 2 * after > room:
        warn(
            f"{what}, are restored in each step: as floats they need {si(after, 'B')} in place of {si(before, 'B')}, and {si(room, 'B')} are free; quantize to int8 for a CPU"
        )
        return model
    warn(
        f"{what}, are held as {setup.steps.target.dtype}: {si(after, 'B')} of weights in memory in place of {si(before, 'B')}; quantize to int8 for a CPU"
    )
    return PreparedModel(setup=setup, read=lambda: _restored(model.read(), list(slow), setup))


def _multiplied(job: Job, path: str, kind: WeightFormat) -> bool:
    """Whether a product takes the codes of a matrix as they are; those of experts are multiplied as floats."""
    experts = isinstance(job.model, Decoder) and job.model.experts > 1 and "/mlp/" in path
    return kind in MULTIPLIED and not (experts and path.startswith("blocks/"))


def _restored(weights: "Weights", paths: list[str], setup: "Setup") -> "Weights":
    from systolic.serving.text.converting import with_floats

    params, state = with_floats(
        weights.params, weights.model_state, paths, setup.steps.target.dtype
    )
    return replace(weights, params=params, model_state=state)


def _bytes(setup: "Setup") -> int:
    from systolic.runs.weights import sizes_of

    network = setup.steps.network
    return sum(sizes_of({**network.params, **network.model_state}).bytes_by_dtype.values())
