"""Step functions: a job for a target as pure functions (init, train step, eval step, predict step), and refusals of a user's model or task while they are traced.

Nothing here runs or compiles: the trainer jits these functions for the local devices, the
forecast lowers the same ones for a described slice.
"""

import math
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from systolic.core.errors import OptionError, nearest
from systolic.job import Batch as BatchSize
from systolic.job import (
    GuardRule,
    Job,
    Layout,
    Optimizer,
    OptimizerKind,
    Schedule,
    ScheduleKind,
    Stored,
)
from systolic.job.data import MASK
from systolic.job.model import Mean, check_terms
from systolic.models.adapters import A
from systolic.steps import jaxpr
from systolic.steps.network import Arrays, ModelStructure
from systolic.steps.state import (
    GuardState,
    LossScale,
    TrainState,
    UpdateRates,
    cast,
    narrowed,
    salted,
    widened,
)
from systolic.steps.target import (
    MeshTarget,
    batch_specs,
    check_fields,
    optimizer_specs,
    parameter_spec,
)

ABOUT_SHAPES = re.compile(r"shape|dimension|broadcast|rank|axis|axes|size|feature|channel", re.I)
OURS = Path(__file__).parents[1]
SHOWN = 6
"""Arrays of a frame that a message names."""
STACKED = ("layers", "experts", "stages")
"""Logical dims that stack copies of a matrix."""
SCHEDULED = optax.ScaleByScheduleState
"""Field of every rule's state that counts updates for the learning rate."""
LARS = 0.001
"""The trust coefficient of LARS (You et al. 2017)."""
Axes = Mapping[str, tuple[str | None, ...]]
"""Parameter name to the logical names of its dims; unnamed dims are ``None``."""
Batch = Mapping[str, jax.Array]
GUARD_WARMUP = 20
"""Good steps before the guard judges a loss."""
NOISE = 15.0
"""Multiple of the log spread within which a loss is never a jump. For a log loss of standard deviation 1
it allows a log ratio of 3; for a steady loss it is below any jump."""
TINY = 1e-12
"""Lower bound of a loss in ratios, against division by zero."""


@contextmanager
def refusing_shapes(
    module: nnx.Module, model: object, task: object, batch: Mapping[str, Any]
) -> Generator[None]:
    """Errors about shapes and about arrays that a batch lacks, while a model or task that is not of this package is traced, end in one line.

    Raises:
        OptionError: in their place; names the module's path, its inputs, its parameters and the line of the user's file.
    """
    try:
        yield
    except KeyError as error:
        name = error.args[0]
        users = [frame for frame in _frames(error.__traceback__) if _is_users(frame[0])]
        if not users or not isinstance(name, str) or name in batch:
            raise
        held = sorted(set(batch) - {MASK})
        raise OptionError(
            f"there is no array {name!r} in a batch{_at(*users[-1])}{nearest(name, held)}; the data has {', '.join(held)}"
        ) from error
    except (TypeError, ValueError) as error:
        own = any(not type(part).__module__.startswith("systolic.") for part in (model, task))
        if not own or not ABOUT_SHAPES.search(str(error)):
            raise
        raise OptionError(_shape_error(error, module, model, task)) from error


def _shape_error(error: Exception, root: nnx.Module, model: object, task: object) -> str:
    frames = _frames(error.__traceback__)
    reason = " ".join((str(error).splitlines() or [type(error).__name__])[0].split()).rstrip(".")
    users = [frame for frame in frames if _is_users(frame[0])]
    at = _at(*users[-1]) if users else ""
    inner = [frame for frame, _ in frames if isinstance(frame.f_locals.get("self"), nnx.Module)]
    if not inner:
        shapes = _arrays(users[-1][0].f_locals) if users else ""
        return f"the task {type(task).__name__} fails{at} with shapes that do not fit{shapes and f' ({shapes})'}: {reason}"
    module = inner[-1].f_locals["self"]
    names = inner[-1].f_code.co_varnames[1 : inner[-1].f_code.co_argcount]
    inputs = _arrays({name: inner[-1].f_locals.get(name) for name in names})
    if not inputs:
        inputs = _arrays(inner[-1].f_locals)
    weights = _arrays({name: _value(parameter) for name, parameter in vars(module).items()})
    path = _path(root, module)
    where = f"{path} ({type(module).__name__})" if path else type(module).__name__
    failure = f"the model {type(model).__name__} fails in {where}{at}"
    parts = [*([f"input {inputs}"] if inputs else []), *([f"weights {weights}"] if weights else [])]
    return (
        f"{failure}: {' and '.join(parts)} do not fit ({reason})"
        if parts
        else f"{failure}: {reason}"
    )


def _at(frame: FrameType, number: int) -> str:
    return f" at {Path(frame.f_code.co_filename).name} line {number}"


def _frames(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames


def _is_users(frame: FrameType) -> bool:
    """Whether a frame is of a file that is no package's."""
    file = Path(frame.f_code.co_filename)
    return "site-packages" not in file.parts and OURS not in file.parents and file.suffix == ".py"


def _path(root: nnx.Module, module: nnx.Module) -> str:
    """Path of a module in the model: ``blocks.0.hidden``; "" for the model itself, or one that was made while it ran."""
    for path, submodule in nnx.iter_modules(root):
        if submodule is module:
            return ".".join(map(str, path))
    return ""


def _value(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else None


def _arrays(values: Mapping[str, Any]) -> str:
    """Arrays by name: ``x float32[32, 13]``."""
    arrays = [
        f"{name} {value.dtype}{list(value.shape)}"
        for name, value in values.items()
        if isinstance(value, jax.Array | np.ndarray)
    ]
    return ", ".join(arrays[:SHOWN])


def schedule(value: Schedule, steps: int, peak: Any) -> Callable[[Any], Any]:
    """Step (counted from 0) to learning rate f32[]."""
    warmup = value.warms(steps)
    body = max(steps - warmup, 1)
    end = peak * value.final
    match value.kind:
        case ScheduleKind.constant:
            after = optax.constant_schedule(peak)
        case ScheduleKind.cosine:
            after = optax.cosine_decay_schedule(peak, body, alpha=value.final)
        case ScheduleKind.linear:
            after = optax.linear_schedule(peak, end, body)
        case ScheduleKind.wsd:
            decay = max(round(steps * value.decay), 1)
            stable = max(body - decay, 0)
            after = optax.join_schedules(
                [optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)], [stable]
            )
    if not warmup:
        return after
    # The first step has 1/warmup of the peak, not 0, so that it moves the weights.
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1 if warmup > 1 else 1)
    return optax.join_schedules([rise, after], [warmup])


def num_updates(state: Any) -> Any:
    """Number of updates made by an optimizer state of :func:`build`, int32[]: its schedule's next step.

    Train steps whose update was dropped don't count.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, SCHEDULED))
    return next(node.count for node in nodes if isinstance(node, SCHEDULED))


def own_dims(axes: tuple[str | None, ...]) -> list[int]:
    """Dims of a parameter's own matrix, without those that stack copies of it."""
    return [dim for dim, name in enumerate(axes) if name not in STACKED]


def is_matrix(axes: tuple[str | None, ...]) -> bool:
    """Whether a parameter is a matrix or a kernel (decayed), not a bias, a norm or another vector."""
    return len(own_dims(axes)) >= 2


def build(
    value: Optimizer,
    learning_rate: Callable[[Any], Any],
    axes: Axes,
    factors: Mapping[str, float] | None = None,
    rates: UpdateRates | None = None,
) -> optax.GradientTransformation:
    """The update rule over a flat dict of parameters; gradients arrive clipped.

    ``rates`` may be traced arrays; by default they are the optimizer's own numbers. What its state is made of
    depends on the optimizer alone.

    ``factors`` scale the updates of parameters, see :meth:`systolic.job.Model.update_factor`. Weight decay is added
    afterwards and is not scaled, except with muon.
    """
    sized, rates = scaled_updates(factors or {}), rates or UpdateRates.of(value)
    matrices = {name: is_matrix(dims) for name, dims in axes.items()}
    b1 = value.b1 if value.b1 is not None else {OptimizerKind.muon: 0.95}.get(value.kind, 0.9)
    b2 = (
        value.b2
        if value.b2 is not None
        else {OptimizerKind.lion: 0.99, OptimizerKind.adamw: 0.95, OptimizerKind.muon: 0.95}.get(
            value.kind, 0.999
        )
    )
    decay = (
        optax.add_decayed_weights(rates.weight_decay, mask=matrices)
        if value.weight_decay
        else optax.identity()
    )
    descend = optax.scale_by_learning_rate(learning_rate)
    match value.kind:
        case OptimizerKind.adamw:
            return optax.chain(optax.scale_by_adam(b1, b2, value.eps), *sized, decay, descend)
        case OptimizerKind.sgd:
            return optax.chain(decay, optax.trace(b1, nesterov=True), descend)
        case OptimizerKind.lion:
            return optax.chain(optax.scale_by_lion(b1, b2), *sized, decay, descend)
        case OptimizerKind.lamb:
            return optax.chain(
                optax.scale_by_adam(b1, b2, 1e-6), decay, scale_to_norms(axes, 1.0), descend
            )
        case OptimizerKind.lars:
            # The momentum includes the rate, so that a new rate does not rescale past gradients.
            return optax.chain(decay, scale_to_norms(axes, LARS), descend, optax.trace(b1))
        case OptimizerKind.adafactor:
            return optax.chain(
                optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), *sized, decay, descend
            )
        case OptimizerKind.muon:
            update_rule = _muon(value, (b1, b2), learning_rate, axes, rates)
            return optax.chain(update_rule, *sized) if sized else update_rule


def scaled_updates(factors: Mapping[str, float]) -> list[optax.GradientTransformation]:
    """Multiplies updates by the factors of their parameters; empty if all are 1, so that the state is the plain rule's."""
    if all(factor == 1 for factor in factors.values()):
        return []

    def apply(updates: Any, params: Any) -> Any:
        del params
        return {name: update * factors[name] for name, update in updates.items()}

    return [optax.stateless(apply)]


def scale_to_norms(axes: Axes, share: float) -> optax.GradientTransformation:
    """Scales each matrix's update by ``share`` x the norm of the matrix / the norm of the update.

    The norms are of each layer's own matrix where a parameter stacks several. Biases, norms and other
    vectors keep their update, as in the reference code of LARS and LAMB, and so do zeros.
    """

    def scaled(name: str, update: jax.Array, parameter: jax.Array) -> jax.Array:
        if not is_matrix(axes[name]):
            return update
        dims = tuple(own_dims(axes[name]))

        def norm(array: jax.Array) -> jax.Array:
            return jnp.sqrt(jnp.sum(jnp.square(array), axis=dims, keepdims=True))

        has, moves = norm(parameter), norm(update)
        known = (has > 0) & (moves > 0)
        return update * jnp.where(known, share * has / jnp.where(known, moves, 1.0), 1.0)

    def apply(updates: Any, params: Any) -> Any:
        return {name: scaled(name, update, params[name]) for name, update in updates.items()}

    return optax.stateless(apply)


def _muon(
    value: Optimizer,
    betas: tuple[float, float],
    learning_rate: Callable[[Any], Any],
    axes: Axes,
    rates: UpdateRates,
) -> optax.GradientTransformation:
    """Muon for hidden matrices, undecayed AdamW for embeddings, heads and vectors (Jordan 2024)."""
    return optax.contrib.muon(
        learning_rate,
        beta=betas[0],
        eps=value.eps,
        weight_decay=rates.weight_decay if value.weight_decay else 0.0,
        adam_b2=betas[1],
        adam_learning_rate=lambda step: learning_rate(step) * rates.adam_share,
        muon_weight_dimension_numbers={name: _muon_dims(dims) for name, dims in axes.items()},
    )


def _muon_dims(axes: tuple[str | None, ...]) -> optax.contrib.MuonDimensionNumbers | None:
    """Input and output dims of a hidden matrix; ``None`` for a parameter that AdamW updates."""
    own = own_dims(axes)
    if len(own) < 2 or "vocab" in axes:
        return None
    if axes[own[0]] in ("embed", "expert_embed"):
        return optax.contrib.MuonDimensionNumbers(
            reduction_axis=(own[0],), output_axis=tuple(own[1:])
        )
    return optax.contrib.MuonDimensionNumbers(
        reduction_axis=tuple(own[:-1]), output_axis=(own[-1],)
    )


class StepFunctions:
    """Step functions of one job on one target.

    Args:
        job: What to compute.
        target: Where.
        trains: Whether its own batches are read, whose dims and the model's the mesh then has to divide. A server
            checks its layout by rules of its own.
    """

    def __init__(self, job: Job, target: MeshTarget, *, trains: bool = True) -> None:
        if trains:
            job.model.check(target.layout)
            check_fields(target, job.data.fields())
        self.job, self.target = job, target
        self.batch_size = job.batch.resolve(target.layout)
        self.network = ModelStructure(job.model, target, job.adapter, job.quantization)
        self.rates = UpdateRates.of(job.optimizer)
        self._axes = {
            path: dims or (None,) * self.network.params[path].ndim
            for path, dims in self.network.axes.items()
        }
        kind = job.optimizer.kind
        self._factors = {path: job.model.update_factor(path, kind) for path in self._axes}
        self.optimizer = self._rule(self.rates)
        self.generations: dict[Any, Any] = {}
        """Jitted generation programs, kept by :func:`systolic.steps.programs.generation`."""

    # Shapes and shardings

    @cached_property
    def shapes(self) -> TrainState:
        """The state as ShapeDtypeStructs."""
        return jax.eval_shape(self._first, *self.network.shapes)

    @cached_property
    def shardings(self) -> TrainState:
        """Shardings of the state."""
        sharding = self.target.sharding
        shapes = {path: shape.shape for path, shape in self.network.params.items()}
        specs = {
            path: parameter_spec(self.target, shapes[path], self.network.axes[path])
            for path in shapes
        }
        whole: Any = self.target.sharding(jax.sharding.PartitionSpec())
        params: Any = {path: sharding(spec) for path, spec in specs.items()}
        rest: Any = dict.fromkeys(self.network.model_state, whole)
        for path, axes in self.network.frozen.items():
            shape = self.network.model_state[path].shape
            rest[path] = sharding(parameter_spec(self.target, shape, axes))
        return TrainState(
            step=whole,
            params=params,
            model_state=rest,
            optimizer=jax.tree.map(sharding, optimizer_specs(self.shapes.optimizer, shapes, specs)),
            ema=params if self.shapes.ema is not None else None,
            scale=jax.tree.map(lambda _: whole, self.shapes.scale),
            guard=jax.tree.map(lambda _: whole, self.shapes.guard),
            rates=jax.tree.map(lambda _: whole, self.rates),
        )

    @cached_property
    def abstract_state(self) -> TrainState:
        """The state as ShapeDtypeStructs with shardings, for lowering and restoring."""
        return jax.tree.map(
            lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
            self.shapes,
            self.shardings,
        )

    def is_adapted(self, path: str) -> bool:
        """Whether a matrix of the plain model at ``path`` is frozen beside an adapter."""
        return f"{path}/{A}" in self.network.params

    def saved(self, state: TrainState) -> TrainState:
        """Part of a state (arrays or abstract) that checkpoints hold: all but the job's rates, and frozen weights, which come from the job's start."""
        state = replace(state, rates=None)
        if not self.network.frozen:
            return state
        kept = {p: a for p, a in state.model_state.items() if p not in self.network.frozen}
        return replace(state, model_state=kept)

    def with_rates(self, state: TrainState) -> TrainState:
        """A state on the target's devices with the job's rates."""

        def place(value: float, where: NamedSharding) -> jax.Array:
            array = np.asarray(value, np.float32)
            return jax.make_array_from_callback((), where, lambda _: array)

        return replace(state, rates=jax.tree.map(place, self.rates, self.shardings.rates))

    @cached_property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        """Shardings of a batch."""
        return {
            name: self.target.sharding(spec)
            for name, spec in batch_specs(self.target, self.job.data.fields()).items()
        }

    def abstract_batch(self, size: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of ``size`` examples (the job's by default) as ShapeDtypeStructs with shardings."""
        size = size or self.batch_size
        shapes = {
            name: ((size, *field.shape), field.dtype)
            for name, field in self.job.data.fields().items()
        }
        shapes[MASK] = ((size,), "float32")
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=self.batch_shardings[name])
            for name, (shape, dtype) in shapes.items()
        }

    @cached_property
    def forward_flops(self) -> float:
        """Matmul FLOPs of one example's forward pass."""
        known = self.job.forward_flops
        return self._products.forward / self.batch_size if known is None else known

    @cached_property
    def _products(self) -> jaxpr.Products:
        """FLOPs of the batch, of a model that does not state them."""
        state = self.abstract_state
        return jaxpr.products(
            lambda p, r, b: self.sums(p, r, b, train=False)[0],
            state.params,
            state.model_state,
            self.abstract_batch(),
        )

    @property
    def step_flops(self) -> float:
        """Model FLOPs of a train step: the backward pass counts twice the forward, without the gradients of the input and of frozen weights.

        Rematerialisation is not counted.
        """
        if self.job.forward_flops is None:
            return sum(self._products)
        return (3 * self.forward_flops - self.job.unused_flops) * self.batch_size

    # Step functions

    def init(self, key: jax.Array) -> TrainState:
        """The state before the first step; jit it with ``out_shardings=self.shardings`` so that weights are created sharded."""
        return self._first(*self.network.init(key))

    def _first(self, params: Arrays, model_state: Arrays) -> TrainState:
        """The state before the first step, of these weights and variables."""
        dtypes = self.job.dtypes
        # A model may keep weights in bf16; optimizer state and average are float32 by default.
        optimizer = self.optimizer.init(widened(params))
        params = cast(params, dtypes.parameters.dtype)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            model_state=model_state,
            optimizer=cast(optimizer, dtypes.moments.dtype),
            ema=wide_copy(params) if self.job.optimizer.ema else None,
            scale=LossScale.start() if self.target.dtype == "float16" else None,
            guard=GuardState.start(),
            rates=jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), self.rates),
        )

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; also f32[] metrics: loss, grad_norm, learning_rate, bad (0 or 1) and the task's terms."""
        scale = self.loss_scale(state)
        gradients, model_state, sums = self._gradients(state, batch, scale)
        weight = jnp.maximum(sums["loss"].weight, 1e-9)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / (weight * scale), gradients)
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        if self.job.optimizer.clip:
            shrink = jnp.minimum(1.0, self.job.optimizer.clip / jnp.maximum(norm, 1e-9))
            gradients = jax.tree.map(lambda g: g * shrink, gradients)
        with jax.named_scope("optimizer"):
            updates, optimizer = self.updates(gradients, state)
            params = self._moved(state, updates)
        ema = None
        if state.ema is not None:
            # A plain mean early on, since a decayed average would keep the initial weights.
            decay = jnp.minimum(self.job.optimizer.ema, (1 + state.step) / (10 + state.step))
            ema = jax.tree.map(
                lambda old, new: old * decay + new * (1 - decay),
                state.ema,
                widened(params),
            )

        loss = sums["loss"].total / weight
        bad, guard_state = self._judge(state.guard, loss, finite, overflow=state.scale is not None)
        drop = bad | ~finite if state.scale is not None else bad
        new = TrainState(
            step=state.step + 1,
            params=params,
            model_state=model_state,
            optimizer=optimizer,
            ema=ema,
            scale=state.scale.after(finite) if state.scale is not None else None,
            guard=guard_state,
            rates=state.rates,
        )
        if self.job.guard.rule is not GuardRule.ignore or state.scale is not None:
            kept = TrainState(
                step=new.step,
                params=state.params,
                model_state=state.model_state,
                optimizer=state.optimizer,
                ema=state.ema,
                scale=new.scale,
                guard=guard_state,
                rates=state.rates,
            )
            new = jax.tree.map(
                lambda old, fresh: old if old is fresh else jnp.where(drop, old, fresh), kept, new
            )
        metrics = {name: mean.total / jnp.maximum(mean.weight, 1e-9) for name, mean in sums.items()}
        return new, {
            **metrics,
            "grad_norm": norm,
            "learning_rate": self.learning_rate(state),
            "bad": bad.astype(jnp.float32),
        }

    def updates(self, gradients: Arrays, state: TrainState) -> tuple[Arrays, Any]:
        """Update of each weight (f32), and the optimizer's next state."""
        wide: Any = widened(state.optimizer)
        assert state.rates is not None
        rule = self._rule(state.rates)
        updated: Any = rule.update(gradients, wide, widened(state.params))
        return updated[0], narrowed(updated[1], state.optimizer, _salt(state, 0))

    def learning_rate(self, state: TrainState) -> jax.Array:
        """f32[]: the learning rate of the next update."""
        assert state.rates is not None
        return self._schedule(state.rates)(num_updates(state.optimizer))

    def _schedule(self, rates: UpdateRates) -> Any:
        return schedule(self.job.schedule, self.job.steps, rates.learning_rate)

    def _rule(self, rates: UpdateRates) -> optax.GradientTransformation:
        """The update rule with rates of the job or of a state; its state is of the same form with any."""
        return build(self.job.optimizer, self._schedule(rates), self._axes, self._factors, rates)

    def _moved(self, state: TrainState, updates: Arrays) -> Arrays:
        if self.job.dtypes.parameters is Stored.f32:
            # Weights that the model itself keeps in bf16 are rounded to nearest, as in other frameworks.
            moved: Any = optax.apply_updates(state.params, updates)
            return moved
        wide: Any = optax.apply_updates(widened(state.params), updates)
        return narrowed(wide, state.params, _salt(state, 1))

    def evaluate(self, params: Arrays, model_state: Arrays, batch: Batch) -> dict[str, Mean]:
        """The task's terms of one batch as sums, so that batches add up to the mean over a split."""
        return self.sums(params, model_state, batch, train=False)[0]

    def predict(self, params: Arrays, model_state: Arrays, batch: Batch) -> dict[str, jax.Array]:
        """The task's outputs, name to [batch, ...]."""
        module = self.network.module(self.network.cast(params), model_state, train=False)
        with refusing_shapes(module, self.job.model, self.job.task, batch):
            return dict(self.job.task.outputs(module, batch))

    def sums(
        self, params: Arrays, model_state: Arrays, batch: Batch, train: bool
    ) -> tuple[dict[str, Mean], Arrays]:
        """The task's terms of one batch as sums, and the module's variables after it.

        Raises:
            OptionError: in training, a term has a reserved name or none is the loss.
        """
        module = self.network.module(self.network.cast(params), model_state, train)
        with refusing_shapes(module, self.job.model, self.job.task, batch):
            terms = self.job.task.terms(module, batch, train)
        if train:
            check_terms(self.job.task, terms)
        mask = batch[MASK]
        sums = {name: _sum(value, mask) for name, value in terms.items()}
        return sums, self.network.variables(module)

    def _gradients(
        self, state: TrainState, batch: Batch, scale: jax.Array
    ) -> tuple[Arrays, Arrays, dict[str, Mean]]:
        """Sums over the batch: gradients of the scaled total loss, the module's new variables, the terms."""

        def loss(
            params: Arrays, model_state: Arrays, part: Batch
        ) -> tuple[jax.Array, tuple[dict[str, Mean], Arrays]]:
            sums, model_state = self.sums(params, {**model_state, **frozen}, part, train=True)
            moving = {path: model_state[path] for path in model_state if path not in frozen}
            return sums["loss"].total * scale, (sums, moving)

        # Frozen weights are no state that a pass hands to the next: they stay where they are.
        frozen = {path: state.model_state[path] for path in self.network.frozen}
        begun = {path: p for path, p in state.model_state.items() if path not in frozen}
        gradient = jax.value_and_grad(loss, has_aux=True)
        passes, dtype = self.job.layout.accumulate, self.job.dtypes.gradients.dtype
        # Gradients of the working copy come in its dtype, those of float32 weights in float32.
        # Rounded ones are rounded from the weights themselves.
        as_they_are = dtype == "float32" or self.network.rounded
        at = state.params if as_they_are else self.network.cast(state.params)
        if passes == 1:
            (_, (sums, moving)), gradients = gradient(at, begun, batch)
            return jax.tree.map(lambda g: g.astype(dtype), gradients), {**moving, **frozen}, sums

        def accumulate(carry: Any, part: Batch) -> tuple[Any, None]:
            total, model_state, sums = carry
            (_, (more, model_state)), gradients = gradient(at, model_state, part)
            return (
                jax.tree.map(lambda t, g: t + g.astype(dtype), total, gradients),
                model_state,
                jax.tree.map(jnp.add, sums, more),
            ), None

        parts = self.parts(batch, passes)
        first = jax.tree.map(lambda p: p[0], parts)
        _, (shape, _) = jax.eval_shape(loss, at, begun, first)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
        start = (jax.tree.map(lambda p: jnp.zeros_like(p, dtype), at), begun, zeros)
        (gradients, moving, sums), _ = jax.lax.scan(accumulate, start, parts)
        return gradients, {**moving, **frozen}, sums

    def parts(self, batch: Batch, count: int) -> dict[str, jax.Array]:
        """The batch in ``count`` equal parts: name to [count, batch / count, ...]."""

        def split(name: str, array: jax.Array) -> jax.Array:
            # Interleaved, so that each part has examples of every device and none move.
            parts = array.reshape(-1, count, *array.shape[1:]).swapaxes(0, 1)
            spec = self.batch_shardings[name].spec
            return jax.lax.with_sharding_constraint(
                parts, self.target.sharding(jax.sharding.PartitionSpec(None, *spec))
            )

        return {name: split(name, array) for name, array in batch.items()}

    def loss_scale(self, state: TrainState) -> jax.Array:
        """f32[]: factor of a pass's total loss before differentiation."""
        if state.scale is None:
            return jnp.ones((), jnp.float32)
        # In float16 the scale is for gradients of the mean loss; those of the total would overflow.
        return state.scale.scale / self._terms_per_pass

    @property
    def _terms_per_pass(self) -> int:
        """Approximate number of losses summed in a pass: its tokens or examples."""
        lengths = [
            field.shape[field.axes.index("sequence")]
            for field in self.job.data.fields().values()
            if "sequence" in field.axes
        ]
        return self.batch_size // self.job.layout.accumulate * max(lengths, default=1)

    def _judge(
        self, guard_state: GuardState, loss: jax.Array, finite: jax.Array, overflow: bool
    ) -> tuple[jax.Array, GuardState]:
        """Whether this step is bad under the job's guard, and the guard's next state.

        In float16 a gradient overflow is handled by the loss scale and is no bad step.
        """
        guard = self.job.guard
        bad = ~jnp.isfinite(loss) if overflow else ~(jnp.isfinite(loss) & finite)
        away = jnp.log(jnp.maximum(loss, TINY) / jnp.maximum(guard_state.mean, TINY))
        if guard.jump:
            # Near zero normal losses are many times the mean, so a jump must also exceed the noise.
            normal = jnp.maximum(math.log(guard.jump), NOISE * guard_state.spread)
            bad |= (guard_state.seen >= GUARD_WARMUP) & (guard_state.mean > 0) & (away > normal)
        if guard.rule is GuardRule.stop:
            bad |= guard_state.frozen
        decay = jnp.minimum(0.98, guard_state.seen / (guard_state.seen + 1.0))
        distance = jnp.where(guard_state.seen > 0, jnp.maximum(away, 0.0), 0.0)
        return bad, GuardState(
            mean=jnp.where(bad, guard_state.mean, guard_state.mean * decay + loss * (1 - decay)),
            spread=jnp.where(
                bad, guard_state.spread, guard_state.spread * decay + distance * (1 - decay)
            ),
            seen=guard_state.seen + ~bad,
            in_a_row=jnp.where(bad, guard_state.in_a_row + 1, 0),
            total=guard_state.total + bad,
            frozen=guard_state.frozen | (bad if guard.rule is GuardRule.stop else False),
        )


def _salt(state: TrainState, use: int) -> jax.Array:
    """Salt of a step's stochastic rounding; it depends on the step alone, so that a resumed run repeats it."""
    return salted(use, state.step)


def wide_copy(params: Arrays) -> Arrays:
    """Copies of the weights in float32."""
    return {path: jnp.array(p, jnp.float32, copy=True) for path, p in params.items()}


def _sum(value: Any, mask: jax.Array) -> Mean:
    if isinstance(value, Mean):
        return Mean(jnp.asarray(value.total, jnp.float32), jnp.asarray(value.weight, jnp.float32))
    return Mean(jnp.sum(jnp.where(mask > 0, value, 0).astype(jnp.float32) * mask), jnp.sum(mask))


def parameters_and_flops(job: Job) -> tuple[int, float]:
    """Elements of all parameters and matmul FLOPs of one example's forward pass, from a trace over no devices."""
    layout = Layout(fsdp=1)
    names = tuple(layout.mesh_shape)
    mesh = AbstractMesh(
        tuple(layout.mesh_shape.values()), names, axis_types=(AxisType.Auto,) * len(names)
    )
    alone = replace(job, layout=layout, batch=BatchSize(total=1))
    target = MeshTarget(platform="tpu", layout=layout, dtype="bfloat16", mesh=mesh)
    steps = StepFunctions(alone, target)
    return steps.network.num_parameters, float(steps.forward_flops)
