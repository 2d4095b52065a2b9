"""Programs that a server's capacity is forecast from: those of ``systolic serve``, or a batch's for other splits and formats; and bounds of their seconds and memory by the model's sizes, before a compile."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from systolic.chips import Slice
from systolic.compiling import PagedProgram, Program, ServingProgram
from systolic.compiling.traced import ProgramFacts
from systolic.core.errors import LayoutError, OptionError
from systolic.forecasting import Forecast
from systolic.forecasting.serving.forecast import Load, StepTimes
from systolic.forecasting.serving.layout import position_elements, served_parameters
from systolic.formats.matrices import saved_bytes
from systolic.job import (
    MOST_RANK,
    Adapter,
    AdapterKind,
    Axis,
    ExpertAxis,
    Job,
    Layout,
    Quantization,
    Served,
    ServedCache,
    ServedWeights,
    WeightFormat,
)
from systolic.models.decoder import sizes
from systolic.models.decoder.checks import check_served
from systolic.models.decoder.config import Decoder
from systolic.runs.bundle.folder import MANIFEST, open_bundle
from systolic.sim.rates import rates_of
from systolic.steps.serving_layout import LEAST_ROWS

ADAPTER_RANK = 16
"""Rank of adapters of which none is given."""
ENGINE_AXES = (Axis.data, Axis.expert, Axis.tensor)
"""Mesh axes of ``systolic serve``."""
LOGIT_BYTES = 4
CHOICE_LOGITS = {"cpu": 5.0, "tpu": 4.3}
"""Arrays of the size of the logits that the choice by all settings needs beside its arguments, by platform; any other counts as a CPU.
Measured by ``benchmarks/serve/choice_memory.py`` (2026-11-23, jax 0.10.2, libtpu 0.0.42.1): on a CPU 5.00 to 5.01 of 1 to 256 texts with
vocabularies of 32,000 to 262,144; on v6e 4.26 of 8 and 16 texts, 3.00 of 64."""
GATHER_LOGITS = 2.0
"""More of them where a tensor axis splits the logits, which the choice gathers first: on four devices of v5e 5.26 and 6.26 in all."""
PAGED = "step over pages, as systolic serve runs it"
BATCH = "decode step and one-pass prefill of a batch; systolic serve has no such split or format"
CACHE = "the cache of the compiled steps is one array per text; a paged kernel reads the same bytes in pages"
WHOLE = "a chunk takes its share of the prompt's one-pass prefill, and no less than a pass over as many tokens alone"
CHOICE = "the choice of tokens from the logits is a program of its own, not priced; its arrays count as temporaries"
HOSTS = "systolic serve takes the devices of one machine; this slice has {} hosts"

Key = tuple[int, int]
"""Texts of a replica and tokens that are read of each; a chunk of a prompt is (1, tokens)."""
SIZES = tuple(1 << power for power in range(13))
"""Texts of an engine whose steps are computed; between them seconds are linear."""
SUMS = 2
"""Sums over a tensor axis of a layer: after attention and after its feed-forward part."""


class ServerSteps(Protocol):
    """Steps of a server: what to compile, and what its memory and seconds are made of."""

    @property
    def name(self) -> str:
        """Which programs these are."""
        ...

    @property
    def replicas(self) -> int:
        """Groups of devices with pages of their own."""
        ...

    @property
    def prompts(self) -> list[int]:
        """Tokens of the programs that read prompts, ascending."""
        ...

    def context(self, tokens: int) -> int:
        """Positions of each text's cache in the step that reads so many tokens of each."""
        ...

    def program(self, key: Key) -> Program:
        """The step."""
        ...

    def weights_bytes(self, decode: Forecast) -> int:
        """Bytes of the weights on one device."""
        ...

    def page_bytes(self, decode: Forecast) -> int:
        """Bytes of a page on one device; 0 for a model without a cache."""
        ...

    def temporary_bytes(self, key: Key, forecast: Forecast) -> int:
        """Bytes of a program beside weights and pages."""
        ...

    def least_temporary_bytes(self, rows: int) -> int:
        """Bytes that a step of so many texts of a replica needs beside weights and pages, whatever its program is."""
        ...

    def chunk_seconds(self, seconds: Mapping[Key, float]) -> float:
        """Seconds that a chunk of a prompt adds to a step."""
        ...

    def notes(self) -> list[str]:
        """Parts that the figures leave out."""
        ...


def with_formats(job: Job, target: str, weights: ServedWeights) -> Job:
    """A job with the quantized matrices that ``systolic serve`` would read.

    Args:
        job: A model.
        target: What it was made of: a quantized Bundle has formats of its own.
        weights: The format that was asked for, of all matrices.
    """
    if weights is not ServedWeights.plain:
        from systolic.formats.matrices import whole

        return replace(job, quantization=whole(job.model, WeightFormat(weights.value)))
    if (Path(target) / MANIFEST).is_file():
        return replace(job, quantization=open_bundle(Path(target)).quantization)
    return job


def with_adapters(job: Job, count: int, rank: int) -> Job:
    """A job with room for adapters beside every matrix, side by side in one of their ranks together.

    Raises:
        OptionError: the model is no decoder, or has adapters of its own.
    """
    if not count:
        if rank:
            raise OptionError("--rank has no effect without --adapters; add their number")
        return job
    rank = rank or ADAPTER_RANK
    if count * rank > MOST_RANK:
        raise OptionError(
            f"--adapters {count} of --rank {rank} have {count * rank:,} columns side by side, and at most {MOST_RANK:,} can; give fewer, or a smaller rank"
        )
    if not isinstance(job.model, Decoder) or job.adapter:
        kind = "has adapters of its own" if job.adapter else "is no decoder"
        raise OptionError(f"{job.name} {kind}, and takes no --adapters; leave it out")
    total = count * rank
    return replace(job, adapter=Adapter(kind=AdapterKind.lora, rank=total, alpha=float(total)))


def server_steps(
    job: Job, on: Slice, load: Load, page_size: int, served: Served | None
) -> ServerSteps:
    """Programs of a server of a job with a definite layout; those of ``systolic serve`` wherever it can run them.

    Args:
        job: The model under its layout.
        on: The slice.
        load: The requests.
        page_size: Positions of a page.
        served: Formats and split; None as ``systolic serve`` has them.

    Raises:
        LayoutError: neither divides the model.
        OptionError: weights in a format that the programs of a batch lack.
    """
    if _serves(job, served):
        own = served or Served()
        return EngineSteps(
            job=job,
            on=on,
            load=load,
            page_size=page_size,
            cache=own.cache,
            adapters=own.adapters,
        )
    if served is not None and served.adapters:
        raise OptionError(
            "--adapters stand side by side in systolic serve, which has no such layout or expert axis; use one that it has"
        )
    if served is not None and served.cache is ServedCache.fp8:
        raise OptionError(
            "--kv-dtype is fp8, and the programs of a batch, which this layout needs, take plain or int8; use a layout that systolic serve has"
        )
    if job.quantization:
        kinds = {how.format.value for _, how in job.quantization.matrices}
        if kinds != {ServedWeights.int8.value}:
            raise OptionError(
                f"weights are in {' and '.join(sorted(kinds))}, and the programs of a batch, which this layout needs, take plain or int8; leave --expert-axis out, or use a layout that systolic serve has"
            )
        job = replace(job, quantization=Quantization())
        served = replace(served or Served(), weights=ServedWeights.int8)
    return BatchSteps(job=job, on=on, load=load, page_size=page_size, served=served or Served())


def _serves(job: Job, served: Served | None) -> bool:
    """Whether ``systolic serve`` runs a job in these formats under this layout."""
    layout, model = job.layout, job.model
    if not isinstance(model, Decoder):
        return False
    others = [axis for axis in Axis if axis not in ENGINE_AXES]
    if any(layout.size(axis) > 1 for axis in others):
        return False
    if served is not None and (served.weights is not ServedWeights.plain or layout.expert > 1):
        return False
    try:
        check_served(model, layout)
    except LayoutError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class EngineSteps:
    """Implements :class:`ServerSteps` by the step of ``systolic serve`` over pages."""

    job: Job
    on: Slice
    load: Load
    page_size: int
    cache: ServedCache = ServedCache.plain
    adapters: int = 0

    @property
    def name(self) -> str:
        """See :class:`ServerSteps`."""
        return PAGED

    @property
    def replicas(self) -> int:
        """See :class:`ServerSteps`."""
        return self.job.layout.data

    @property
    def prompts(self) -> list[int]:
        """A chunk, in whole pages."""
        return [_padded(min(self.load.chunk, self.load.prompt_tokens), self.page_size)]

    def context(self, tokens: int) -> int:
        """Positions that a step reads: of a chunk its own tokens and those before it, on average."""
        if tokens == 1:
            return _padded(self.load.mean_context, self.page_size)
        last = _padded(self.load.prompt_tokens, self.page_size)
        return _padded(-(-(tokens + max(last, tokens)) // 2), self.page_size)

    def program(self, key: Key) -> PagedProgram:
        """The step; few texts have rows of padding beside them, and pages as many as the texts have."""
        rows, tokens = key
        pages = self.context(tokens) // self.page_size
        if tokens > 1:
            return self._step(0, tokens, pages)
        padded = rows if self.on.platform == "cpu" else max(rows, LEAST_ROWS)
        # A row of padding has one page, which the kernel reads; the pages of all rows are as many as those of the texts.
        return self._step(padded, 0, max(1, -(-pages * rows // padded)))

    def _step(self, rows: int, chunk: int, pages: int) -> PagedProgram:
        return PagedProgram(
            job=self.job,
            rows=rows,
            chunk=chunk,
            pages=pages,
            num_pages=(rows or 1) * pages + 1,
            page_size=self.page_size,
            cache=self.cache,
            adapters=self.adapters,
        )

    def weights_bytes(self, decode: Forecast) -> int:
        """See :class:`ServerSteps`."""
        return int(facts(decode).stored_bytes)

    def page_bytes(self, decode: Forecast) -> int:
        """See :class:`ServerSteps`."""
        return facts(decode).page_bytes

    def temporary_bytes(self, key: Key, forecast: Forecast) -> int:
        """Bytes as the server counts them: of the step or of the choice by all settings, and the logits that it begins with."""
        assert forecast.memory is not None
        program, known = self.program(key), facts(forecast)
        kept = known.stored_bytes + program.num_pages * known.page_bytes
        logits = (program.rows or 1) * _vocab(self.job) * LOGIT_BYTES
        chosen = self.least_temporary_bytes(program.rows or 1)
        return max(forecast.memory.peak_bytes - int(kept) + logits, chosen)

    def least_temporary_bytes(self, rows: int) -> int:
        """Logits, and the arrays of the choice by all settings."""
        choice = CHOICE_LOGITS.get(self.on.platform, CHOICE_LOGITS["cpu"])
        if self.job.layout.tensor > 1:
            choice += GATHER_LOGITS
        logits = rows * _vocab(self.job) * LOGIT_BYTES
        return int(choice * logits) + logits

    def chunk_seconds(self, seconds: Mapping[Key, float]) -> float:
        """Seconds of the step that reads a chunk and no more."""
        return seconds[1, self.prompts[0]]

    def notes(self) -> list[str]:
        """See :class:`ServerSteps`."""
        several = [HOSTS.format(self.on.num_hosts)] if self.on.num_hosts > 1 else []
        return [CHOICE, *several]


@dataclass(frozen=True, kw_only=True)
class BatchSteps:
    """Implements :class:`ServerSteps` by the programs of a batch, whose cache is one array a text."""

    job: Job
    on: Slice
    load: Load
    page_size: int
    served: Served

    @property
    def name(self) -> str:
        """See :class:`ServerSteps`."""
        return BATCH

    @property
    def replicas(self) -> int:
        """See :class:`ServerSteps`."""
        layout = self.job.for_slice(self.on).layout
        shared = self.served.expert_axis is ExpertAxis.heads
        return layout.batch_ways // (layout.expert if shared else 1)

    @property
    def prompts(self) -> list[int]:
        """A chunk, and all of a prompt."""
        whole = _padded(self.load.prompt_tokens, self.page_size)
        return sorted({min(self.load.chunk, whole), whole})

    def context(self, tokens: int) -> int:
        """See :class:`ServerSteps`."""
        return _padded(self.load.mean_context, self.page_size) if tokens == 1 else tokens

    def program(self, key: Key) -> ServingProgram:
        """See :class:`ServerSteps`."""
        rows, tokens = key
        return ServingProgram(
            job=self.job,
            rows=rows * self.replicas,
            tokens=tokens,
            context=self.context(tokens),
            served=self.served,
        )

    def weights_bytes(self, decode: Forecast) -> int:
        """See :class:`ServerSteps`."""
        assert decode.memory is not None
        return decode.memory.by_kind.get("parameters", 0)

    def page_bytes(self, decode: Forecast) -> int:
        """See :class:`ServerSteps`."""
        assert decode.memory is not None
        positions = facts(decode).batch_size // self.replicas * self.context(1)
        return decode.memory.by_kind.get("cache", 0) // positions * self.page_size

    def temporary_bytes(self, key: Key, forecast: Forecast) -> int:
        """See :class:`ServerSteps`."""
        assert forecast.memory is not None
        kinds = forecast.memory.by_kind
        kept = kinds.get("cache", 0) if key[1] == 1 else 0
        return forecast.memory.peak_bytes - kinds.get("parameters", 0) - kept

    def least_temporary_bytes(self, rows: int) -> int:
        """None is known before the compile."""
        del rows
        return 0

    def chunk_seconds(self, seconds: Mapping[Key, float]) -> float:
        """Its share of the whole prompt, and no less than its own program takes."""
        chunk, whole = self.prompts[0], self.prompts[-1]
        return max(seconds[1, chunk], seconds[1, whole] * chunk / whole)

    def notes(self) -> list[str]:
        """See :class:`ServerSteps`."""
        return [CACHE, *([WHOLE] if self.load.chunks > 1 else [])]


def facts(forecast: Forecast) -> ProgramFacts:
    """Facts of a program before its compile."""
    assert forecast.answer is not None
    return forecast.answer.report.program


def _padded(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


def _vocab(job: Job) -> int:
    if not isinstance(job.model, Decoder):
        raise OptionError(f"{job.name} is no language model; forecast its eval step instead")
    return job.model.vocab


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
            host=self.load.on(self.on).host_seconds or 0.0,
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
