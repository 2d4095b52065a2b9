"""``systolic serve``: models opened from runs and files, behind a web server."""

import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from systolic.core.errors import (
    NotFoundError,
    OptionError,
    RunError,
    SystolicError,
)
from systolic.data.text.text_data import TextData
from systolic.inference.model import (
    PreparedModel,
    is_model,
    keep_programs,
    prepare_model,
    set_up_here,
)
from systolic.job import Job, Model, Precision
from systolic.recipes.jobs.run import check_folder
from systolic.serving.batch.buckets import BatchOptions
from systolic.serving.http.keys import HttpLimits
from systolic.serving.registry import check_name
from systolic.serving.text.converting import restored_on_cpu
from systolic.serving.text.opening import EngineSizes
from systolic.steps.serving_layout import ServingLayout

if TYPE_CHECKING:
    from systolic.compiling.program_store import EntryCheck, ProgramStore
    from systolic.serving.http.keys import Keys
    from systolic.serving.http.metrics import BatchMeter, BatchMetrics, TextMetrics
    from systolic.serving.http.process import Address
    from systolic.serving.http.state import ServerState
    from systolic.serving.http.telemetry import EventLog
    from systolic.serving.registry import Key, ModelLoad, ReloadPlan, Served
    from systolic.serving.text.engine import Engine
    from systolic.serving.text.replicas import ReplicaPlacement
    from systolic.serving.workload import ModelTraffic, TrafficBook
    from systolic.setup import Setup
    from systolic.steps.step_functions import StepFunctions

SHOWN = 3
"""Models inside a folder that a message names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeTarget:
    """A model to serve."""

    name: str
    """Name of the model in requests."""
    path: Path
    version: int = 1


def targets(words: Sequence[str]) -> list[ServeTarget]:
    """The models of a command line, each ``DIR`` or ``NAME=DIR``.

    A folder with folders of numbers that is no model itself holds versions of a model, as TensorFlow Serving has them.

    Raises:
        NotFoundError: there is no such folder.
        OptionError: a name is given twice, or has signs that a path of the server can't have.
    """
    models: list[ServeTarget] = []
    for word in words:
        head, mark, rest = word.partition("=")
        path = Path(rest) if mark else Path(word)
        if not path.exists():
            raise NotFoundError(
                f"{path} does not exist; give a run, a Bundle or a Hugging Face folder"
            )
        name = head if mark else path.resolve().name
        check_name(name, f"write NAME={shlex.quote(str(path))}")
        if any(target.name == name for target in models):
            raise OptionError(
                f"two models are called {name}; write NAME={shlex.quote(str(path))} with another name"
            )
        models += [
            ServeTarget(name=name, path=at, version=number) for number, at in _versions(path)
        ]
    return models


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSettings:
    """Adapters of a model, and room for others."""

    targets: Sequence[ServeTarget] = ()
    """Adapters of the start."""
    room: int = 0
    """Places, beside every matrix; 0: as many as there are targets, beside their matrices."""
    rank: int = 0
    """Columns of each; 0 takes the largest rank, and 16 at least beside every matrix."""
    base: str = ""
    """Name of the model that they belong to."""

    @property
    def count(self) -> int:
        """Places in all."""
        return self.room or len(self.targets)


def adapter_settings(
    words: str | Sequence[str], models: Sequence[ServeTarget], room: int = 0, rank: int = 0
) -> AdapterSettings:
    """Adapters of a command line, each ``NAME=DIR``.

    Raises: as :func:`targets`, and
        OptionError: a word has no name, the first model has several versions, there are more adapters than there is room for, a rank of
            none is given, or a name is that of a model.
    """
    words = [words] if isinstance(words, str) else words
    for word in words:
        name, mark, path = word.partition("=")
        if not mark:
            raise OptionError(f"--adapter is {word!r}; give NAME=DIR, such as support={word}")
        if not Path(path).exists():
            raise NotFoundError(
                f"--adapter {name} is {path}, which does not exist; give a run of train sft --adapter lora, or a PEFT folder"
            )
    adapters = targets(words)
    names = {model.name for model in models}
    base = models[0].name
    if (adapters or room) and sum(model.name == base for model in models) > 1:
        raise OptionError(
            f"{'--adapter belongs' if adapters else '--adapters belong'} to the first model, and {base} has several versions; give the folder of one"
        )
    if room and len(adapters) > room:
        raise OptionError(
            f"--adapters is {room} and {len(adapters)} are given by --adapter; give {len(adapters)} or more"
        )
    if rank and not (adapters or room):
        raise OptionError("--adapter-rank has no effect without --adapter or --adapters; add one")
    for name in (adapter.name for adapter in adapters):
        if name in names:
            raise OptionError(
                f"--adapter {name} has the name of a model; write it with another name"
            )
    return AdapterSettings(targets=adapters, room=room, rank=rank, base=base)


def checked_targets(words: Sequence[str]) -> list[ServeTarget]:
    """Models of a command line; errors as :func:`targets` and :func:`check_model`."""
    models = targets(words)
    for target in models:
        check_model(target.path)
    return models


def check_model(path: Path) -> None:
    """Refuses a folder or file that is no model, before anything else is done with it.

    Raises:
        NotFoundError: it is none; names the models inside it.
    """
    if is_model(path):
        return
    check_folder(path)
    inside = sorted(path.iterdir()) if path.is_dir() else []
    models = [str(child) for child in inside if child.is_dir() and is_model(child)]
    more = f", ... ({len(models)} in all)" if len(models) > SHOWN else ""
    near = f"; it holds models, give {', '.join(models[:SHOWN])}{more}" if models else ""
    raise NotFoundError(
        f"{path} is no run, Bundle, Hugging Face folder or GGUF file{near or '; check the path'}"
    )


def _versions(path: Path) -> list[tuple[int, Path]]:
    inside = sorted(path.iterdir()) if path.is_dir() else []
    versions = [
        folder
        for folder in inside
        if folder.name.isascii() and folder.name.isdigit() and folder.is_dir()
    ]
    # A version that is being copied, or a file of the system's, is no reason to see a model in the folder itself.
    if not versions or (len(versions) < len(inside) and is_model(path)):
        return [(1, path)]
    return sorted((int(folder.name), folder) for folder in versions)


def _address() -> "Address":
    from systolic.serving.http.process import Address

    return Address()


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How models are opened and served."""

    address: "Address" = field(default_factory=_address)
    limits: HttpLimits = HttpLimits()  # noqa: RUF009 (frozen)
    sizes: EngineSizes = EngineSizes()  # noqa: RUF009
    batch: BatchOptions = BatchOptions()  # noqa: RUF009
    layout: ServingLayout = ServingLayout()  # noqa: RUF009 (frozen)
    adapters: AdapterSettings = AdapterSettings()
    traffic: "Mapping[str, ModelTraffic]" = field(default_factory=dict)
    """Traffic that the models' programs are chosen for, by name."""
    book: "TrafficBook | None" = None
    """Record of the traffic, which is saved at the end."""
    keys: "Keys | None" = None
    log_prompts: bool = False
    log: Literal["auto", "json", "text"] = "auto"
    """Form of the log; ``auto`` is text where standard error is a terminal, else JSON."""
    model_control: bool = False
    """Whether clients may load and unload models."""
    precision: Precision = Precision.auto
    """Precision of the computation; ``auto`` is the job's own."""
    checkpoint: str = "best"
    trust: bool = False

    @property
    def readable(self) -> bool:
        """Whether the log is written for people."""
        return sys.stderr.isatty() if self.log == "auto" else self.log == "text"


def serve(
    words: Sequence[str],
    settings: ServeSettings,
    listening: Callable[[int], None] | None = None,
) -> bool:
    """Serves models until the process is told to end; ``listening`` is called with the port when the socket is open.

    Models are opened in the order of their weights' sizes.

    Returns:
        False where a model was still being opened: the process must end without its compiler's threads (:func:`os._exit`).

    Raises: as :func:`systolic.serve`.
    """
    from systolic.serving.http.metrics import BatchMetrics, Metrics, TextMetrics
    from systolic.serving.http.process import Process
    from systolic.serving.http.state import ServerState
    from systolic.serving.http.telemetry import ConsoleLog, EventLog
    from systolic.serving.registry import ModelRegistry

    metrics = Metrics()
    texts, batches = TextMetrics(metrics), BatchMetrics(metrics)
    log = ConsoleLog() if settings.readable else EventLog()
    state = ServerState(
        registry=ModelRegistry(),
        limits=settings.limits,
        metrics=metrics,
        log_prompts=settings.log_prompts,
        adapters={adapter.name: adapter.path for adapter in settings.adapters.targets},
    )

    pending = partial(_pending, settings, state, texts, batches, log)
    renewal = partial(_changes, words, state, pending, partial(_contents, settings))
    first = list(map(pending, _smallest_first(checked_targets(words), settings)))
    process = Process(state, first, settings.address, log, settings.keys, renewal, listening)
    if settings.model_control:
        state.control = process
    process.run()
    if settings.book is not None:
        log.write("traffic", path=str(settings.book.path), models=settings.book.save())
    if state.failed is not None:
        raise RunError(state.failed)
    if process.refused is not None:
        raise process.refused
    return not process.opening


def _pending(
    settings: ServeSettings,
    state: "ServerState",
    texts: "TextMetrics",
    batches: "BatchMetrics",
    log: "EventLog",
    target: ServeTarget,
) -> "ModelLoad":
    """A model that is to be opened."""
    from systolic.serving.registry import ModelLoad

    def opened() -> "Served":
        contents = _contents(settings, target)  # before its weights are read, which may be newer
        if target.name != settings.adapters.base:
            plain = replace(
                settings, adapters=AdapterSettings(), sizes=replace(settings.sizes, adapters=0)
            )
            return replace(open_served(target, plain, texts, batches, log), contents=contents)
        adapters = [
            ServeTarget(name=name, path=path)
            for name, path in state.adapters.items()
            if name not in state.unloaded and _is_there(name, path, state, log)
        ]
        own = replace(settings, adapters=replace(settings.adapters, targets=adapters))
        try:
            served = open_served(target, own, texts, batches, log)
        except SystolicError as error:
            if not (adapters and state.opened):
                raise
            log.warn(f"{target.name} is opened without its adapters: {error.line}")
            bare = replace(own, adapters=replace(own.adapters, targets=()))
            served = open_served(target, bare, texts, batches, log)
        return replace(served, contents=contents)

    return ModelLoad(key=(target.name, target.version), open=opened)


def _is_there(name: str, path: Path, state: "ServerState", log: "EventLog") -> bool:
    """Whether an adapter can be opened with its model, which one whose folder has gone does not keep from being opened again."""
    from systolic.serving.text.adapters import adapter_contents

    try:
        adapter_contents(path)
    except SystolicError as error:
        if not state.opened:  # The server begins: the user is told at once.
            raise
        log.warn(f"{name} is left out: {error.line}")
        return False
    return True


def _contents(settings: ServeSettings, target: ServeTarget) -> str:
    from systolic.formats.outline import contents_of

    return contents_of(target.path, settings.checkpoint)


def _smallest_first(
    models: Sequence[ServeTarget], settings: ServeSettings
) -> Sequence[ServeTarget]:
    """By the size of their weights: small models answer while large ones are opened."""
    from systolic.formats.outline import weight_bytes

    return sorted(models, key=lambda target: weight_bytes(target.path, settings.checkpoint))


def _changes(
    words: Sequence[str],
    state: "ServerState",
    pending: "Callable[[ServeTarget], ModelLoad]",
    contents: Callable[[ServeTarget], str],
    name: str | None,
) -> "ReloadPlan":
    """Differences between the folders and the served models: versions to load, to take out, and those that stay; of all models, or those of a name.

    Raises: as :func:`targets`, and
        NotFoundError: no model has that name.
    """
    all_targets = targets(words)
    wanted = [target for target in all_targets if name in (None, target.name)]
    if not wanted and name not in state.adapters:
        known = ", ".join(dict.fromkeys([*(own.name for own in all_targets), *state.adapters]))
        raise NotFoundError(f"the server was not given a model {name}; it has {known}")
    from systolic.serving.registry import ReloadPlan

    # What a client took out stays out until one asks for it.
    out = state.unloaded if name is None else ()
    now = {(target.name, target.version): target for target in wanted if target.name not in out}
    held = {
        served.key: served.contents
        for served in state.registry.everything()
        if name in (None, served.name) and not served.base
    }

    def same(key: "Key", target: ServeTarget) -> bool:
        try:
            return held[key] in ("", contents(target))
        except SystolicError:
            return False  # Opening it says what is wrong with it.

    unchanged = [key for key, target in now.items() if key in held and same(key, target)]
    failed = [
        key for key in state.failures if name in (None, key[0]) and key[0] not in state.adapters
    ]
    added = [pending(target) for key, target in now.items() if key not in unchanged]
    gone = [key for key in dict.fromkeys([*held, *failed]) if key not in now]
    adapters = _adapter_changes(state, [*(load.key for load in added), *gone], out, name)
    return ReloadPlan(
        added=[*added, *adapters.added], gone=gone, unchanged=[*unchanged, *adapters.unchanged]
    )


def _adapter_changes(
    state: "ServerState", reopened: "Sequence[Key]", out: Collection[str], name: str | None
) -> "ReloadPlan":
    """Adapters whose folders hold others than are served, or that are not served, of models that are not opened again with theirs."""
    from systolic.serving.registry import ModelLoad, ReloadPlan, ServedText

    if not state.adapters:
        return ReloadPlan()
    from systolic.serving.text.adapters import adapter_contents, with_adapter

    everything = state.registry.everything()
    held = {served.key: served.contents for served in everything if served.base}

    def same(key: "Key", path: Path) -> bool:
        try:
            return held.get(key) == adapter_contents(path)
        except SystolicError:
            return False  # Opening it says what is wrong with it.

    added: list[ModelLoad] = []
    unchanged: list[Key] = []
    for base in everything:
        if not isinstance(base, ServedText) or base.slots is None or base.key in reopened:
            continue
        for own, path in state.adapters.items():
            key = (own, base.version)
            if own in out or name not in (None, own):
                continue
            if same(key, path):
                unchanged.append(key)
            else:
                added.append(ModelLoad(key=key, open=partial(with_adapter, base, own, path)))
    return ReloadPlan(added=added, unchanged=unchanged)


def open_served(
    target: ServeTarget,
    settings: ServeSettings,
    texts: "TextMetrics",
    batches: "BatchMetrics",
    log: "EventLog",
) -> "Served":
    """A model as a server holds it, not started.

    Raises: as :func:`~systolic.inference.model.prepare_model`, and OptionError for one that can't be served.
    """
    from systolic.serving.http.metrics import layout_writer
    from systolic.serving.registry import ServedText

    log.write("opening", model=target.name, version=target.version, path=str(target.path))
    placement = _placement(target, settings)
    placement.report = layout_writer(target.name, log)
    model = opened(target, settings, placement, 0, log.warn)
    settings = expecting(settings, target.name, model.setup.job)
    if not writes(model.setup.job):
        return _open_batch(target, settings, model, batches.of(target.name, target.version), log)
    from systolic.serving.text.replicas import Replicas

    data = model.setup.job.data
    assert isinstance(data, TextData)
    engines = [_engine(target, settings, model, 0, texts, log)]
    for number in range(1, placement.engines):
        model = opened(target, settings, placement, number, log.warn)
        engines.append(_engine(target, settings, model, number, texts, log))
    served = ServedText(
        name=target.name,
        version=target.version,
        engine=Replicas(engines, settings.sizes.page_size) if len(engines) > 1 else engines[0],
        tokenizer=data.get_tokenizer(),
        template=data.find_template(),
    )
    if not settings.sizes.adapters:
        return served
    from systolic.serving.text.adapters import AdapterSlots, with_adapter

    served = replace(
        served,
        slots=AdapterSlots(
            engine=served.engine,
            engines=engines,
            base=target.path,
            model=model.setup.job.model,
            checkpoint=settings.checkpoint,
            trust=settings.trust,
            warn=log.warn,
            grace_seconds=settings.address.grace_seconds,
        ),
    )
    adapters = [
        with_adapter(served, adapter.name, adapter.path) for adapter in settings.adapters.targets
    ]
    return replace(served, adapters=adapters)


def opened(
    target: ServeTarget,
    settings: ServeSettings,
    placement: "ReplicaPlacement",
    number: int,
    warn: Callable[[str], None],
) -> PreparedModel:
    """The model on the devices of one of its engines, its weights not read."""

    def place(job: Job, platform: str, devices: Sequence[Any]) -> Any:
        return placement.place(job, platform, devices, number)

    model = prepare_model(
        target.path,
        settings.checkpoint,
        precision=settings.precision,
        trust=settings.trust,
        warn=warn,
        place=place,
    )

    def again(job: Job) -> "Setup":
        return set_up_here(job, place=place)

    model = restored_on_cpu(model, again, warn)
    if not settings.sizes.adapters:
        return model
    if not writes(model.setup.job):
        raise OptionError(f"{target.name} writes no text, and takes no --adapter; leave it out")
    from systolic.serving.text.adapters import with_room

    return with_room(model, again(placement.adapted(model.setup.job)))


def _placement(target: ServeTarget, settings: ServeSettings) -> "ReplicaPlacement":
    """Devices of a model's engines, with its adapters."""
    from systolic.serving.text.replicas import ReplicaPlacement

    placement = ReplicaPlacement(layout=settings.layout, sizes=settings.sizes)
    if not settings.sizes.adapters:
        return placement
    from systolic.serving.text.adapters import AdapterRoom, Matrices, read_matrices, with_adapters

    own = settings.adapters
    room = AdapterRoom(settings.sizes.adapters, own.rank, own.room > 0)

    @cache
    def matrices(model: Model) -> list[Matrices]:
        return [
            read_matrices(adapter.path, target.path, model, trust=settings.trust)
            for adapter in own.targets
        ]

    placement.adapted = lambda job: with_adapters(job, matrices(job.model), room, target.name)
    return placement


def _engine(
    target: ServeTarget,
    settings: ServeSettings,
    model: PreparedModel,
    number: int,
    texts: "TextMetrics",
    log: "EventLog",
) -> "Engine":
    """One of the engines of a model."""
    from systolic.serving.http.metrics import TextLoadMetrics
    from systolic.serving.text.opening import engine_of, plan_engine
    from systolic.serving.workload import RecordedEngine

    meter, store = texts.of(target.name, target.version, number), _store(model, log)

    def arrays() -> dict[str, Any]:
        begin = time.perf_counter()
        weights = model.read()
        meter.placed(time.perf_counter() - begin)
        return {**weights.params, **weights.model_state}

    plan = plan_engine(model.setup.steps, settings.sizes, store)
    if number == 0:
        log.write("context", model=target.name, context=plan.context, origin=plan.origin)
        if plan.beyond is not None:
            log.warn(f"{target.name}: {plan.beyond}")
        if plan.widened is not None:
            log.warn(f"{target.name}: {plan.widened}")
    book, opening = settings.book, TextLoadMetrics(target.name, meter, log, number)
    watcher = (
        meter if book is None else RecordedEngine(inner=meter, recorder=book.text(target.name))
    )
    engine = engine_of(plan, arrays, watcher, opening)
    store.tidy()
    return engine


def _store(model: PreparedModel, log: "EventLog") -> "ProgramStore":
    """Store of compiled programs; where none can be kept, JAX keeps them."""
    from systolic.compiling.program_store import ProgramStore

    store = ProgramStore(model.setup.steps, log.warn)
    if not store.used:
        keep_programs()
    return store


def _open_batch(
    target: ServeTarget,
    settings: ServeSettings,
    model: PreparedModel,
    meter: "BatchMeter",
    log: "EventLog",
) -> "Served":
    from systolic.serving.batch.model import batch_model
    from systolic.serving.http.metrics import BatchLoadMetrics
    from systolic.serving.registry import ServedBatch

    begin, store = time.perf_counter(), _store(model, log)
    weights = model.read()
    meter.read(time.perf_counter() - begin)
    watcher, steps = BatchLoadMetrics(target.name, meter, log), model.setup.steps
    batches = batch_model(
        target.name,
        steps,
        weights.params,
        weights.model_state,
        settings.batch,
        watcher,
        store,
        None if settings.book is None else settings.book.batch(target.name),
    )
    watcher.sized(batches.buckets)
    store.tidy()
    return ServedBatch(name=target.name, version=target.version, model=batches)


def expecting(settings: ServeSettings, name: str, job: Job) -> ServeSettings:
    """Settings for the traffic of a model, where some is known.

    Raises:
        OptionError: it is that of another kind of model.
    """
    expected = settings.traffic.get(name)
    if expected is None:
        return settings
    if writes(job):
        return replace(settings, sizes=replace(settings.sizes, traffic=expected.text))
    shapes = replace(settings.batch.shapes, traffic=expected.batch)
    return replace(settings, batch=replace(settings.batch, shapes=shapes))


def writes(job: Job) -> bool:
    """Whether a job's model continues texts."""
    from systolic.models.decoder.config import Decoder

    return isinstance(job.data, TextData) and isinstance(job.model, Decoder)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPrograms:
    """Programs of a model that a server would look for."""

    name: str
    version: int
    folder: Path
    """Folder of all entries."""
    programs: "Sequence[EntryCheck]"
    notes: Sequence[str] = ()
    """Why nothing is kept, where that is so."""

    @property
    def hits(self) -> int:
        """Programs that are on the disk."""
        return sum(program.hit for program in self.programs)

    def lines(self) -> list[str]:
        """For a terminal."""
        count = f"{self.hits} of {len(self.programs)} programs are in {self.folder}"
        return [
            f"{self.name}: {count}",
            *self.notes,
            *(f"  {program.line}" for program in self.programs),
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "version": self.version,
            "folder": str(self.folder),
            "hits": self.hits,
            "programs": [program.to_json() for program in self.programs],
            "notes": list(self.notes),
        }


def kept_programs(words: Sequence[str], settings: ServeSettings) -> list[KeptPrograms]:
    """Looks up the programs that a server of these models would find on the disk; reads no weights and compiles nothing.

    Raises: as :func:`systolic.serving.server.serve` for a model that can't be opened.
    """
    return [_checked(target, settings) for target in targets(words)]


def _checked(target: ServeTarget, settings: ServeSettings) -> KeptPrograms:
    from systolic.compiling.program_store import ProgramStore

    steps, notes = _steps(target, settings), list[str]()
    store = ProgramStore(steps, notes.append)
    settings = expecting(settings, target.name, steps.job)
    if writes(steps.job):
        from systolic.serving.text.opening import plan_engine

        programs = plan_engine(steps, settings.sizes, store).kept()
    else:
        programs = _of_batches(steps, settings.batch, store)
    return KeptPrograms(
        name=target.name,
        version=target.version,
        folder=store.root,
        programs=programs,
        notes=notes,
    )


def _steps(target: ServeTarget, settings: ServeSettings) -> "StepFunctions":
    """Programs of the first of a model's engines."""
    return opened(target, settings, _placement(target, settings), 0, lambda _: None).setup.steps


def _of_batches(
    steps: "StepFunctions", options: BatchOptions, store: "ProgramStore"
) -> "list[EntryCheck]":
    from systolic.inference.predictor import Predictor
    from systolic.serving.batch.model import buckets_of, intake_of

    state = steps.abstract_state
    params, rest = state.params, state.model_state
    intake = intake_of(steps, params, rest, options.limits, store)
    run = Predictor(intake.form, params, rest, store)
    specs = {spec.name: spec for spec in map(run.spec, buckets_of(intake, options).all)}
    return [store.check(spec) for spec in specs.values()]
