"""Layouts of servers on a slice: that of ``systolic serve``, and that of the most devices for each text."""

from dataclasses import dataclass, replace

from systolic.chips import Slice
from systolic.core.errors import LayoutError
from systolic.forecasting.serving.forecast import Load
from systolic.job import ExpertAxis, Job, Layout, Served, ServedCache
from systolic.models.decoder.checks import served_kv_heads
from systolic.models.decoder.config import Decoder
from systolic.steps.serving_layout import DeviceShares, EngineNeed, ServingLayout, share

ROWS = 16
"""Texts at once that a layout makes room for, as ``systolic serve`` has them by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLayout:
    """Layout of the engines on a slice."""

    layout: Layout
    """Definite; of fewer devices than the slice has where some are idle."""
    idle: str = ""
    """Devices that are idle, why, and what to change; "" where none is."""


def engine_layout(
    job: Job, on: Slice, load: Load, rows: int = ROWS, cache: ServedCache = ServedCache.plain
) -> EngineLayout:
    """Layout that ``systolic serve`` chooses: the smallest tensor axis that holds weights and pages and leaves the fewest devices idle, then engines; :func:`serving_layout` where the model is no decoder.

    Args:
        job: The model.
        on: The slice, taken as one machine.
        load: The requests.
        rows: Texts at once, of an engine.
        cache: Format of keys and values.

    Raises: as :func:`serving_layout`.
    """
    model = job.model
    if not isinstance(model, Decoder):
        return EngineLayout(layout=serving_layout(job, on))
    item = 4 if job.precision.resolve(on.platform).dtype == "float32" else 2
    saved = 0
    if job.quantization:
        from systolic.formats.matrices import saved_bytes

        saved = saved_bytes(job, item)
    # Of each adapter one matrix is whole on every device.
    adapters = job.adapter.rank * sum(model.adaptable().values()) * item if job.adapter else 0

    def need(tensor: int) -> EngineNeed:
        positions = (
            rows * load.tokens * position_elements(model, tensor) * (cache.item_bytes or item)
        )
        held = served_parameters(model, tensor) * item - saved / tensor + positions + adapters
        return EngineNeed(bytes=int(held), capacity_bytes=on.program_bytes)

    shares = share(ServingLayout(), on.num_devices, model, need)
    layout = Layout(data=shares.engines, fsdp=1, tensor=shares.tensor)
    return EngineLayout(layout=layout, idle=shares.told_idle)


def layout_of_requests(
    job: Job, on: Slice, load: Load, requests: int, cache: ServedCache = ServedCache.plain
) -> EngineLayout:
    """Layout of engines that hold so many requests together, each as many as ``systolic serve`` gives it, or more where it must.

    Raises: as :func:`serving_layout`.
    """
    rows = ROWS
    while True:
        engines = engine_layout(job, on, load, rows, cache)
        each = -(-requests // engines.layout.data)
        if each <= rows:
            return engines
        rows = each


def served_parameters(model: Decoder, tensor: int) -> float:
    """Weights of a device, with the copies of key-value heads."""
    return replace(model, kv_heads=served_kv_heads(model, tensor)).num_parameters / tensor


def position_elements(model: Decoder, tensor: int) -> float:
    """Elements of a position's keys and values, all layers, on a device; latents are whole on each."""
    if model.latent:
        return model.layers * (model.latent.kv_lora_rank + model.latent.qk_rope_head_dim)
    heads = served_kv_heads(model, tensor) / tensor
    return model.layers * heads * (model.head_dim + model.value_dim)


def placed(layout: Layout, on: Slice) -> Layout:
    """A layout with definite axes; engines on fewer devices than the slice has stay as they are.

    Raises:
        LayoutError: as :meth:`Layout.on`.
    """
    engines = layout.data * layout.tensor * layout.expert
    if layout.definite and layout.num_devices == engines < on.num_devices and on.num_slices == 1:
        return layout
    return layout.on(on.num_devices, on.num_slices)


def given_layout(job: Job, on: Slice) -> EngineLayout:
    """A job's own layout on a slice.

    Raises: as :func:`placed`.
    """
    layout = placed(job.layout, on)
    if layout.num_devices == on.num_devices:
        return EngineLayout(layout=layout)
    shares = DeviceShares(
        devices=on.num_devices,
        engines=layout.data,
        tensor=layout.tensor,
        expert=layout.expert,
        reason="as asked for",
    )
    return EngineLayout(layout=layout, idle=shares.told_idle)


def serving_layout(job: Job, on: Slice) -> Layout:
    """Layout of a server: tensor as far as it divides the model, then experts, then replicas.

    Raises:
        LayoutError: no layout of this kind divides the slice and the model.
    """
    refused: LayoutError | None = None
    devices = on.num_devices
    for tensor in (ways for ways in range(devices, 0, -1) if devices % ways == 0):
        rest = devices // tensor
        for expert in (ways for ways in range(rest, 0, -1) if rest % ways == 0):
            layout = Layout(data=rest // expert, fsdp=1, expert=expert, tensor=tensor)
            try:
                job.model.check(layout)
                layout.check_slices(on.num_slices)
            except LayoutError as error:
                refused = error
            else:
                return layout
    assert refused is not None
    raise refused


def with_heads_for(job: Job, layout: Layout, served: Served) -> Job:
    """The job with a key-value head for each device that a definite layout splits heads over, where that is a multiple of their number.

    Each head is then kept on several devices, as servers do; its copies are parameters of this model.
    """
    model = job.model
    if not isinstance(model, Decoder) or model.latent:
        return job
    wide = served.expert_axis is ExpertAxis.heads and model.heads % layout.tensor == 0
    ways = layout.tensor * (layout.expert if wide else 1)
    if model.heads % ways:  # The partition leaves the expert axis out.
        ways = layout.tensor
    if ways <= model.kv_heads or ways % model.kv_heads:
        return job
    return replace(job, model=replace(model, kv_heads=ways))
