"""Parts that models share: layers, initial values, what rematerialisation saves, and the residual stream between blocks, which the tensor axis may split."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as name
from jax.experimental.xla_metadata import set_xla_metadata

from systolic.job import Layout, Remat, Target
from systolic.models.linear import alone_on_cpu
from systolic.models.quantized.activations import Watched, w8a8_convolution, watched_channels
from systolic.models.quantized.codes import Quantized
from systolic.models.vision.config import Pixels

__all__ = ["name", "rematerialise"]
TRUNCATED_DEVIATION = 0.879625657
"""Standard deviation of a unit normal cut at two: sqrt(1 - 4 pdf(2) / (2 cdf(2) - 1))."""
FEW_CHANNELS = 4
"""Channels of pictures up to which a convolution on a CPU is a matmul of patches, in half the time for the first one of MobileNetV2."""
FEW_TAPS = 3
"""Rows of taps up to which it is: those of a 7 x 7 kernel would be 49 copies of a picture, kept for the gradient."""
BATCH_NORM_MOMENTUM = 0.9
"""Share of the old running statistics kept per step (He et al. 2016)."""
DEVIATION = "deviation"
"""Name of the standard deviation that a parameter carries."""
UNROLLED_LAYERS = 6
"""Layers up to which a CPU program unrolls them: a loop copies each layer's weights out of their stack."""
STREAM = ("batch", "residual_sequence", "residual_embed")
"""Logical names of its dims, [batch, sequence, d_model]."""


def rematerialise(
    layer: Callable[..., Any], layout: Layout, *, scanned: bool = True
) -> Callable[..., Any]:
    """``layer`` under the layout's policy; activations are named with :func:`name` inside it.

    Offload keeps the named activations in the host's pinned memory (platforms that have it). Outside of a scan
    the compiler would find what is computed again to be what it has already, and keep that.
    """
    policies = jax.checkpoint_policies
    match layout.remat:
        case Remat.none:
            return layer
        case Remat.full:
            policy = policies.nothing_saveable
        case Remat.minimal:
            policy = policies.dots_with_no_batch_dims_saveable
        case Remat.save_names:
            policy = policies.save_only_these_names(*layout.remat_names)
        case Remat.offload:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(layout.saved_names),
                names_which_can_be_offloaded=list(layout.remat_names),
                offload_src="device",
                offload_dst="pinned_host",
            )
    return jax.checkpoint(layer, policy=policy, prevent_cse=not scanned)


def apart(function: Callable[..., Any], target: Target) -> Callable[..., Any]:
    """``function`` as a part of the program that XLA compiles by itself on one CPU; elsewhere as it is.

    XLA's CPU compiler would compute a residual stream again from all earlier layers wherever it is read, in place of
    reading it (a fusion with 70 operands in a BERT of six layers, whose whole call took 1.13 times as long).
    """
    if not alone_on_cpu(target):
        return function
    jitted = jax.jit(function)

    def call(*args: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jitted(*args)

    return call


def stacked_layers(
    layer: Callable[[jax.Array, nnx.State], jax.Array], x: jax.Array, states: Any, target: Target
) -> jax.Array:
    """``x`` after all layers, under the layout's rematerialisation; ``states`` have a leading dim of layers."""
    layers = len(jax.tree.leaves(states)[0])
    scanned = target.platform != "cpu" or layers > UNROLLED_LAYERS
    layer = rematerialise(layer, target.layout, scanned=scanned)
    if scanned:
        return jax.lax.scan(lambda x, state: (layer(x, state), None), x, states)[0]
    layer = apart(layer, target)
    for index in range(layers):
        pick = partial(jax.lax.index_in_dim, index=index, keepdims=False)
        x = layer(x, jax.tree.map(pick, states))
    return x


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    fan_in: int,
    gain: float = 1.0,
) -> nnx.Param:
    """A float32 array of standard deviation gain / sqrt(fan_in): a normal cut at two of its own deviations.

    ``axes`` are the logical names of its dims.
    """
    value = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
    # What is cut off takes spread with it, which the scale gives back.
    return nnx.Param(value * (gain / (TRUNCATED_DEVIATION * fan_in**0.5)), out_sharding=axes)


def zeros(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """A float32 parameter of zeros."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), out_sharding=axes)


def random(shape: tuple[int, ...], axes: tuple[str | None, ...], deviation: float) -> nnx.Param:
    """A float32 parameter that :func:`start` fills: normal, cut at two standard deviations."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), out_sharding=axes, deviation=deviation)


def start(module: nnx.Module, rngs: nnx.Rngs) -> None:
    """Fills the :func:`random` parameters of a whole network from one draw.

    The compiler spends half a second or more on each draw of another shape, which for a ResNet of
    50 layers is half a minute before the first step.
    """
    parameters = [
        (path, parameter)
        for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param))
        if DEVIATION in parameter.get_metadata()
    ]
    sizes = [parameter.size for _, parameter in parameters]
    draw = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, (sum(sizes),), jnp.float32)
    filled, offset = [], 0
    for (path, parameter), size in zip(parameters, sizes, strict=True):
        scale = parameter.get_metadata(DEVIATION) / TRUNCATED_DEVIATION
        part = jax.lax.slice_in_dim(draw, offset, offset + size)
        filled.append((path, parameter.replace(scale * part.reshape(parameter.shape))))
        offset += size
    nnx.update(module, nnx.from_flat_state(filled))


def normalise(image: jax.Array, pixels: Pixels, dtype: jnp.dtype) -> jax.Array:
    """Bytes uint8[batch, height, width, channels] to ``dtype`` with about zero mean and unit variance."""
    mean = 255.0 * jnp.asarray(pixels.mean, jnp.float32)
    scale = 1.0 / (255.0 * jnp.asarray(pixels.std, jnp.float32))
    return ((image.astype(jnp.float32) - mean) * scale).astype(dtype)


class LayerNorm(nnx.Module):
    """Layer norm over the last dim, in float32, with a learned scale and bias."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32), out_sharding=("norm",))
        self.bias = zeros((size,), ("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size], same dtype."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale, bias = self.scale[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (wide * scale + bias).astype(x.dtype)


def convolve(
    x: jax.Array,
    kernel: jax.Array | Quantized | Watched,
    stride: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    groups: int = 1,
) -> jax.Array:
    """x [batch, height, width, conv_in] with kernel [taps, taps, conv_in / groups, conv_out], padded before and after rows and columns; int8 operands are summed in int32."""
    if isinstance(kernel, Watched):
        x, kernel = watched_channels(x, kernel), kernel.value
    if isinstance(kernel, Quantized):
        return _scaled(convolve, x, kernel, stride, rows, columns, groups)
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        [rows, columns],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        preferred_element_type=_sums(x),
    )


def convolve_on_cpu(
    x: jax.Array,
    kernel: jax.Array | Quantized | Watched,
    stride: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    groups: int = 1,
) -> jax.Array:
    """The same as :func:`convolve`, without the convolutions that XLA has no fast code for on a CPU.

    One of each channel by itself is a sum of shifted pictures, which is one loop over memory (7 times as fast for
    MobileNetV2 in a batch of 8), one of a single tap a matmul, and one over few channels a matmul of patches. Of a dense
    one the barrier keeps what led to its input out of the transposed copy that the gradient of its kernel reads, where
    ``cse_barrier_expander`` is off.
    """
    if isinstance(kernel, Watched):
        x, kernel = watched_channels(x, kernel), kernel.value
    if isinstance(kernel, Quantized):
        return _scaled(convolve_on_cpu, x, kernel, stride, rows, columns, groups)
    taps = kernel.shape[0]
    if groups == 1 and taps == 1 and rows == columns == (0, 0):
        x = x[:, ::stride, ::stride]
        return jnp.einsum("bhwi,io->bhwo", x, kernel[0, 0], preferred_element_type=_sums(x))
    by_channel = groups == kernel.shape[3] and kernel.shape[2] == 1
    few = groups == 1 and kernel.shape[2] <= FEW_CHANNELS and taps <= FEW_TAPS
    if not by_channel and not few:
        return convolve(_behind_barrier(x), kernel, stride, rows, columns, groups)
    x = jnp.pad(x, ((0, 0), rows, columns, (0, 0)))
    height, width = ((size - taps) // stride + 1 for size in x.shape[1:3])

    def shifted(i: int, j: int) -> jax.Array:
        picture = x[:, i : i + height * stride : stride, j : j + width * stride : stride]
        return picture[:, :height, :width]

    places = [(i, j) for i in range(taps) for j in range(taps)]
    if few:
        patches = jnp.concatenate([shifted(*place) for place in places], axis=-1)
        matrix = kernel.reshape(-1, kernel.shape[3])
        return jnp.einsum("bhwi,io->bhwo", patches, matrix, preferred_element_type=_sums(x))
    # The gradient of the kernel is a sum over pictures and places, which XLA's CPU compiler makes in this dtype.
    dtype = _sums(x) or jnp.promote_types(x.dtype, jnp.float32)
    summed = sum(
        (shifted(i, j).astype(dtype) * kernel[i, j, 0].astype(dtype) for i, j in places),
        start=jnp.zeros((), dtype),
    )
    return summed.astype(_sums(x) or x.dtype)


def max_pool(
    target: Target, x: jax.Array, size: int, stride: int, padding: str | Sequence[tuple[int, int]]
) -> jax.Array:
    """Largest of windows of ``size`` x ``size`` pixels: [batch, height, width, channels] to [batch, rows, columns, channels]."""
    if not alone_on_cpu(target):
        return nnx.max_pool(x, (size, size), (stride, stride), padding)
    sides = (size, size), (stride, stride)
    pads = (
        jax.lax.padtype_to_pads(x.shape[1:3], *sides, padding)
        if isinstance(padding, str)
        else padding
    )
    return _max_pool_on_cpu(size, stride, tuple(tuple(pad) for pad in pads), x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _max_pool_on_cpu(size: int, stride: int, pads: Any, x: jax.Array) -> jax.Array:
    """Maxima of windows, whose gradient is a loop over memory: XLA's scatters one element after the other (5 times as long)."""
    return nnx.max_pool(x, (size, size), (stride, stride), pads)


def _pooled(size: int, stride: int, pads: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    largest = _max_pool_on_cpu(size, stride, pads, x)
    rows, columns = largest.shape[1:3]
    wide = jnp.pad(
        x,
        ((0, 0), *((before, after + stride) for before, after in pads), (0, 0)),
        constant_values=-jnp.inf,
    )
    # The place of the first maximum of each window, found by order alone: a compiler that computes ``x`` again, rounded
    # otherwise, finds no number equal to ``largest``.
    number_dtype = jnp.int8 if size * size <= 128 else jnp.int32
    place, most = jnp.zeros(largest.shape, number_dtype), jnp.full(largest.shape, -jnp.inf, x.dtype)
    for number, (row, column) in enumerate(itertools.product(range(size), repeat=2)):
        limit = (
            len(x),
            row + (rows - 1) * stride + 1,
            column + (columns - 1) * stride + 1,
            x.shape[3],
        )
        tap = jax.lax.slice(wide, (0, row, column, 0), limit, (1, stride, stride, 1))
        place = jnp.where(tap > most, number_dtype(number), place)
        most = jnp.maximum(tap, most)
    return largest, (x, place)


def _spread(size: int, stride: int, pads: Any, kept: Any, gradient: jax.Array) -> tuple[jax.Array]:
    """The gradient of each window at its first maximum, as XLA's."""
    x, place = kept
    batch, height, width, channels = x.shape
    rows, columns = place.shape[1:3]
    taps = {
        (row, column): jnp.where(place == row * size + column, gradient, 0)
        for row, column in itertools.product(range(size), repeat=2)
    }
    # Pixels of one remainder by the stride are those of the same taps of all windows, each some windows further.
    further = (size - 1) // stride

    def moved(tap: tuple[int, int]) -> jax.Array:
        down, right = tap[0] // stride, tap[1] // stride
        pad = ((0, 0), (down, further - down), (right, further - right), (0, 0))
        return jnp.pad(taps[tap], pad)

    def remainder(row: int, column: int) -> jax.Array:
        own = itertools.product(range(row, size, stride), range(column, size, stride))
        return sum(map(moved, own), start=jnp.zeros((), x.dtype))

    shape = (batch, rows + further, columns + further, channels)
    parts = [
        jnp.stack([jnp.broadcast_to(remainder(row, column), shape) for column in range(stride)], 3)
        for row in range(stride)
    ]
    whole = jnp.stack(parts, 2).reshape(batch, shape[1] * stride, shape[2] * stride, channels)
    (top, _), (left, _) = pads
    missing = [
        max(0, n - have)
        for n, have in ((height + top, whole.shape[1]), (width + left, whole.shape[2]))
    ]
    whole = jnp.pad(whole, ((0, 0), (0, missing[0]), (0, missing[1]), (0, 0)))
    return (whole[:, top : top + height, left : left + width],)


_max_pool_on_cpu.defvjp(_pooled, _spread)


@jax.custom_vjp
def _behind_barrier(x: jax.Array) -> jax.Array:
    """``x``, in training behind a barrier to fusion."""
    return x


_behind_barrier.defvjp(
    lambda x: (jax.lax.optimization_barrier(x), None), lambda _, gradient: (gradient,)
)


def _sums(x: jax.Array) -> Any:
    """Dtype of the sums of a convolution; None for that of ``x``."""
    return jnp.int32 if x.dtype == jnp.int8 else None


def _scaled(
    convolution: Callable[..., jax.Array], x: jax.Array, kernel: Quantized, *how: Any
) -> jax.Array:
    """A convolution with a quantized kernel: of its codes, the result scaled by channel, where each has one scale."""
    if kernel.inputs is not None:
        return w8a8_convolution(convolution, x, kernel, *how)
    if not kernel.scaled_after or max(kernel.scales.shape[:-1]) > 1:
        return convolution(x, kernel.restored(x.dtype), *how)
    outputs = convolution(x, kernel.codes.astype(x.dtype), *how)
    return outputs * kernel.scales.reshape(-1).astype(x.dtype)


def recomputed(block: Callable[[jax.Array], jax.Array], x: jax.Array, layout: Layout) -> jax.Array:
    """``block(x)`` under the layout's rematerialisation, which must see a module's new statistics go out."""
    if layout.remat is Remat.none:
        return block(x)
    graph, state = nnx.split(block)

    def pure(state: nnx.State, x: jax.Array) -> tuple[jax.Array, nnx.State]:
        inner = nnx.merge(graph, state)
        return inner(x), nnx.state(inner, nnx.BatchStat)

    x, statistics = rematerialise(pure, layout, scanned=False)(state, x)
    nnx.update(block, statistics)
    return x


class GroupedBatchNorm(nnx.BatchNorm):
    """Batch norm whose statistics are of ``examples`` consecutive examples of a training batch; 0: of all.

    The batch dim is cut into groups by a reshape: where the devices of a batch axis hold whole groups
    nothing is sent, and where a group lies on several devices XLA reduces among these alone. So the
    result does not depend on the number of devices. Running statistics are means over the groups.
    """

    def __init__(self, features: int, *, examples: int, rngs: nnx.Rngs, **more: Any) -> None:
        super().__init__(features, rngs=rngs, **more)
        self.examples = examples

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """[batch, height, width, features] to the same, float32."""
        running = self.use_running_average if use_running_average is None else use_running_average
        if running or self.examples in (0, x.shape[0]):
            return super().__call__(x, use_running_average, mask=mask)
        assert mask is None
        assert self.scale is not None
        assert self.bias is not None
        wide = x.astype(jnp.float32).reshape(-1, self.examples, *x.shape[1:])
        mean = jnp.mean(wide, axis=(1, 2, 3), keepdims=True)
        square = jnp.mean(wide * wide, axis=(1, 2, 3), keepdims=True)
        variance = jnp.maximum(square - mean * mean, 0.0)
        for kept, now in ((self.mean, mean), (self.var, variance)):
            of_groups = now.reshape(-1, now.shape[-1]).mean(axis=0)
            kept[...] = self.momentum * kept[...] + (1 - self.momentum) * of_groups
        scale = jax.lax.rsqrt(variance + self.epsilon) * self.scale[...].astype(jnp.float32)
        normed = (wide - mean) * scale + self.bias[...].astype(jnp.float32)
        return normed.reshape(x.shape)


class ConvNorm(nnx.Module):
    """Convolution without bias, then batch norm.

    The kernel starts with variance 2 / fan_out (He et al. 2015). Batch statistics and the running
    ones are float32 whatever the compute dtype; under a mesh they cover the whole batch, or groups of it.
    """

    def __init__(
        self,
        conv_in: int,
        conv_out: int,
        kernel: int,
        rngs: nnx.Rngs,
        target: Target,
        *,
        stride: int = 1,
        gain: float = 1.0,
        examples: int = 0,
    ) -> None:
        """``gain`` is the first scale of the norm: 0 makes a residual branch start as nothing.

        ``examples``: see :class:`GroupedBatchNorm`.
        """
        self.kernel = random(
            (kernel, kernel, conv_in, conv_out),
            (None, None, "conv_in", "conv_out"),
            (2.0 / (kernel * kernel * conv_out)) ** 0.5,
        )
        self.norm = GroupedBatchNorm(
            conv_out,
            examples=examples,
            momentum=BATCH_NORM_MOMENTUM,
            scale_init=nnx.initializers.constant(gain),
            scale_metadata={"out_sharding": ("norm",)},
            bias_metadata={"out_sharding": ("norm",)},
            rngs=rngs,
        )
        self.stride, self.target = stride, target

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, height, width, conv_in] to [batch, height / stride, width / stride, conv_out]."""
        half = (self.kernel.shape[0] - 1) // 2
        pad = (half, half)
        on = convolve_on_cpu if alone_on_cpu(self.target) else convolve
        return self.normed(on(x, self.kernel[...], self.stride, pad, pad))

    def by_pairs(self, x: jax.Array) -> jax.Array:
        """A call of stride 2 and an odd kernel as one of stride 1 on blocks of 2 x 2 pixels: four times the channels.

        The images of three channels that a stem reads leave most of a matrix unit's rows empty; the same
        sum over twelve is a quarter of the positions (MLPerf's submissions on TPUs from v0.7 on).
        """
        kernel = self.kernel[...]
        # A row and a column of zeros before the first, so that pairs of taps lie on pairs of pixels.
        kernel = jnp.pad(kernel, ((1, 0), (1, 0), (0, 0), (0, 0)))
        taps, channels, conv_out = kernel.shape[0] // 2, kernel.shape[2], kernel.shape[3]
        kernel = kernel.reshape(taps, 2, taps, 2, channels, conv_out).transpose(0, 2, 1, 3, 4, 5)
        kernel = kernel.reshape(taps, taps, 4 * channels, conv_out)
        batch, height, width, _ = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch, height // 2, width // 2, 4 * channels)
        pad = (taps // 2, taps // 2 - 1)
        return self.normed(convolve(x, kernel, 1, pad, pad))

    def normed(self, x: jax.Array) -> jax.Array:
        """Batch norm of [batch, height, width, conv_out], same shape and dtype."""
        # The norm's statistics are float32, so it computes in float32 and its result is cast back.
        return self.target.constrain(self.norm(x).astype(x.dtype), "batch", None, None, None)


class Head(nnx.Module):
    """Features to logits."""

    def __init__(self, features: int, num_classes: int, target: Target, deviation: float) -> None:
        """The kernel starts with standard deviation ``deviation``, the bias at 0."""
        self.kernel = random((features, num_classes), ("embed", "vocab"), deviation)
        self.bias = zeros((num_classes,), ("vocab",))
        self.target = target

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, features] to [batch, num_classes]."""
        return self.target.constrain(x @ self.kernel[...] + self.bias[...], "batch", "vocab")


def gathered(target: Target, x: jax.Array) -> jax.Array:
    """x [batch, sequence, d_model] of the stream, what the tensor axis split whole on each device.

    Left to itself the partitioner gathers for each matmul that takes it, or before a norm in float32.
    """
    return target.constrain(target.constrain(x, *STREAM), "batch", "sequence", None)
