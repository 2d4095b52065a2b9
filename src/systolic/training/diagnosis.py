"""Diagnosis of a training: probes of gradients, weights and updates by layer, and a replay of the step on a bad batch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
from jax.sharding import PartitionSpec

from systolic.chips import usual
from systolic.core.errors import DataError, NotFoundError
from systolic.core.units import duration, gibibytes
from systolic.job import Stored
from systolic.job.model import Mean
from systolic.runs import CheckpointStore, Run
from systolic.runs.access import Access
from systolic.setup import Setup
from systolic.steps.programs import training
from systolic.steps.state import TrainState
from systolic.steps.step_functions import Batch, StepFunctions
from systolic.training import distributed
from systolic.training.ledger import Ledger, Spent
from systolic.training.programs import CompiledStep

STACKED = "layers"
"""Logical name of the first dim of a parameter that stacks the layers."""

PARTS = (4, 2, 3)
"""Preferred numbers of parts of a batch for the noise of the gradient, best first."""

Figures = dict[str, Any]
SHARE = 0.01
"""Share of a session's time for probes by default."""
LOOKS = 50
"""Most probes in a run by default."""
LEAST_SECONDS = 2.0
"""Fewest seconds that the probe's compile is expected to take."""
PROBES_AFTERWARDS = 4
"""Number of probes at a checkpoint."""
CPU_FLOPS_PER_SECOND: float = usual("cpu")["least_flops_per_second"].value
"""Rate that bounds the time of :func:`examine` on a CPU."""
MOST_SECONDS = 120.0
DIGITS = 5
"""Significant digits of recorded figures."""
Event = Callable[[str, float, str], None]


def num_parts(steps: StepFunctions) -> int:
    """Number of parts of a batch with gradients of their own: the job's passes, or a divisor of the batch; 1 for none."""
    passes = steps.job.layout.accumulate
    if passes > 1:
        return passes
    each = steps.batch_size // steps.job.layout.batch_ways
    return next((count for count in PARTS if each % count == 0), 1)


def jit_diagnose(steps: StepFunctions) -> Any:
    """:func:`diagnose`, jitted: (state, batch) -> figures, whole on every device."""
    # It runs once in hundreds of steps, and on a CPU LLVM's optimisation takes longer than it saves.
    options = steps.target.compiler_options
    if steps.target.platform == "cpu":
        options = {"xla_backend_optimization_level": "1"}
    return jax.jit(
        lambda state, batch: diagnose(steps, state, batch),
        in_shardings=(steps.shardings, steps.batch_shardings),
        out_shardings=steps.target.sharding(PartitionSpec()),
        compiler_options=options,
    )


def diagnose(steps: StepFunctions, state: TrainState, batch: Batch) -> Figures:
    """Figures of the step that would be made on ``batch``.

    Returns:
        ``loss``, ``learning_rate``, ``big_square`` and ``small_square`` f32[]: the squared norm of the
        batch's mean gradient, and the mean over the parts of theirs (NaN where there is one part).
        ``parameters``: path to ``gradient``, ``weight``, ``update`` (2-norms) and ``lost`` (the share
        of the weights with an update that rounding cancels), f32[] each, or f32[layers] for a stacked
        parameter. Gradients are those before clipping.
    """
    count = num_parts(steps)
    gradients, loss, small = _gradients(steps, state, batch, count)
    big = optax.tree.norm(gradients, squared=True)
    clipped = gradients
    if steps.job.optimizer.clip:
        shrink = jnp.minimum(1.0, steps.job.optimizer.clip / jnp.maximum(jnp.sqrt(big), 1e-9))
        clipped = jax.tree.map(lambda g: g * shrink, gradients)
    moved, _ = steps.updates(clipped, state)
    parameters = {
        path: _of_parameter(
            gradients[path],
            # Stochastic rounding loses no update on average, so the weights count as float32.
            weight if steps.job.dtypes.parameters is Stored.f32 else weight.astype(jnp.float32),
            moved[path],
            stacked=is_stacked(steps.network.axes[path]),
        )
        for path, weight in state.params.items()
    }
    return {
        "loss": loss,
        "learning_rate": steps.learning_rate(state),
        "big_square": big,
        "small_square": small if count > 1 else jnp.asarray(jnp.nan, jnp.float32),
        "parameters": parameters,
    }


def is_stacked(axes: tuple[str | None, ...] | None) -> bool:
    """Whether a parameter holds one array for each layer along its first dim."""
    return bool(axes) and axes[0] == STACKED


def _gradients(
    steps: StepFunctions, state: TrainState, batch: Batch, count: int
) -> tuple[Figures, jax.Array, jax.Array]:
    """The batch's mean gradient in float32, its mean loss, the mean squared norm of its parts' gradients."""
    scale = steps.loss_scale(state)

    def loss(params: Any, model_state: Any, part: Batch) -> tuple[jax.Array, Any]:
        sums, model_state = steps.sums(params, model_state, part, train=True)
        return sums["loss"].total * scale, (sums["loss"], model_state)

    def add_part(carry: Any, part: Batch) -> tuple[Any, jax.Array]:
        total, model_state, mean = carry
        gradients, (more, model_state) = jax.grad(loss, has_aux=True)(
            state.params, model_state, part
        )
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        square = optax.tree.norm(gradients, squared=True)
        square /= (jnp.maximum(more.weight, 1e-9) * scale) ** 2
        return (
            jax.tree.map(jnp.add, total, gradients),
            model_state,
            jax.tree.map(lambda m, a: m + a.astype(jnp.float32), mean, more),
        ), square

    parts = steps.parts(batch, count)
    nothing = jnp.zeros((), jnp.float32)
    zeros = Mean(total=nothing, weight=nothing)
    total = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
    (total, _, mean), squares = jax.lax.scan(add_part, (total, state.model_state, zeros), parts)
    weight = jnp.maximum(mean.weight, 1e-9)
    return (
        jax.tree.map(lambda g: g / (weight * scale), total),
        mean.total / weight,
        jnp.mean(squares),
    )


def _of_parameter(
    gradient: jax.Array, weight: jax.Array, update: jax.Array, *, stacked: bool
) -> dict[str, jax.Array]:
    dims = tuple(range(int(stacked), weight.ndim))

    def norm(array: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(array.astype(jnp.float32)), axis=dims))

    moves = update != 0
    kind = jnp.finfo(weight.dtype)
    wide = weight.astype(jnp.float32)
    # Explicit rounding, since XLA may drop a cast to bf16 and back.
    after = jax.lax.reduce_precision(wide + update.astype(jnp.float32), kind.nexp, kind.nmant)
    lost = jnp.sum((moves & (after == wide)).astype(jnp.float32), axis=dims)
    return {
        "gradient": norm(gradient),
        "weight": norm(weight),
        "update": norm(update),
        "lost": lost / jnp.maximum(jnp.sum(moves.astype(jnp.float32), axis=dims), 1.0),
    }


class Probe:
    """The gradient probes of one session.

    A probe computes the next step once more and keeps figures only, so that a run with probes is bit for bit the run
    without.

    Args:
        setup: The job on this machine.
        ledger: Ledger for their time.
        event: Called when the program is compiled, and when probes end early.
        every: Steps between probes; 0 for none; ``None`` as often as :data:`SHARE` of the time allows.
    """

    def __init__(self, setup: Setup, ledger: Ledger, event: Event, every: int | None) -> None:
        self.setup, self.ledger, self._event = setup, ledger, event
        self.every = max(setup.job.steps // LOOKS, 1) if every is None else every
        self._asked = every is not None
        self._program = CompiledStep("diagnose", jit_diagnose(setup.steps), ledger, event)
        self._began = ledger.clock()
        self._spent = 0.0
        self._dearest = 0.0
        """Seconds of the slowest probe so far without its compile."""

    def prepare(self) -> None:
        """Starts to compile if there will be probes."""
        if self._asked and self.every:
            steps = self.setup.steps
            self._program.prepare(steps.abstract_state, steps.abstract_batch())

    def due(self, step: int) -> bool:
        """Whether to probe this step, decided before it is made and the same in every process."""
        if not self.every or step % self.every:
            return False
        # The first process's clock decides, so that all processes probe or none does.
        return self._asked or distributed.any_of(distributed.is_first() and self._affordable())

    def measure(self, step: int, state: Any, batch: dict[str, jax.Array]) -> dict[str, Any] | None:
        """Record of the step that would be made on ``batch``; ``None`` for a batch of another shape or where the program fails."""
        wanted = self.setup.steps.abstract_batch()
        if {k: v.shape for k, v in batch.items()} != {k: v.shape for k, v in wanted.items()}:
            return None
        start, compiled = self.ledger.clock(), self.ledger.spent(Spent.compile)
        try:
            with self.ledger.spend(Spent.diagnose):
                figures = jax.device_get(self._program(state, batch))
        except jax.errors.JaxRuntimeError as error:
            # Where the train step only just fits, the probe may not.
            self.every = 0
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._event("diagnose", 0.0, f"no further gradient probe: {reason}")
            return None
        seconds = self.ledger.clock() - start
        self._spent += seconds
        own = seconds - (self.ledger.spent(Spent.compile) - compiled)
        self._dearest = max(self._dearest, own)
        return record(self.setup, step, figures) | {"seconds": own}

    def _affordable(self) -> bool:
        # The compile may take longer than that of the train step, which may have come from a cache.
        cost = self._dearest or max(2 * self.ledger.spent(Spent.compile), LEAST_SECONDS)
        return self._spent + cost <= SHARE * (self.ledger.clock() - self._began)


def record(setup: Setup, step: int, probed: Any) -> dict[str, Any]:
    """Record of :func:`systolic.training.diagnosis.diagnose` as plain values.

    ``parameters`` maps a path to ``shape``, ``dtype`` and the figures, each a number or a list by layer.
    """
    steps = setup.steps
    shapes = steps.network.params
    return {
        "step": step,
        **{name: _round(probed[name]) for name in probed if name != "parameters"},
        "batch": steps.batch_size,
        "parts": num_parts(steps),
        "parameters": {
            path: {"shape": list(shapes[path].shape), "dtype": str(shapes[path].dtype)}
            | {name: _round(value) for name, value in figures.items()}
            for path, figures in probed["parameters"].items()
        },
    }


def too_large(setup: Setup) -> str:
    """Reason that :func:`examine` should not run on this machine; "" where it can.

    A probe holds the state, gradients and updates: in float32 about six times the weights.
    """
    need = 6 * 4 * setup.steps.network.num_parameters
    if setup.machine.platform != "cpu":
        return ""
    have = psutil.virtual_memory().available
    if need > have / 2:
        return f"a gradient probe needs about {gibibytes(need)} besides activations, {gibibytes(have)} available"
    seconds = PROBES_AFTERWARDS * setup.steps.step_flops / CPU_FLOPS_PER_SECOND
    if seconds > MOST_SECONDS:
        return f"a gradient probe would take about {duration(seconds)} on this CPU"
    return ""


def examine(setup: Setup, run: Run, probes: int = PROBES_AFTERWARDS) -> Iterator[dict[str, Any]]:
    """Probes the newest intact checkpoint of a run on the batches that come next; changes nothing.

    Raises:
        NotFoundError: the run has no checkpoint.
        RunError: all of them are damaged.
    """
    with CheckpointStore(run.checkpoints, access=Access.read) as store:
        if store.latest_step() is None:
            raise NotFoundError(f"{run.path} has no checkpoint to probe; train with --diagnose 50")
        restored = store.restore(setup.steps.saved(setup.steps.abstract_state))
    state = setup.whole(restored.state)
    program = jit_diagnose(setup.steps)
    feed = training(setup.job, setup.steps, 0)
    try:
        feed.set_states([extra["data"] for extra in restored.extras])
        for _ in range(probes):
            figures = jax.device_get(program(state, next(feed)))
            yield record(setup, restored.step + 1, figures)
    finally:
        feed.close()


def _round(value: Any) -> Any:
    if value.ndim:
        return [_round(each) for each in value]
    return float(f"{float(value):.{DIGITS}g}")


def replay(setup: Setup, run: Run, path: Path) -> dict[str, Any]:
    """Loads ``bad/step-N.npz`` and makes one train step on it; the run does not change.

    The weights are those of the newest checkpoint before the step, or the initial ones, so the loss
    is near the run's, and equal where the step came right after the checkpoint.

    Returns:
        step, weights (the step they are of), metrics (of the train step), arrays (name to a
        description) and not_finite (batch arrays and metrics with NaN or infinity).

    Raises:
        DataError: the file is no batch of this job.
    """
    batch = _load(setup, path)
    number = path.stem.rpartition("-")[2]
    step = int(number) if number.isdigit() else setup.job.steps
    with CheckpointStore(run.checkpoints, access=Access.read) as store:
        before = [saved for saved in store.steps() if saved < step]
        if before:
            wanted = setup.steps.saved(setup.steps.abstract_state)
            restored = store.restore(wanted, step=before[-1])
            weights, state = restored.step, setup.whole(restored.state)
        else:
            weights, state = 0, setup.first_state()
    placed = {
        name: jax.device_put(array, setup.steps.batch_shardings[name])
        for name, array in batch.items()
    }
    _, outputs = setup.jitted_train(state, placed)
    metrics = {name: float(value) for name, value in jax.device_get(outputs).items()}
    broken = [f"batch {name}" for name, array in batch.items() if not np.isfinite(array).all()]
    broken += [name for name, value in metrics.items() if not np.isfinite(value)]
    return {
        "step": step,
        "weights": weights,
        "metrics": metrics,
        "arrays": {name: _text(array) for name, array in batch.items()},
        "not_finite": broken,
    }


def _load(setup: Setup, path: Path) -> dict[str, np.ndarray]:
    wanted = setup.steps.abstract_batch()
    try:
        with np.load(path) as file:
            batch = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a batch that systolic train kept: {error}") from error
    shapes = {name: array.shape for name, array in batch.items()}
    if shapes != {name: array.shape for name, array in wanted.items()}:
        raise DataError(f"{path} is not a batch of {setup.job.name}; give one of its own run")
    return batch


def _text(array: np.ndarray) -> str:
    shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    finite = array[np.isfinite(array)]
    missing = array.size - finite.size
    spread = f"{finite.min():g} to {finite.max():g}" if finite.size else "no number"
    return f"{shape} {spread}" + (f", {missing} not finite" if missing else "")
