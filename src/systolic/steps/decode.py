"""Text generation as pure functions: prefill reads a prompt into the cache, decode makes tokens; transcription, from spectrograms."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as Order
from jax.sharding import PartitionSpec

from systolic.core.errors import OptionError, RunError
from systolic.data.audio import Writing
from systolic.job import (
    ExpertAxis,
    IncrementalDecoder,
    Sampling,
    Served,
    ServedCache,
    ServedWeights,
)
from systolic.models.adapters import EXPERTS, STACKED, num_inputs
from systolic.models.decoder.cache import Coded
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.layer_groups import EXPERT_MATRICES
from systolic.models.quantized.codes import Quantized, quantized
from systolic.models.quantized.placement import INT8
from systolic.steps import jaxpr
from systolic.steps.logits import pick
from systolic.steps.network import Arrays
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import RULES, SERVING, SERVING_HEADS

PROJECTIONS = (("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim"))
"""Logical dims of weights that project to heads."""
EXPERT_ORDERS: Mapping[tuple[str, ...], tuple[int, ...]] = {
    ("experts", "expert_embed", "mlp"): (0, 2, 1),
    ("experts", "mlp", "expert_embed"): (0, 1, 2),
}
"""Logical dims of the experts' gate and up, and of down, with the order in which kernels read them: hidden units as rows."""


def reads_experts_in_order(steps: StepFunctions) -> bool:
    """Whether kernels of a TPU multiply with the experts: those of a mixture without slots."""
    model = steps.job.model
    return steps.target.platform == "tpu" and isinstance(model, Decoder) and model.grouped


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeState:
    """State of a generation."""

    token: jax.Array
    """int32[batch]: the last token picked, not yet in the cache."""
    key: jax.Array
    """Random key."""
    cache: Any
    """The model's cache, see :class:`systolic.job.IncrementalDecoder`."""


class Decode:
    """The generation programs of a language model; its weights are those of :meth:`weights`, in a format.

    Raises:
        RunError: the job's model is of another kind.
        OptionError: a cache in a format that the model or these programs lack.
    """

    def __init__(
        self,
        steps: StepFunctions,
        sampling: Sampling,
        served: Served | None = None,
    ) -> None:
        served = served or Served()
        if steps.target.layout.expert > 1 and steps.target.rules is RULES:
            rules = SERVING_HEADS if served.expert_axis is ExpertAxis.heads else SERVING
            steps = StepFunctions(steps.job, replace(steps.target, rules=rules))
        # Codes lie as XLA's own kernel reads them.
        plain = served.weights is ServedWeights.plain and not steps.job.quantization
        if plain and reads_experts_in_order(steps):
            steps = StepFunctions(steps.job, replace(steps.target, serves=True))
        self.steps, self.sampling, self.served = steps, sampling, served
        self.cache_dtype = jnp.dtype(steps.target.dtype)
        if served.cache is ServedCache.fp8:
            raise OptionError(
                "--kv-dtype is fp8, which a server's pages are kept in; the programs of a batch take plain or int8"
            )
        if served.cache is ServedCache.int8:
            if not isinstance(steps.job.model, Decoder):
                raise OptionError(
                    f"{steps.job.name} has no cache in int8, decoders do; leave --kv-dtype out"
                )
            self.cache_dtype = jnp.dtype(jnp.int8)
        network = steps.network
        module = jax.eval_shape(partial(network.module, train=False), *network.shapes)
        if not isinstance(module, IncrementalDecoder):
            raise RunError(
                f"{steps.job.name} trains a model that does not generate text; use systolic eval, or systolic predict where its data has single files"
            )
        self.max_positions = module.max_positions
        """Positions that the model can take; ``None`` where there is no limit."""
        self._cache_axes = module.cache_axes()

    @property
    def placement(self) -> dict[str, Any]:
        """Sharding of each weight, and on a TPU the order of its dims.

        Matmuls of the decode step read whole weights and contract the second to last dim of those that project to
        heads: in the default order [embed, heads, head_dim] these would be copied out of the stacked array for
        every token. Kernels read the experts in the order of :data:`EXPERT_ORDERS`, codes excepted.
        """
        placed: dict[str, Any] = dict(self.steps.shardings.params)
        if self.steps.target.platform == "tpu":
            orders: dict[Any, tuple[int, ...]] = dict.fromkeys(PROJECTIONS, (1, 0, 2))
            in_order = self.steps.target.serves and reads_experts_in_order(self.steps)
            orders |= EXPERT_ORDERS if in_order else {}
            for path, axes in self.steps.network.axes.items():
                inner = None if axes is None else orders.get(axes[-3:])
                if axes is None or inner is None:
                    continue
                outer = range(len(axes) - 3)
                order = Order((*outer, *(len(outer) + dim for dim in inner)))
                placed[path] = Format(order, placed[path])
        for path, inputs in self._rounded.items():
            rank = len(self.steps.network.params[path].shape)
            codes: Any = self.steps.shardings.params[path]
            spec = [*codes.spec, *(None for _ in range(len(codes.spec), rank))]
            scales: Any = PartitionSpec(
                *(None if dim in inputs else axis for dim, axis in enumerate(spec))
            )
            where: Any = self.steps.target.sharding(scales)
            placed[path] = Quantized(codes=placed[path], scales=where)
        return placed

    def weights(self, params: Arrays) -> dict[str, Any]:
        """The weights of training in the format that is served; jit it with ``out_shardings=self.placement``."""
        cast: dict[str, Any] = self.steps.network.cast(params)
        return cast | {
            path: quantized(cast[path], dims, INT8, cast[path].dtype)
            for path, dims in self._rounded.items()
        }

    @property
    def _rounded(self) -> dict[str, tuple[int, ...]]:
        """Paths of the matrices that are stored in int8, with the dims that their products sum over."""
        if self.served.weights is not ServedWeights.int8:
            return {}
        summed: dict[str, tuple[int, ...]] = {}
        names = {*self.steps.job.model.adaptable(), *EXPERT_MATRICES}
        for path, axes in self.steps.network.axes.items():
            if axes is None or path.rpartition("/")[2] not in names:
                continue
            outer = [dim for dim, name in enumerate(axes) if name in (*STACKED, EXPERTS)]
            if EXPERTS in axes:
                summed[path] = (len(axes) - 2,)
            elif len(axes) - len(outer) > 1:
                first = len(outer)
                summed[path] = tuple(range(first, first + num_inputs(axes[first:])))
        return summed

    def abstract_state(self, size: int, capacity: int) -> DecodeState:
        """The state of ``size`` sequences as ShapeDtypeStructs with shardings.

        The cache is split over the batch and its heads, where the mesh divides them.
        """
        target = self.steps.target

        def begin(*weights: Any) -> DecodeState:
            module = self._module(*weights)
            return DecodeState(
                token=jnp.zeros((size,), jnp.int32),
                key=jax.random.key(0),
                cache=module.empty_cache(size, capacity, self.cache_dtype),
            )

        def split(array: Any, axes: tuple[str | None, ...]) -> Any:
            if isinstance(array, Coded):
                return Coded(split(array.codes, axes), split(array.scales, axes[:-1]))
            where = target.sharding(target.fit(array.shape, axes))
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

        shapes = jax.eval_shape(begin, *self.steps.network.shapes)
        return DecodeState(
            token=split(shapes.token, ("batch",)),
            key=split(shapes.key, ()),
            cache=jax.tree.map(
                split,
                shapes.cache,
                self._cache_axes,
                is_leaf=lambda part: isinstance(part, Coded),
            ),
        )

    def prefill_flops(self, sequence: int) -> float:
        """Matmul FLOPs of reading one prompt of ``sequence`` tokens."""
        known = self.steps.job.model.prefill_flops(sequence)
        if known is not None:
            return known
        state, tokens = (
            self.abstract_state(1, sequence),
            jax.ShapeDtypeStruct((1, sequence), jnp.int32),
        )
        prefill = partial(self.prefill, capacity=sequence)
        return jaxpr.count(prefill, *self._abstract_weights, tokens, state.token, state.key)

    def decode_flops(self, sequence: int) -> float:
        """Matmul FLOPs of token ``sequence`` of one row over a cache of those before it."""
        known = self.steps.job.model.decode_flops(sequence)
        if known is not None:
            return known
        state = self.abstract_state(1, sequence)
        return jaxpr.count(partial(self.decode, count=1), *self._abstract_weights, state)

    @property
    def _abstract_weights(self) -> tuple[Any, Any]:
        state = self.steps.abstract_state
        return jax.eval_shape(self.weights, state.params), state.model_state

    def prefill(
        self,
        params: Arrays,
        model_state: Arrays,
        tokens: jax.Array,
        count: jax.Array,
        key: jax.Array,
        capacity: int,
        mask: jax.Array | None = None,
    ) -> DecodeState:
        """The state after a prompt, its first new token picked.

        Args:
            params: Weights.
            model_state: Other variables.
            tokens: int32[batch, n], padded at the end.
            count: int32[batch]: how many are real.
            key: Random key.
            capacity: Positions the cache has room for; static.
            mask: Which tokens can come first: see :func:`systolic.steps.logits.masked`.
        """
        module = self._module(params, model_state)
        hidden, cache = module.prefill(tokens, count, capacity, self.cache_dtype)
        # Only the last token's logits are read; those of all would be [batch, n, vocab].
        last = jnp.take_along_axis(hidden, (count - 1)[:, None, None], axis=1)
        key, use = jax.random.split(key)
        return DecodeState(
            token=pick(module.logits(last)[:, 0], use, self.sampling, mask), key=key, cache=cache
        )

    def decode(
        self,
        params: Arrays,
        model_state: Arrays,
        state: DecodeState,
        count: int,
        mask: jax.Array | None = None,
    ) -> tuple[DecodeState, jax.Array]:
        """The next ``count`` (static) tokens int32[batch, count], the state's token first; the last of them, and those after it, by a mask."""

        def step(state: DecodeState, _: None) -> tuple[DecodeState, jax.Array]:
            module = self._module(params, model_state)
            logits, cache = module.extend(state.token, state.cache)
            key, use = jax.random.split(state.key)
            return DecodeState(
                token=pick(logits, use, self.sampling, mask), key=key, cache=cache
            ), state.token

        state, tokens = jax.lax.scan(step, state, None, length=count)
        return state, tokens.T

    def _module(self, params: Arrays, model_state: Arrays) -> Any:
        # Weights of :meth:`weights` are cast already; those of quantization-aware training would be rounded twice.
        return self.steps.network.module(params, model_state, train=False)


class Written(NamedTuple):
    """Texts in the making."""

    count: jax.Array
    """int32[]: tokens in ``tokens``."""
    tokens: jax.Array
    """int32[batch, positions]: what is written, the end's token after it."""
    next: jax.Array
    """int32[batch]: the token that follows."""
    ended: jax.Array
    """bool[batch]."""
    likely: jax.Array
    """f32[batch]: sum of the log probabilities of the tokens, those of the end included, but for ``next``."""
    length: jax.Array
    """int32[batch]: how many these are."""
    log_next: jax.Array
    """f32[batch]: log probability of ``next``."""
    cache: Any


class Transcribe:
    """Greedy transcription with a job's model, a speech to text one; jit :meth:`__call__`.

    Args:
        steps: Programs of the job.
        writing: End and suppressed tokens.
        positions: Most tokens of a text, the prompt included.
    """

    def __init__(self, steps: StepFunctions, writing: Writing, positions: int) -> None:
        self.steps, self.writing, self.positions = steps, writing, positions

    def __call__(
        self,
        params: Arrays,
        model_state: Arrays,
        features: jax.Array,
        prompt: jax.Array,
        live: jax.Array,
    ) -> jax.Array:
        """int32[batch, positions - prompt]: tokens of each text, then those of its end; only these where nothing is said.

        Nothing is said in digital silence, and where the token of no speech is likely and the text is not, by the thresholds of
        :class:`Writing` (Radford et al. 2022, section 4.5).

        Args:
            params: Weights.
            model_state: Other variables.
            features: f32[batch, frames, mels].
            prompt: int32[batch, prompt]: what each text starts with, of the job's length.
            live: bool[batch]: False for rows of padding, which are not waited for.
        """
        network, writing = self.steps.network, self.writing
        module: Any = network.module(network.cast(params), model_state, train=False)
        encoded = module.encode(features)
        batch, room = features.shape[0], self.positions - prompt.shape[1]
        logits, cache, silence = self._heard(module, prompt, encoded)
        vocab = logits.shape[-1]
        usual = _barred(vocab, writing.suppressed)
        first = usual + _barred(vocab, writing.suppressed_first)

        def going(written: Written) -> jax.Array:
            return (written.count < room) & ~written.ended.all()

        def write(written: Written) -> Written:
            before = written.ended
            ended = before | (written.next == writing.end)
            token = jnp.where(ended, writing.end, written.next)
            tokens = written.tokens.at[:, written.count].set(token)
            logits, cache = module.extend(token, written.cache)
            best, log_best = _best(logits + usual)
            likely = written.likely + jnp.where(before, 0.0, written.log_next)
            count, length = written.count + 1, written.length + ~before
            return Written(count, tokens, best, ended, likely, length, log_best, cache)

        start, log_start = _best(logits + first)
        begun = Written(
            count=jnp.zeros((), jnp.int32),
            tokens=jnp.full((batch, room), writing.end, jnp.int32),
            next=start,
            ended=~live,
            likely=jnp.zeros(batch),
            length=jnp.zeros(batch, jnp.int32),
            log_next=log_start,
            cache=cache,
        )
        texts = jax.lax.while_loop(going, write, begun)
        # Digital silence has one value everywhere, and a model writes a short word for it.
        empty = jnp.ptp(features, axis=(1, 2)) == 0
        unlikely = texts.likely < writing.likely * texts.length
        return jnp.where((empty | silence & unlikely)[:, None], writing.end, texts.tokens)

    def _heard(
        self, module: Any, prompt: jax.Array, encoded: jax.Array
    ) -> tuple[jax.Array, Any, jax.Array]:
        """Logits after the prompt int32[batch, n], the cache, and whether there seems to be no speech, bool[batch]."""
        writing = self.writing
        # The first token alone: what follows it tells whether there is speech.
        logits, cache = module.prefill(prompt[:, :1], encoded, self.positions)
        silence = jnp.zeros(prompt.shape[0], bool)
        if writing.silence is not None:
            silence = jax.nn.softmax(logits)[:, writing.silence] > writing.no_speech
        for place in range(1, prompt.shape[1]):
            logits, cache = module.extend(prompt[:, place], cache)
        return logits, cache, silence


def _barred(vocab: int, tokens: tuple[int, ...]) -> np.ndarray:
    """f32[vocab]: minus infinity for some tokens, 0 for the others."""
    mask = np.zeros(vocab, np.float32)
    mask[list(tokens)] = -np.inf
    return mask


def _best(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The most likely token int32[batch] and its log probability f32[batch]."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return best, jnp.take_along_axis(logs, best[:, None], axis=-1)[:, 0]
