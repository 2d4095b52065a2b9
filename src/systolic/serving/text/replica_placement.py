"""Devices and steps of each engine of a language model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.data.text.text_data import TextData
from systolic.job import Batch, Job, Layout
from systolic.models.decoder.config import Decoder
from systolic.serving.text.memory import capacity_bytes, held_bytes
from systolic.serving.text.opening import EngineSizes, context_of
from systolic.steps.paged import PagedSteps
from systolic.steps.serving_layout import DeviceShares, EngineNeed, ServingLayout, share
from systolic.steps.steps import StepFunctions
from systolic.steps.target import MeshTarget


@dataclass(kw_only=True)
class ReplicaPlacement:
    """Shares out devices for the first engine of a model, and gives the others theirs."""

    asked: ServingLayout
    sizes: EngineSizes
    told: Callable[[DeviceShares], None] = lambda _: None
    """Called with what was chosen."""
    shares: DeviceShares | None = None
    """None until an engine was placed."""

    @property
    def engines(self) -> int:
        """Engines of the model; one where it is no language model."""
        return 1 if self.shares is None else self.shares.engines

    def place(
        self, job: Job, platform: str, devices: Sequence[Any], number: int
    ) -> tuple[Layout, Sequence[Any]] | None:
        """Layout and devices of an engine; None where the job continues no texts.

        Args:
            job: The model's.
            platform: Of the devices.
            devices: Of this machine.
            number: Which engine.

        Raises: as :func:`systolic.steps.serving_layout.share`.
        """
        model = job.model
        if not isinstance(job.data, TextData) or not isinstance(model, Decoder):
            return None
        if self.shares is None:
            self.shares = share(
                self.asked,
                len(devices),
                model,
                lambda tensor: self._need(job, platform, devices, tensor),
            )
            self.told(self.shares)
        each = self.shares.each
        return self.shares.layout, devices[number * each : (number + 1) * each]

    def _need(self, job: Job, platform: str, devices: Sequence[Any], tensor: int) -> EngineNeed:
        shares = DeviceShares(
            devices=len(devices), engines=1, tensor=tensor, expert=self.asked.expert, reason=""
        )
        placed = replace(job, layout=shares.layout, batch=Batch(total=shares.each))
        target = MeshTarget.of(placed, platform, devices[: shares.each])
        steps = StepFunctions(placed, target, trains=False)
        data = job.data
        assert isinstance(data, TextData)
        paged, context = (
            PagedSteps(steps, self.sizes.page_size, self.sizes.cache),
            context_of(steps, data, self.sizes),
        )
        longest = -(-context // self.sizes.page_size)
        pages = self.sizes.pages or self.sizes.rows * longest + 1
        held = held_bytes(paged.placed_weights) + held_bytes(paged.placed_pages(pages))
        return EngineNeed(bytes=held, capacity_bytes=capacity_bytes(devices[: shares.each]))
