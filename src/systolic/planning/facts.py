"""Facts of a job for the analytic model: parameters, FLOPs, layer sizes. Traced once for models without statistics."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from systolic.job import AdapterKind, Job, Layout, ModelStats, Optimizer, OptimizerKind, Remat

_MOMENTS: Mapping[OptimizerKind, int] = {
    OptimizerKind.adamw: 2,
    OptimizerKind.lamb: 2,
    OptimizerKind.sgd: 1,
    OptimizerKind.lars: 1,
    OptimizerKind.lion: 1,
    OptimizerKind.muon: 1,
    OptimizerKind.adafactor: 0,
}
"""Full moments per parameter of an optimizer; adafactor's factored ones are small."""
_FROZEN_BYTES: Mapping[AdapterKind, float] = {
    AdapterKind.none: 0.0,
    AdapterKind.lora: 2.0,
    AdapterKind.qlora: 0.5 + 2.0 / 64,
}
"""Bytes per frozen parameter in bf16, or in 4 bits with a scale for 64: a lower bound, since embeddings are not in 4 bits."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of one job that do not depend on the layout."""

    job: Job
    unit: str
    """``tokens`` or ``examples``."""
    units_per_example: int
    forward_flops: float
    """Matmul FLOPs of one example's forward pass."""
    parameters: int

    @cached_property
    def state_bytes(self) -> float:
        """Bytes per parameter kept for the whole run: master weight, optimizer state, average; with adapters the frozen weights, and these of the adapters."""
        return _FROZEN_BYTES[self.job.adapter.kind] + self.trained_share * self._trained_bytes

    @property
    def saved_bytes(self) -> float:
        """Bytes of a checkpoint: what trains, its optimizer state and its average."""
        return self.trained_share * self._trained_bytes * self.parameters

    @property
    def trained_share(self) -> float:
        """Parameters that train over those of the model: 1 without adapters."""
        return self.job.adapter_parameters / self.parameters if self.job.adapter else 1.0

    @property
    def _trained_bytes(self) -> float:
        optimizer: Optimizer = self.job.optimizer
        average = 4.0 if optimizer.ema else 0.0
        return self.job.dtypes.parameters.bytes + self._moment_bytes + average

    @cached_property
    def update_bytes(self) -> float:
        """HBM bytes of an update per parameter: weight and moments read and written, the gradient read."""
        each = 2.0 * self._trained_bytes + self.job.dtypes.gradients.bytes
        return self.trained_share * each

    @property
    def _moment_bytes(self) -> float:
        return _MOMENTS[self.job.optimizer.kind] * self.job.dtypes.moments.bytes

    def outline(self, layout: Layout) -> ModelStats:
        """The model's statistics; with parameters only where it has none."""
        key = (layout.remat_names, layout.saved_names)
        if key not in self._outlines:
            self._outlines[key] = self.job.model.outline(layout) or self._bare
        return self._outlines[key]

    @cached_property
    def _outlines(self) -> dict[tuple[tuple[str, ...], ...], ModelStats]:
        return {}

    @cached_property
    def _bare(self) -> ModelStats:
        return ModelStats(
            parameters=self.parameters,
            kept=dict.fromkeys(Remat, (0, 0)),
            repeated={remat: 1.0 if remat is Remat.full else 0.0 for remat in Remat},
        )

    @property
    def train_flops(self) -> float:
        """Model FLOPs of one example's train step: forward, and backward at twice that, less gradients of frozen weights."""
        frozen = self.job.model.weight_flops(self.job.data.fields()) if self.job.adapter else 0.0
        return 3.0 * self.forward_flops - frozen


def facts_of(job: Job) -> Facts:
    """Facts of a job; imports jax for models that have no statistics.

    Raises:
        LayoutError: the data's fields contradict the model.
    """
    fields = job.data.fields()
    unit = "tokens" if "tokens" in fields else "examples"
    per_example = fields["tokens"].shape[0] if unit == "tokens" else 1
    known, flops = job.model.outline(Layout()), job.forward_flops
    if known is None or flops is None:
        from systolic.steps.outline import count

        parameters, forward = count(job)
    else:
        parameters, forward = known.parameters, flops
    return Facts(
        job=job,
        unit=unit,
        units_per_example=per_example,
        forward_flops=forward,
        parameters=parameters,
    )
