"""Set-up of a job on the local devices: its programs, after every check and before any compile, and the weights that it begins with."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic.chips.flags import compile_options, name_of, shared_set
from systolic.compiling.executable import Loaded, flags_of, load
from systolic.compiling.tracing import described
from systolic.core.errors import DataError, NotFoundError, OptionError, nearest
from systolic.job import Job, Layout, Read, Split, Target
from systolic.job.data import MASK
from systolic.job.model import check_terms
from systolic.runs.job_record import JobRecord
from systolic.runs.weights import Weights
from systolic.steps.machine import LocalDevices
from systolic.steps.paged import paged_target
from systolic.steps.programs import compiled, evaluation_rows, jit_evaluate, jit_train, never
from systolic.steps.state import TrainState
from systolic.steps.step_functions import StepFunctions, wide_copy
from systolic.steps.target import MeshTarget, slices_of

COMPARED = 8
"""Most examples on which a model of another framework is compared with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Forecast of a train step; times in seconds."""

    slice: str
    step_seconds: float
    low: float | None = None
    high: float | None = None
    mfu: float | None = None

    def beside(self, measured: float) -> dict[str, float]:
        """Fields of a train record: the forecast, and the ratio of the measured step to it."""
        return {
            "forecast_step_seconds": self.step_seconds,
            "forecast_ratio": measured / self.step_seconds,
        }

    def against(self, measured: float | None) -> dict[str, Any]:
        """Fields of the summary; ``measured`` is None for a session without steps."""
        low, high = self.low, self.high
        within = None
        if measured is not None and low is not None and high is not None:
            within = low <= measured <= high
        return {
            "slice": self.slice,
            "step_seconds": self.step_seconds,
            "step_seconds_low": low,
            "step_seconds_high": high,
            "mfu": self.mfu,
            "measured_step_seconds": measured,
            "ratio": None if measured is None else measured / self.step_seconds,
            "within_interval": within,
        }


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Job settled for the local devices."""

    job: Job
    machine: LocalDevices
    steps: StepFunctions
    expected: Expected | None = None
    """Forecast of the train step on these devices."""
    initial: Weights | None = None
    """Initial weights, in place of random ones."""
    intended_layout: Layout | None = None
    """Layout on all devices that the job is meant for; None where they are here."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags of its programs, besides those from the environment."""
        return self.steps.target.flags

    @property
    def unit(self) -> str:
        """Unit of throughput: ``tokens`` or ``examples``."""
        return "tokens" if "tokens" in self.job.data.fields() else "examples"

    @property
    def units_per_step(self) -> int:
        """Tokens or examples in a step's batch, padding included."""
        fields = self.job.data.fields()
        return self.steps.batch_size * (fields["tokens"].shape[0] if "tokens" in fields else 1)

    @cached_property
    def jitted_train(self) -> Any:
        """The train step: (state, batch) -> (state, metrics)."""
        return jit_train(self.steps)

    @cached_property
    def jitted_evaluate(self) -> Any:
        """The eval step: (params, model_state, batch) -> sums; one object, so that it is traced once."""
        return jit_evaluate(self.steps)

    @property
    def abstract_evaluation(self) -> tuple[Any, Any, Any]:
        """The eval step's arguments as ShapeDtypeStructs."""
        state = self.steps.abstract_state
        batch = self.steps.abstract_batch(evaluation_rows(self.job, self.steps))
        return state.evaluated, state.model_state, batch

    def check_metric(self) -> None:
        """Checks that the task reports the metric of best checkpoints and early stopping, and the names of what it reports.

        Raises:
            OptionError: it does not, a name is reserved, or none is the loss.
        """
        wanted = self.job.evaluation.metric
        reported = sorted(self.jitted_evaluate.eval_shape(*self.abstract_evaluation))
        check_terms(self.job.task, reported)
        if wanted not in reported:
            raise OptionError(
                f"evaluation.metric is {wanted!r}, which {self.job.name} does not report{nearest(wanted, reported)}; choose one of {', '.join(reported)}"
            )

    def check_model(self) -> tuple[str, ...]:
        """Compares the model with the framework that it comes from, on the first examples of the data; warnings.

        Raises:
            OptionError: it does not train as there.
        """
        data = self.job.data

        def examples() -> dict[str, np.ndarray]:
            count = min(COMPARED, self.steps.batch_size)
            batches = data.open(Read(split=Split.train, batch=count, seed=self.job.seed, epochs=1))
            try:
                first = next(batches)
            finally:
                batches.close()
            kept = first[MASK] > 0
            return {name: array[kept] for name, array in first.items() if name != MASK}

        return self.job.model.check_training(examples)

    def load(self, path: Path) -> Loaded:
        """Train step saved by ``systolic forecast --save``, instead of a compile.

        Raises:
            NotFoundError: the file does not exist.
            RunError: it is damaged or of another program, machine, version or flags; names the first.
        """
        steps = self.steps
        lowered = self.jitted_train.lower(steps.abstract_state, steps.abstract_batch())
        precision = self.job.precision.resolve(self.machine.platform)
        job = replace(self.job, precision=precision)
        facts = {"name": job.name, "verb": "train", **described(job, steps)}
        assert steps.target.mesh is not None
        devices = list(steps.target.mesh.devices.flat)
        return load(path, lowered, devices, facts, self.flags)

    def first_state(self, stop: Callable[[], bool] = never) -> Any:
        """The state before the first step; given initial weights are moved into it.

        ``None`` where ``stop`` returned True during the compile.
        """
        initial = self.initial
        variables = {} if initial is None else {**initial.params, **initial.model_state}
        state = first_state(self.steps, self.job.seed, stop, frozenset(variables))
        if state is None or initial is None:
            return state
        params = {path: initial.params.get(path, p) for path, p in state.params.items()}
        rest = {path: initial.model_state.get(path, p) for path, p in state.model_state.items()}
        # A copy, since the step donates its arguments and an array can be donated only once.
        ema = wide_copy(params) if self.job.optimizer.ema else None
        return replace(state, params=params, model_state=rest, ema=ema)

    def whole(self, state: TrainState) -> TrainState:
        """A state of a checkpoint with what it leaves out: the job's rates and frozen weights."""
        state = self.steps.with_rates(state)
        if not self.steps.network.frozen:
            return state
        initial = self.initial
        assert initial is not None  # sessions open what a job with adapters begins with
        frozen = {path: initial.model_state[path] for path in self.steps.network.frozen}
        return replace(state, model_state={**state.model_state, **frozen})

    def mfu(self, step_seconds: float) -> float | None:
        """Model FLOPs utilisation against the published bf16 peak; ``None`` without one."""
        peak = self.machine.peak_bf16_flops_per_second
        return self.steps.step_flops / (step_seconds * peak) if peak else None


def set_up(
    job: Job,
    machine: LocalDevices | None = None,
    flags: Sequence[str] | None = None,
    *,
    reads: bool = True,
    serves: bool = False,
) -> Setup:
    """Fits the layout to the devices and checks batch, model and data against it.

    Args:
        job: What to train.
        machine: The devices; by default those of this process.
        flags: All compiler flags, as options of each program; None takes the set that jobs on these
            devices share. Flags in the environment keep their values.
        reads: Whether it is trained, so that its data must exist; using a trained model needs none.
        serves: Whether an engine serves it, under sharding rules of its own by which the caller has checked the layout.

    Raises:
        LayoutError: an axis does not divide the devices, the batch or the model.
        DataError: the training split is empty.
        OptionError: the compiler does not know a flag, or the model has no matmuls in the precision's format.
    """
    machine = machine or LocalDevices.here()
    shared = shared_set(machine.chip, machine.platform, convolutional=job.model.is_convolutional)
    flags = shared if flags is None else flags
    named = {name_of(flag) for flag in flags_of(os.environ, machine.platform)}
    own = tuple(flag for flag in flags if name_of(flag) not in named)
    check_flags(own, machine.platform)
    num_slices = slices_of(machine.devices)
    job = replace(job, layout=job.layout.on(len(machine.devices), num_slices))
    if not serves:
        job.model.check(job.layout)
    job.batch.resolve(job.layout)
    precision = job.precision.resolve(machine.platform)
    if reads:
        job.schedule.check_steps(job.steps)
        job.check_precision(precision)
    if reads and job.data.size(Split.train) == 0:
        raise DataError(f"the training split of {job.name} is empty; give the recipe other data")
    target = MeshTarget.of(job, machine.platform, machine.devices, own)
    target = paged_target(target) if serves else target
    return Setup(job=job, machine=machine, steps=StepFunctions(job, target, trains=not serves))


def computed_in(target: Target) -> str:
    """Compute dtypes of a target as text: ``bfloat16, fp8 operands (emulated on a CPU)``."""
    if target.weight_format is not None:
        return f"{target.dtype}, matrices rounded to {target.weight_format.value}"
    if target.matmul_format is None:
        return target.dtype
    emulated = " (emulated on a CPU)" if target.platform == "cpu" else ""
    return f"{target.dtype}, {target.matmul_format} operands{emulated}"


def check_flags(flags: Sequence[str], platform: str) -> None:
    """Checks that this process's compiler takes these flags, by compiling an empty program with them.

    Raises:
        OptionError: the compiler does not know one, or refuses its value.
    """
    if not flags:
        return
    empty = jax.jit(lambda: 0, compiler_options=compile_options(flags, platform))
    try:
        empty.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        reason = (str(error).splitlines() or [""])[0].removeprefix("INVALID_ARGUMENT: ")
        raise OptionError(
            f"the compiler refuses the flags {' '.join(flags)} ({reason}); leave that one out, or give --flags=none for XLA's defaults"
        ) from error


def first_state(
    steps: StepFunctions,
    seed: int,
    stop: Callable[[], bool] = never,
    initial: Collection[str] = (),
) -> Any:
    """The state before the first step, created sharded; ``None`` where ``stop`` returned True during the compile.

    Weights and variables at the paths ``initial`` are not made: None is in their place.
    """

    def without(state: TrainState) -> TrainState:
        state = replace(state, rates=None)
        if not initial:
            return state
        params: Any = {p: None if p in initial else a for p, a in state.params.items()}
        rest: Any = {p: None if p in initial else a for p, a in state.model_state.items()}
        return replace(state, params=params, model_state=rest, ema=None)

    def init(key: jax.Array) -> Any:
        return without(steps.init(key))

    program = jax.jit(init, out_shardings=without(steps.shardings))
    # It runs once, and on a CPU LLVM's optimisation takes longer than it saves.
    quick: dict[str, str | bool] | None = None
    if steps.target.platform == "cpu":
        quick = {"xla_backend_optimization_level": "1"}
    key = jax.random.key(seed)
    create = compiled(program.lower(key), quick, stop)
    return None if create is None else jax.block_until_ready(steps.with_rates(create(key)))


def with_start(
    setup: Setup, run: Path | None = None, record: JobRecord | None = None
) -> tuple[Setup, Mapping[str, str | None] | None]:
    """Adds the weights of the job's start to a set-up, and returns their origin; unchanged without a start.

    Args:
        setup: The job on this machine.
        run: A run that was started before.
        record: The run's job.json; its start must be the same.

    Raises:
        NotFoundError: the weights of the start no longer exist.
        RunError: the weights of the start have changed.
    """
    start = setup.job.start
    if start is None:
        return setup, None
    from systolic.formats.weights import starting_weights

    try:
        weights, origin = starting_weights(start, setup.steps)
    except NotFoundError as error:
        if run is None or record is None or record.start is None:
            raise
        raise NotFoundError(
            f"{run} has no copy of the frozen weights of its base model, and {record.start['path']} no longer exists; restore the model there"
        ) from error
    if run is not None and record is not None and record.start is not None:
        origin.require(record.start, run)
    return replace(setup, initial=weights), asdict(origin)


def with_frozen(weights: Weights, setup: Setup, run: Path, record: JobRecord) -> Weights:
    """Adds the frozen weights to those of a checkpoint, which omits them; unchanged if nothing is frozen.

    Raises: as :func:`with_start`.
    """
    if not setup.steps.network.frozen:
        return weights
    begun, _ = with_start(setup, run, record)
    assert begun.initial is not None
    whole = {**weights.model_state, **begun.initial.model_state}
    return replace(weights, model_state=whole)
