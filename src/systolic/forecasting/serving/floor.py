"""Least seconds and memory of a server's steps by its model's sizes, before anything is compiled."""

from dataclasses import dataclass

from systolic.chips import Slice
from systolic.forecasting.serving.forecast import Load, StepTimes
from systolic.forecasting.serving.layout import position_elements, served_parameters
from systolic.formats.matrices import saved_bytes
from systolic.job import Job, Layout, ServedCache
from systolic.models.decoder import sizes
from systolic.models.decoder.config import Decoder
from systolic.sim.rates import rates_of

SIZES = tuple(1 << power for power in range(13))
"""Texts of an engine whose steps are computed; between them seconds are linear."""
SUMS = 2
"""Sums over a tensor axis of a layer: after attention and after its feed-forward part."""


@dataclass(frozen=True, kw_only=True)
class LeastServer:
    """An engine of a layout on a slice: what its bytes, its FLOPs and the fixed time of its collectives take at least."""

    job: Job
    on: Slice
    load: Load
    layout: Layout
    cache: ServedCache = ServedCache.plain

    @property
    def model(self) -> Decoder:
        """The model, a decoder."""
        model = self.job.model
        assert isinstance(model, Decoder)
        return model

    @property
    def item(self) -> int:
        """Bytes of an element in the compute dtype."""
        return 4 if self.job.precision.resolve(self.on.platform).dtype == "float32" else 2

    def weight_bytes(self, chosen: float = 1.0) -> float:
        """Bytes of a device's weights, of the experts a share ``chosen``; quantized ones save alike in all matrices."""
        model, tensor = self.model, self.layout.tensor
        experts = model.mixtures * model.experts * sizes.expert(model) if model.experts > 1 else 0
        all_of = served_parameters(model, tensor) * tensor
        rest = (all_of - experts) / tensor
        kept = 1 - saved_bytes(self.job, self.item) / (all_of * self.item)
        return (rest + chosen * experts / (tensor * self.layout.expert)) * self.item * kept

    @property
    def position_bytes(self) -> float:
        """Bytes of a position of the cache on a device, all layers."""
        elements = position_elements(self.model, self.layout.tensor)
        return elements * (self.cache.item_bytes or self.item)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that a program may use of a device; its temporaries are not known yet."""
        return self.on.program_bytes

    @property
    def room(self) -> int:
        """Requests at their full length beside the weights of an engine."""
        free = self.capacity_bytes - self.weight_bytes()
        return max(int(free // (self.load.tokens * self.position_bytes)), 0)

    def times(self) -> StepTimes:
        """Seconds of steps, none of them above what a compile could give."""
        model = self.model
        reading = min(self.load.chunk, self.load.prompt_tokens)
        flops = reading * sizes.work(model).token + sizes.work(model).logits
        return StepTimes(
            decode={rows: self._step(rows, rows * self._context, rows) for rows in SIZES},
            chunk=self._step(reading, 0.0, flops / self.model.decode_flops(self.load.mean_context)),
            host=self.load.host_seconds,
        )

    @property
    def _context(self) -> float:
        """Positions that a layer reads of each text, in the mean over layers."""
        windows, positions = self.model.windows, self.load.mean_context
        each = [min(window or positions, positions) for window in windows]
        return sum(each[n % len(each)] for n in range(self.model.layers)) / self.model.layers

    def _step(self, tokens: int, positions: float, worked: float) -> float:
        """Seconds of a step of so many tokens that reads positions of the cache and has the FLOPs of ``worked`` tokens of decode."""
        model, devices = self.model, self.layout.tensor * self.layout.expert
        chosen = 1 - (1 - model.experts_per_token / max(model.experts, 1)) ** tokens
        moved = self.weight_bytes(chosen if model.experts > 1 else 1.0)
        if not model.tie_embeddings:
            moved -= model.vocab * model.d_model / self.layout.tensor * self.item
        rates = rates_of(self.on)
        hbm = (self.on.chip.hbm_bytes_per_second or rates.hbm) / (
            self.on.chip.devices_per_chip or 1
        )
        formats = [how.format for _, how in self.job.quantization.matrices]
        int8 = any(kind.activations for kind in formats)
        peak = max(rates.peak("bf16"), rates.peak("s8") if int8 else 0.0)
        working = worked * model.decode_flops(self.load.mean_context) / (peak * devices)
        sums = (SUMS * model.layers + 1) * rates.collective_seconds if devices > 1 else 0.0
        return max((moved + positions * self.position_bytes) / hbm, working) + sums
