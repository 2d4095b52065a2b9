"""Serving a language model as pure functions: one step over a cache in pages, the choice of tokens, and what lies on which devices of an engine's mesh.

| what | over the mesh |
|---|---|
| matrices of heads, hidden units and the vocabulary | ``tensor`` |
| pages of keys and values | ``tensor``, by heads; latents whole on every device |
| experts | ``expert``, and the hidden units of each ``tensor`` |
| a step's input, the last tokens, chosen tokens | whole on every device |
| logits | ``tensor``, by the vocabulary, until a token is chosen |

A step then has two sums over the axis in each layer, one for the embedding, and what the choice of tokens takes.
A replica of the engine has a mesh of its own, so that the axis ``data`` is 1 in all of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as Order
from jax.sharding import NamedSharding

from systolic.core.errors import RunError
from systolic.core.units import with_article
from systolic.job import Job, Layout, Sampling, ServedCache
from systolic.job.precision import CODES, INPUTS, SCALES
from systolic.models.adapters import BASE, A, B, columns_kept
from systolic.models.decoder.checks import check_served, served_kv_heads
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.layer_groups import EXPERT_MATRICES
from systolic.models.decoder.module import DecoderModule
from systolic.models.decoder.page_arrays import PageArrays
from systolic.models.decoder.paged import (
    LANES,
    Layer,
    RaggedArrays,
    Reading,
    joined,
    layers_of,
    page_arrays,
    read,
    turned,
    turns_alone,
)
from systolic.models.linear import (
    Turned,
    alone_on_cpu,
    alone_on_gpu,
)
from systolic.models.quantized.codes import NARROW_DTYPES, QUANTILES
from systolic.models.quantized.placement import plain_path
from systolic.steps.decode import EXPERT_ORDERS, PROJECTIONS, DecodeState
from systolic.steps.logits import ChosenTokens, pick, score
from systolic.steps.network import Arrays, ModelStructure
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget

PAGED: Mapping[str, tuple[str, ...]] = {
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "experts": ("expert",),
    "routed": ("expert",),
}
"""Logical name of a dim to the mesh axes that split it, as :data:`systolic.steps.target.RULES`; no other is split."""
LOGITS = (None, "vocab")
"""Logical names of the dims of a step's logits."""
EMBEDDING = ("vocab", "embed")
"""Logical dims of the embedding."""
GATHERED_BYTES = 32 << 20
"""Logits of a choice up to which they are gathered once. Over split ones it has 14 collectives of a few bytes, which take
as long as gathering 30 MB where a collective takes 13 us and 179 GB/s (an all-gather on TPU7x, as published for five sizes)."""
KV_MATRICES = ("key", "value")
KV_BIASES = ("key_bias", "value_bias")
EMBEDDED, UNEMBEDDING = "embedding", "unembedding"
"""Paths of the matrices of the vocabulary."""
BLOCKS = ("blocks/", "dense_blocks/")
"""Beginnings of the paths of what lies stacked by layers."""
GENERATED_PAGE = 64
"""Positions of a page of :class:`PagedDecode`."""
PART = 256
"""Tokens of a prompt that :class:`PagedDecode` reads at once, as an engine does."""
SCORED = 32
"""Positions of a prompt whose logits are held at once."""


def paged_target(target: MeshTarget) -> MeshTarget:
    """The target under the rules of serving."""
    return replace(target, rules=PAGED, serves=True)


def whole(target: MeshTarget) -> NamedSharding:
    """Sharding of what all devices hold whole."""
    return target.sharding(target.spec())


def fitted_sharding(target: MeshTarget, shape: tuple[int, ...], *axes: str | None) -> NamedSharding:
    """Sharding of an array by the logical names of its dims; one that its axis does not divide is whole."""
    return target.sharding(target.fit(shape, axes))


def in_order(steps: StepFunctions, shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Shardings of weights by path, with the order of dims that matmuls read where XLA would copy a weight in every step.

    By its own order the heads of a projection [embed, heads, head_dim] are rows of tiles, and a device may have fewer
    heads than a tile has rows. Heads that fill no register stay in XLA's order, which packs them. Kernels of experts read
    gate, up and down with the hidden units as rows: of a part of them that fills no register XLA takes another order for
    gate and up, or for down, than a kernel would, and copies all experts; so it does with an embedding whose rows do not
    fill whole registers, to pick a few of them.
    """
    model, placed = steps.job.model, dict(shardings)
    if steps.target.platform != "tpu" or not isinstance(model, Decoder):
        return placed
    orders: dict[Any, tuple[int, ...]] = {EMBEDDING: (0, 1)}
    orders |= EXPERT_ORDERS if model.experts > 1 else {}
    if not model.head_dim % LANES:
        orders |= dict.fromkeys(PROJECTIONS, (1, 0, 2))
    for path, axes in {**steps.network.axes, **steps.network.frozen}.items():
        inner = None if axes is None else orders.get(axes[-3:])
        if path not in placed or axes is None or inner is None:
            continue
        if axes[-3:] not in PROJECTIONS and not _read_as_it_lies(steps.network, path):
            continue
        outer = len(axes) - len(inner)
        order = (*range(outer), *(outer + dim for dim in inner))
        placed[path] = Format(Order(order), placed[path])
    return placed


def _read_as_it_lies(network: ModelStructure, path: str) -> bool:
    """Whether kernels read an array: a plain one, or codes of 8 bits with one scale an output; others are restored first, and scales have a short dim."""
    matrix = plain_path(path)
    if path == matrix:
        return True
    if path != f"{matrix}/{CODES}":
        return False
    codes, scales = (network.model_state[f"{matrix}/{name}"] for name in (CODES, SCALES))
    wide = codes.dtype.name not in (*NARROW_DTYPES, *QUANTILES)
    return wide and scales.shape[-2] == 1


def for_choice(target: MeshTarget, logits: jax.Array, *, always: bool = False) -> jax.Array:
    """Logits f32[texts, vocab] as a choice takes them: gathered where they are few, or ``always``."""
    if not always and logits.size * logits.dtype.itemsize > GATHERED_BYTES:
        return logits
    return target.constrain(logits, None, None)


def served_job(job: Job, layout: Layout) -> Job:
    """The job with key-value heads that the tensor axis divides: see :func:`with_copied_heads`.

    Raises: as :func:`systolic.models.decoder.checks.check_served`.
    """
    model = job.model
    if not isinstance(model, Decoder):
        return job
    check_served(model, layout)
    heads = served_kv_heads(model, layout.tensor)
    return job if heads == model.kv_heads else replace(job, model=replace(model, kv_heads=heads))


def with_copied_heads(arrays: Arrays, model: Any, served: Job) -> Arrays:
    """Weights of training with the key-value heads of :func:`served_job`, each a copy of one of the model's.

    Args:
        arrays: By path, of all layers of a stack: matrices [layers, d_model, kv_heads, head_dim], biases [layers, kv_heads x head_dim].
        model: Whose weights they are.
        served: The job that is served.
    """
    ours: Any = served.model
    if ours == model:
        return arrays
    times = ours.kv_heads // model.kv_heads

    def copied(path: str, array: jax.Array) -> jax.Array:
        home, _, last = path.rpartition("/")
        # The factors of a matrix's inputs are those of all heads, and so is A of an adapter, whose B [layers, rank, kv_heads, head_dim] is not.
        block, _, name = (home if last in (BASE, B) else plain_path(path)).rpartition("/")
        if last == INPUTS:
            return array
        if block.endswith("blocks") and name in KV_MATRICES:
            return jnp.repeat(array, times, axis=-2)
        if block.endswith("blocks") and name in KV_BIASES:
            split = array.reshape(*array.shape[:-1], model.kv_heads, -1)
            return jnp.repeat(split, times, axis=-2).reshape(*array.shape[:-1], -1)
        return array

    return {path: copied(path, array) for path, array in arrays.items()}


class ServingWeights(NamedTuple):
    """Weights of serving, in the compute dtype."""

    ends: Arrays
    """Weights of no layer: embedding, last norm, output matrix."""
    layers: list[Any]
    """Weights of each layer."""


class StepShape(NamedTuple):
    """Sizes of a step's program."""

    rows: int
    """Texts that read one token."""
    chunks: int
    """Texts that read a part of their prompt."""
    length: int
    """Tokens of a part."""
    pages: int
    """Pages of a text."""

    @property
    def texts(self) -> int:
        """Texts of both kinds."""
        return self.rows + self.chunks

    @property
    def tokens(self) -> int:
        """Positions, padding among them."""
        return self.rows + self.chunks * self.length

    def __str__(self) -> str:
        parts = [f"decode {self.rows}"] if self.rows else []
        parts += [f"prefill {self.chunks} x {self.length}"] if self.chunks else []
        return f"{' + '.join(parts)}, {self.pages} pages"


class StepInput(NamedTuple):
    """Arguments of a step; sizes by :class:`StepShape`."""

    tokens: jax.Array
    """int32[tokens]."""
    slots: jax.Array
    """int32[texts of one token]: where the token of a decode row lies on the device, or -1 where ``tokens`` says it."""
    recent: jax.Array
    """int32[tokens, history]: see :class:`systolic.models.decoder.paged.Reading`."""
    start: jax.Array
    """int32[texts]."""
    count: jax.Array
    """int32[texts]."""
    table: jax.Array
    """int32[texts, pages]."""
    adapters: jax.Array
    """int32[texts]: number of each text's adapter, 0 for none; [] where the program has none."""

    @classmethod
    def sizes(cls, shape: StepShape, history: int, adapters: int = 0) -> "list[tuple[int, ...]]":
        """Shapes of the arrays."""
        texts = shape.texts
        tokens, recent = (shape.tokens,), (shape.tokens, history)
        pages = (texts, shape.pages)
        return [
            tokens,
            (shape.rows,),
            recent,
            (texts,),
            (texts,),
            pages,
            (texts if adapters else 0,),
        ]

    @classmethod
    def unpacked(
        cls, packed: jax.Array, shape: StepShape, history: int, adapters: int = 0
    ) -> "StepInput":
        """The arrays of one int32 array: what goes to the device in one copy."""
        parts, first = [], 0
        for size in cls.sizes(shape, history, adapters):
            parts.append(packed[first : first + math.prod(size)].reshape(size))
            first += math.prod(size)
        return cls(*parts)


class PagedSteps:
    """The programs of serving a language model.

    Args:
        steps: Of the model's job on the devices that serve it.
        page_size: Positions of a page.
        cache: Format of keys and values.
        adapters: Adapters that lie side by side in those of the job; 0: all texts have the job's own.
        wide: Whether one CPU holds the matrices of few bits as float32: its product of one row of bfloat16 takes 15 times as long.

    Attributes:
        steps: Under the sharding rules of serving, with key-value heads that the mesh divides: see
            :mod:`systolic.steps.paged`.

    Raises:
        RunError: the model is no decoder of this package.
        LayoutError: the mesh does not divide it.
    """

    def __init__(
        self,
        steps: StepFunctions,
        page_size: int,
        cache: ServedCache = ServedCache.plain,
        *,
        adapters: int = 0,
        wide: bool = False,
    ) -> None:
        self.cache, self.adapters, self.wide = cache, adapters, wide
        self._model, target = steps.job.model, paged_target(steps.target)
        self._network = steps.network
        job = served_job(steps.job, target.layout)
        self.steps, self.page_size = StepFunctions(job, target, trains=False), page_size
        self._layers: list[Layer] = []
        params, model_state = steps.network.shapes
        self.abstract_weights: ServingWeights = jax.eval_shape(self.weights, params, model_state)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the weights, and of pages in no other format."""
        return jnp.dtype(self.steps.target.dtype)

    @property
    def history(self) -> int:
        """Tokens before one that its embedding needs."""
        return max(self.steps.job.model.ngrams - 1, 0)  # ty: ignore[missing-attribute]

    def weights(self, params: Arrays, model_state: Arrays) -> ServingWeights:
        """Weights of training as those of serving; layer by layer, since no layer is then copied out of a stack."""
        return self._joined(self.separate_weights(params, model_state))

    def weights_of(self, leaves: list[Any]) -> ServingWeights:
        """:meth:`weights` of the leaves of :meth:`separate_weights`, a list that is emptied: of one layer alone both lie in memory."""
        like = self.abstract_weights
        if alone_on_gpu(self.steps.target):
            like = jax.eval_shape(self.separate_weights, *self.steps.network.shapes)
        weights = jax.tree.unflatten(jax.tree.structure(like), leaves)
        leaves.clear()
        return self._joined(weights)

    def _joined(self, weights: ServingWeights) -> ServingWeights:
        for number in range(len(weights.layers)) if alone_on_gpu(self.steps.target) else ():
            weights.layers[number] = joined(weights.layers[number])
        return weights

    def separate_weights(self, params: Arrays, model_state: Arrays) -> ServingWeights:
        """:meth:`weights` before those of a GPU are :class:`Joined`."""
        network = self.steps.network
        own = {**network.cast(params), **model_state}
        every = with_copied_heads(own, self._model, self.steps.job)
        module = self._module(
            {path: every[path] for path in params}, {path: every[path] for path in model_state}
        )
        self._layers, states = layers_of(module)
        ends: dict[str, Any] = {p: a for p, a in every.items() if not p.startswith(BLOCKS)}
        if alone_on_cpu(network.target):
            states = [turned(state, wide=self.wide) for state in states]
            for path in (EMBEDDED, UNEMBEDDING) if self.wide else ():
                if path in ends:
                    ends[path] = ends[path].astype(jnp.float32)
            if UNEMBEDDING in ends:
                ends[UNEMBEDDING] = Turned.of(ends[UNEMBEDDING], 1)
            codes, scales = (ends.get(f"{UNEMBEDDING}/{part}") for part in (CODES, SCALES))
            if codes is not None and scales is not None and turns_alone(codes, scales, 1):
                ends[f"{UNEMBEDDING}/{CODES}"] = Turned.of(codes, 1)
        return ServingWeights(ends, states)

    def _module(self, params: Arrays, model_state: Arrays) -> DecoderModule:
        module = self.steps.network.module(params, model_state, train=False)
        if not isinstance(module, DecoderModule):
            raise RunError(
                f"{self.steps.job.name} is {with_article(type(self.steps.job.model).__name__)}, which does not generate text over pages; serve it as another kind of model"
            )
        return module

    def _ends(self, weights: ServingWeights) -> DecoderModule:
        """The module with what belongs to no layer."""
        network = self.steps.network

        def some(names: Any) -> dict[str, Any]:
            return {name: weights.ends.get(name) for name in names}

        return self._module(some(network.params), some(network.model_state))

    @property
    def arrays(self) -> PageArrays | RaggedArrays:
        """How the pages of a layer lie."""
        return page_arrays(self._ends(self.abstract_weights), self.page_size, self.cache)

    @property
    def kernel(self) -> str:
        """Kernel that reads the pages, for a log."""
        return self.arrays.kernel

    def read_weights(self, tokens: int) -> list[tuple[Any, float]]:
        """Abstract weights, and the share of each that a step of so many tokens reads: no rows of an embedding that is no output matrix, and of a mixture the experts that its tokens choose, each by chance."""
        config: Any = self.steps.job.model
        placed = self.placed_weights
        shares: list[tuple[Any, float]] = []
        untied = any(path.startswith("unembedding") for path in placed.ends)
        for path, array in placed.ends.items():
            looked_up = untied and path.startswith("embedding")
            shares += [(leaf, 0.0 if looked_up else 1.0) for leaf in jax.tree.leaves(array)]
        chosen = 1 - (1 - config.experts_per_token / max(config.experts, 1)) ** tokens
        for state in placed.layers:
            for path, variable in nnx.to_flat_state(state):
                expert = not EXPERT_MATRICES.isdisjoint(path[-2:])
                value = variable.get_value()
                routed = expert and not isinstance(value, Turned)
                for leaf in jax.tree.leaves(value):
                    shares.append((leaf, chosen if routed and leaf.ndim == 3 else 1.0))
        return shares

    def empty_pages(self, count: int) -> list[Any]:
        """So many pages of each layer, of zeros."""
        return [self.arrays.empty(count, self.dtype) for _ in self._layers]

    @property
    def vocab(self) -> int:
        """Tokens that have a logit."""
        return self.steps.job.model.vocab  # ty: ignore[missing-attribute]

    @property
    def shardings(self) -> ServingWeights:
        """Shardings of :meth:`weights`: those of training, less the dim of layers, on a TPU with the order of their dims."""
        if alone_on_cpu(self.steps.target):
            return jax.tree.map(lambda _: whole(self.steps.target), self.abstract_weights)
        kept = self.steps.shardings
        params = in_order(self.steps, kept.params)
        rest = in_order(self.steps, kept.model_state)
        module = self._module(params, rest)
        every = {**params, **rest}
        ends = {path: sharding for path, sharding in every.items() if not path.startswith(BLOCKS)}
        leaves = jax.tree.leaves(ServingWeights(ends, layers_of(module)[1]))
        return jax.tree.unflatten(jax.tree.structure(self.abstract_weights), leaves)

    @property
    def placed_weights(self) -> ServingWeights:
        """Abstract weights with their shardings."""
        return jax.tree.map(_with, self.abstract_weights, self.shardings)

    @property
    def placed_adapters(self) -> list[Any]:
        """Matrices of adapters side by side, among :attr:`placed_weights`."""
        leaves = jax.tree.leaves(self.placed_weights)
        return [leaves[number] for number, _ in self.adapter_leaves]

    def placed_pages(self, count: int) -> list[Any]:
        """Abstract pages with their shardings."""
        target, axes = self.steps.target, self.arrays.axes
        pages = jax.eval_shape(lambda: self.empty_pages(count))
        return jax.tree.map(
            lambda a: _with(a, fitted_sharding(target, a.shape, *axes(a.ndim))), pages
        )

    def placed_logits(self, texts: int) -> jax.ShapeDtypeStruct:
        """Abstract logits f32[texts, vocab] with their sharding."""
        shape, target = (texts, self.vocab), self.steps.target
        where = fitted_sharding(target, shape, *LOGITS)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)

    def page_bytes(self) -> int:
        """Bytes of a page, of all layers and devices."""
        pages = jax.eval_shape(lambda: self.empty_pages(1))
        return sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(pages))

    def read(
        self,
        weights: ServingWeights,
        pages: list[Any],
        latest: jax.Array,
        step_input: StepInput,
        chunk: tuple[int, int],
    ) -> tuple[jax.Array, list[Any]]:
        """Reads tokens: logits f32[texts, vocab] after the last of each text, and the pages with the tokens in them.

        Args:
            weights: See :meth:`weights`.
            pages: Of each layer; donated.
            latest: int32[slots]: the last token of each slot.
            step_input: What to read.
            chunk: Parts of prompts, and tokens of each; static.
        """
        hidden, pages = self._hidden(weights, pages, latest, step_input, chunk)
        rows = step_input.slots.shape[0]
        ends = rows + jnp.arange(chunk[0]) * chunk[1] + jnp.maximum(step_input.count[rows:] - 1, 0)
        last = jnp.concatenate([jnp.arange(rows), ends]).astype(jnp.int32)
        module = self._ends(weights)
        return module.logits(hidden[last][:, None])[:, 0].astype(jnp.float32), pages

    def verify(
        self,
        weights: ServingWeights,
        pages: list[Any],
        latest: jax.Array,
        step_input: StepInput,
        chunk: tuple[int, int],
    ) -> tuple[jax.Array, list[Any]]:
        """:meth:`read` of proposals, the last token of a text before each: logits f32[texts x n, vocab] after every token.

        What is not accepted is overwritten by what is read next.
        """
        hidden, pages = self._hidden(weights, pages, latest, step_input, chunk, drafts=True)
        return self._ends(weights).logits(hidden[:, None])[:, 0].astype(jnp.float32), pages

    def score(
        self,
        weights: ServingWeights,
        pages: list[Any],
        latest: jax.Array,
        step_input: StepInput,
        chunk: tuple[int, int],
        following: jax.Array,
    ) -> tuple[jax.Array, ChosenTokens, list[Any]]:
        """:meth:`read` of one part of a prompt, with the log-probability of the token after each.

        Args:
            following: int32[tokens].
        """
        hidden, pages = self._hidden(weights, pages, latest, step_input, chunk)
        module = self._ends(weights)

        def scored(part: tuple[jax.Array, jax.Array]) -> ChosenTokens:
            return score(module.logits(part[0][:, None])[:, 0].astype(jnp.float32), part[1])

        # Some at a time: the logits of a whole part would be the largest array of the program.
        block = math.gcd(hidden.shape[0], SCORED)
        split = (hidden.reshape(-1, block, hidden.shape[1]), following.reshape(-1, block))
        tokens = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), jax.lax.map(scored, split))
        last = jnp.maximum(step_input.count - 1, 0)
        return module.logits(hidden[last][:, None])[:, 0].astype(jnp.float32), tokens, pages

    def _hidden(
        self,
        weights: ServingWeights,
        pages: list[Any],
        latest: jax.Array,
        step_input: StepInput,
        chunk: tuple[int, int],
        *,
        drafts: bool = False,
    ) -> tuple[jax.Array, list[Any]]:
        rows = step_input.slots.shape[0]
        kept = jnp.where(step_input.slots >= 0, latest[step_input.slots], step_input.tokens[:rows])
        tokens = jnp.concatenate([kept, step_input.tokens[rows:]])
        reading = Reading(
            tokens, step_input.recent, step_input.start, step_input.count, step_input.table
        )
        layers = list(zip(self._layers, weights.layers, strict=True))
        ends = self._ends(weights)
        with columns_kept(self._columns(step_input.adapters, rows, chunk)):
            return read(ends, layers, reading, pages, chunk, self.cache, drafts=drafts)

    @cached_property
    def adapter_leaves(self) -> list[tuple[int, int]]:
        """Numbers of the weights that are matrices of adapters, each with the dim of their columns."""
        leaves = jax.tree.leaves_with_path(self.abstract_weights)
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
        dims = [
            (number, leaf.ndim - 1 if A in name else 0)
            for number, (name, (_, leaf)) in enumerate(zip(names, leaves, strict=True))
            if A in name or B in name
        ]
        return dims if self.adapters else []

    @cached_property
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the matrices of one adapter, by their paths."""
        rank = self.steps.job.adapter.rank // max(self.adapters, 1)
        return {
            path: tuple(
                rank if dim == self.columns_dim(path) else n for dim, n in enumerate(like.shape)
            )
            for path, like in self._network.params.items()
        }

    def columns_dim(self, path: str) -> int:
        """Dim of the columns of a matrix A or B, in a stack of layers."""
        home, _, name = path.rpartition("/")
        network = self._network
        a, b = (network.params[f"{home}/{which}"].ndim for which in (A, B))
        # Of A and B together only the dims of the stack are there twice, beside both ranks.
        base = next(p for p in (BASE, CODES) if f"{home}/{p}" in network.model_state)
        stacked = a + b - 2 - network.model_state[f"{home}/{base}"].ndim
        return a - 1 if name == A else stacked

    def placed(
        self, matrices: Arrays, held: Sequence[jax.Array], number: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Matrices of all adapters with those of one in its place.

        Args:
            matrices: Of the adapter, of :attr:`adapter_shapes`.
            held: Of all, at :attr:`adapter_leaves`.
            number: Of the adapter, from 1.
        """
        count, network = self.adapters, self._network
        every = {}
        for path, matrix in matrices.items():
            times = [1] * matrix.ndim
            times[self.columns_dim(path)] = count
            every[path] = jnp.tile(matrix, times)
        rest = {path: jnp.zeros(a.shape, a.dtype) for path, a in network.model_state.items()}
        leaves = jax.tree.leaves(self.weights(every, rest))
        owner = self._owners
        return tuple(
            jnp.where(
                jnp.expand_dims(owner == number, [d for d in range(old.ndim) if d != dim]),
                leaves[leaf],
                old,
            )
            for (leaf, dim), old in zip(self.adapter_leaves, held, strict=True)
        )

    @property
    def _owners(self) -> jax.Array:
        """int32[rank]: number of the adapter that each column belongs to."""
        rank = self.steps.job.adapter.rank
        return jnp.arange(rank) // (rank // self.adapters) + 1

    def _columns(self, numbers: jax.Array, rows: int, chunk: tuple[int, int]) -> jax.Array | None:
        """bool[tokens, 1, rank]: columns of the adapter of each token's text."""
        if not self.adapters:
            return None
        by_token = jnp.concatenate([numbers[:rows], jnp.repeat(numbers[rows:], chunk[1])])
        return by_token[:, None, None] == self._owners


class TextPages(NamedTuple):
    """Cache of one text in pages."""

    pages: list[Any]
    """Pages of each layer; the first is padding's, the others are the text's in order."""
    length: jax.Array
    """int32[1]: tokens in them."""
    recent: jax.Array
    """int32[history]: the last tokens, -1 for none."""


class PagedDecode:
    """The programs of :class:`systolic.steps.decode.Decode` for one text over pages, each layer's weights an array of its own.

    On a CPU a loop over stacked layers would copy the weights of each in every step.

    Args:
        steps: Of a decoder's job, for one device.
        sampling: Sampling of the next token.
    """

    def __init__(self, steps: StepFunctions, sampling: Sampling) -> None:
        self._paged, self._sampling = PagedSteps(steps, GENERATED_PAGE, wide=True), sampling
        self.max_positions: int | None = steps.job.model.learned_positions or None  # ty: ignore[missing-attribute]

    def weights(self, params: Arrays, model_state: Arrays) -> ServingWeights:
        """See :meth:`PagedSteps.weights`."""
        return self._paged.weights(params, model_state)

    def prefill(
        self,
        weights: ServingWeights,
        model_state: Arrays,
        tokens: jax.Array,
        count: jax.Array,
        key: jax.Array,
        capacity: int,
        mask: jax.Array | None = None,
    ) -> DecodeState:
        """See :meth:`systolic.steps.decode.Decode.prefill`; a long prompt is read in parts of :data:`PART` tokens."""
        del model_state
        size, history = tokens.shape[1], self._paged.history
        part = math.gcd(size, PART) if size > PART else size
        table = 1 + jnp.arange(-(-capacity // GENERATED_PAGE))
        # Padding before the first token is no token.
        padded = jnp.concatenate([jnp.full((history,), -1, jnp.int32), tokens[0]])
        recent = padded[jnp.arange(size)[:, None] + jnp.arange(history)]

        def read_part(carry: Any, start: jax.Array) -> tuple[Any, None]:
            pages, last = carry
            own = jnp.clip(count - start, 0, part)
            ids, before = (
                jax.lax.dynamic_slice_in_dim(a, start, part) for a in (tokens[0], recent)
            )
            where = start[None], own
            logits, pages = self._read(weights, pages, (ids, before), where, table, (1, part))
            return (pages, jnp.where(own[:, None] > 0, logits, last)), None

        pages = self._paged.empty_pages(1 + table.size)
        begin = pages, jnp.zeros((1, self._paged.vocab), jnp.float32)
        (pages, logits), _ = jax.lax.scan(read_part, begin, jnp.arange(0, size, part))
        key, use = jax.random.split(key)
        latest = jax.lax.dynamic_slice_in_dim(padded, count[0], history)
        cache = TextPages(pages, count, latest)
        return DecodeState(token=pick(logits, use, self._sampling, mask), key=key, cache=cache)

    def decode(
        self,
        weights: ServingWeights,
        model_state: Arrays,
        state: DecodeState,
        count: int,
        mask: jax.Array | None = None,
    ) -> tuple[DecodeState, jax.Array]:
        """See :meth:`systolic.steps.decode.Decode.decode`."""
        del model_state

        def step(state: DecodeState, _: None) -> tuple[DecodeState, jax.Array]:
            pages, length, recent = state.cache
            table = 1 + jnp.arange(pages[0].value.shape[1] - 1)
            some, one = (state.token, recent[None]), jnp.ones_like(length)
            logits, pages = self._read(weights, pages, some, (length, one), table, (0, 0))
            key, use = jax.random.split(state.key)
            recent = jnp.concatenate([recent, state.token])[1:]
            token = pick(logits, use, self._sampling, mask)
            cache = TextPages(pages, length + 1, recent)
            return DecodeState(token=token, key=key, cache=cache), state.token

        state, tokens = jax.lax.scan(step, state, None, length=count)
        return state, tokens.T

    def _read(
        self,
        weights: ServingWeights,
        pages: list[Any],
        tokens: tuple[jax.Array, jax.Array],
        where: tuple[jax.Array, jax.Array],
        table: jax.Array,
        chunk: tuple[int, int],
    ) -> tuple[jax.Array, list[Any]]:
        """:meth:`PagedSteps.read` of tokens, those before each, and their first position and number."""
        none = jnp.full((0 if chunk[0] else 1,), -1, jnp.int32)
        ids, recent = tokens
        return self._paged.read(
            weights,
            pages,
            jnp.zeros((1,), jnp.int32),
            StepInput(ids, none, recent, *where, table[None], none[:0]),
            chunk,
        )


def _with(array: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
