"""Makes a launch of a recipe and its options, or of a model server: description, files and bill."""

import inspect
import os
import reprlib
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic import recipes
from systolic.chips import Slice, slice
from systolic.core.distribution import lock, python, write_wheel
from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import write_atomically
from systolic.core.option_words import is_in_bucket, option_words, path_text
from systolic.core.ranges import dashed
from systolic.core.reporter import reporter, working
from systolic.launching.gke_serve import GkeServer
from systolic.launching.launch import (
    CODE,
    Launch,
    LaunchBill,
    Prepared,
    Purchase,
    Site,
    SlurmOptions,
)
from systolic.launching.names import NAME_LENGTH, fitting, is_bucket, refuse_secrets
from systolic.recipes import Recipe
from systolic.recipes.jobs import JobSource, arguments_of, kept_choice, planned_options
from systolic.runs.plan_choice import Chosen, StepTime, read

if TYPE_CHECKING:
    from systolic.job import Job
    from systolic.planning.plan import Plan

LOCAL, SLURM, DOCKER, GKE = "local", "slurm", "docker", "gke"
OURS: Mapping[str, str] = {
    LOCAL: "none: runs on this machine",
    DOCKER: "none: runs on this machine",
    SLURM: "none: the cluster accounts for its hours",
}
"""Text of the bill for each platform that sees this machine's disk."""
ELSEWHERE = (SLURM, DOCKER)
"""Platforms of these that run in another folder, so that paths must be absolute."""
WHEELS, REQUIREMENTS = "wheels", "requirements.txt"
SPOT_RESTARTS, RESTARTS = 100, 10
COUNTS_PREEMPTIONS = ("tpu-vm", "gke")
"""Platforms where restarts after preemptions count: on gke those that take process 0, without which JAX aborts the others.
Elsewhere a higher limit would only repeat failures."""
EXTRAS: Mapping[str, Sequence[str]] = {
    "tpu": ("tpu", "text", "image", "audio"),
    "gpu": ("cuda", "text", "image", "audio"),
    "cpu": ("text", "image", "audio"),
}
"""Extras of this package to install, by platform of the slice."""
FIELDS = ("via", "name", "image", "restarts", "min_slices", "rejoin_seconds", "processes", "keep")
"""Options of :func:`systolic.launch` that are fields of a request as they are."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Request for a launch; empty fields take the platform's defaults."""

    source: JobSource
    """The recipe with its options, whose paths are as they were given, and a plan's candidate."""
    on: Slice
    via: str
    made_by: Sequence[str]
    """Command line, for the headers of the files."""
    train: Sequence[str] = ()
    """More arguments of ``systolic train``."""
    name: str = ""
    run: str = ""
    image: str = ""
    purchase: Purchase = Purchase.on_demand
    site: Site = field(default_factory=Site)
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    restarts: int | None = None
    min_slices: int | None = None
    rejoin_seconds: int | None = None
    processes: int | None = None
    keep: bool = False

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.source.recipe

    @property
    def chosen(self) -> Chosen | None:
        """Candidate of a plan that sets part of the job."""
        return self.source.chosen


def plan_path(plan: "Plan | Path | str | None") -> Path | None:
    """File of a plan, which the command of a launch names.

    Raises:
        OptionError: the plan is in no file.
    """
    if plan is None or isinstance(plan, Path | str):
        return None if plan is None else Path(plan)
    from systolic.planning.plan import Plan

    if not isinstance(plan, Plan):
        raise OptionError(
            f"plan is {reprlib.repr(plan)}; it takes what systolic.plan returned, or the path of a plan.json"
        )
    if plan.saved is None:
        raise OptionError(
            "the plan is in no file, which the launch's command would name; give systolic.plan out='plan.json'"
        )
    return plan.saved


def source_of(
    job: JobSource | str, options: Mapping[str, Any], plan: Path | None, candidate: int
) -> JobSource:
    """A recipe with its options; under a plan, with those that were planned where they are not given.

    Raises:
        NotFoundError: there is no such recipe.
        OptionError: an option is missing, unknown, out of its range or contradicts the plan.
    """
    if isinstance(job, JobSource):
        return job
    recipe = recipes.find(job)
    if plan is None:
        source = _source(recipe, options, options)
        source.job.check_effects()
        return source
    chosen = read(plan, candidate)
    planned = planned_options(recipe, chosen)
    source = _source(recipe, {**planned, **options}, options)
    kept = kept_choice(
        chosen,
        recipe(planned),
        source.job,
        steps_given="steps" in options,
        warn=reporter().warn,
    )
    return replace(source, chosen=kept)


def _source(recipe: Recipe, options: Mapping[str, Any], typed: Mapping[str, Any]) -> JobSource:
    return JobSource(
        recipe=recipe, options=arguments_of(recipe, options), given=frozenset(map(dashed, typed))
    )


def request_of(
    source: JobSource, options: Mapping[str, Any], made_by: Sequence[str]
) -> LaunchRequest:
    """Request of :func:`systolic.launch`.

    Args:
        source: The recipe.
        options: Options of the function, by name.
        made_by: Command line.

    Raises:
        OptionError: neither a slice nor a plan is given, or text does not parse as words.
        NotFoundError: the slice does not exist.
    """
    on = options["on"] or ("" if source.chosen is None else source.chosen.slice)
    if not on:
        raise OptionError(
            "systolic launch needs a slice; add --on v5e-16 (systolic chips lists slices)"
        )
    return LaunchRequest(
        source=source,
        on=slice(on) if isinstance(on, str) else on,
        made_by=made_by,
        train=words_of("train", options["train"]),
        run=path_text(options["run"]),
        purchase=_purchase(options),
        site=Site(**{each.name: options[each.name] for each in fields(Site)}),
        slurm=SlurmOptions(
            time=options["time"],
            gpus_per_node=options["gpus_per_node"],
            setup=options["setup"],
            options=tuple(words_of("sbatch", options["sbatch"])),
            programs=str(Path(sys.executable).parent),
        ),
        **{name: options[name] for name in FIELDS},
    )


def _purchase(options: Mapping[str, Any]) -> Purchase:
    """How the chips are paid for.

    Raises:
        OptionError: both spot and reserved are given.
    """
    reserved = options["reserved"] or bool(options["reservation"])
    if options["spot"] and reserved:
        raise OptionError("--spot and --reserved exclude each other; leave one of them out")
    if reserved:
        return Purchase.reserved
    return Purchase.spot if options["spot"] else Purchase.on_demand


def words_of(option: str, value: str | Sequence[str]) -> list[str]:
    """Words of an option; text is split as a shell does.

    Raises:
        OptionError: a quote is not closed.
    """
    if not isinstance(value, str):
        return list(value)
    try:
        return shlex.split(value)
    except ValueError as error:
        raise OptionError(f"--{option} is {value!r}, which is not valid shell: {error}") from error


def describe(request: LaunchRequest) -> Launch:
    """Describes the launch of a request.

    Raises:
        OptionError: the plan is for another slice, or the run's folder is a file.
        DataError: a module that the recipe imports is not text.
    """
    chosen, on, recipe = request.chosen, request.on, request.recipe
    if chosen is not None and chosen.slice != on.name:
        raise OptionError(
            f"{chosen.path} has a candidate for {chosen.slice}, but --on is {on.name}; give --on {chosen.slice}, or another --candidate"
        )
    here = request.via in OURS
    target, code = recipe.target, {}
    if recipe.file is not None and request.via != LOCAL:
        target = f"{recipe.file.name}:{recipes.split(recipe.target)[1]}"
        code = _code(recipe)
    paths = _paths(request)
    if request.via in ELSEWHERE and target in paths:
        target = os.path.abspath(target)
    name = request.name or default_name(_stem(recipe), on)
    run = request.run or f"runs/{name}"
    if here and not is_bucket(run):
        run = os.path.abspath(run)
        _check_folder(run)
    return Launch(
        name=name,
        on=on,
        target=target,
        options=(*_words(request), *request.train),
        made_by=tuple(request.made_by),
        run=run,
        purchase=request.purchase,
        image=request.image,
        site=request.site,
        slurm=request.slurm,
        restarts=_restarts(request),
        min_slices=request.min_slices,
        rejoin_seconds=request.rejoin_seconds,
        processes=request.processes,
        keep=request.keep,
        version=_version(),
        code=code,
        directory=os.getcwd() if request.via == LOCAL else "",
        user=f"{os.getuid()}:{os.getgid()}",
        paths=tuple(os.path.abspath(path) for path in paths),
    )


def _check_folder(run: str) -> None:
    there = next(path for path in (Path(run), *Path(run).parents) if path.exists())
    if not there.is_dir():
        raise OptionError(f"--run is {run}, but {there} is a file; give a folder: --run DIR")


def _restarts(request: LaunchRequest) -> int:
    if request.restarts is not None:
        return request.restarts
    preempted = request.purchase is Purchase.spot and request.via in COUNTS_PREEMPTIONS
    return SPOT_RESTARTS if preempted else RESTARTS


def notes(request: LaunchRequest) -> list[str]:
    """Notes on paths of this machine in the command, which other machines may not have."""
    if request.via in OURS:
        return []
    warnings = [
        f"--{dashed(name)} is {value}, a path of this machine; it must exist at the same path on the others"
        for name, value in _local(request)
    ]
    if request.recipe.target in _paths(request):
        warnings.append(
            f"{request.recipe.target} is a path of this machine; it must exist on the others"
        )
    return warnings


def check_paths(request: LaunchRequest) -> None:
    """Refuses paths in the command that no machine can have: those that are not here, and elsewhere those relative to this folder.

    Raises:
        OptionError: an option, or the recipe, is relative to this folder.
        NotFoundError: an option is a path that this machine, which trains, does not have.
    """
    if request.via in OURS:
        return _check_ours(request)
    words = [(word.partition("=")[0], word.partition("=")[2] or word) for word in request.train]
    named = [(f"--{dashed(name)}", str(value)) for name, value in _files(request)]
    named += [("--train", word) for _, word in words if "/" in word and Path(word).exists()]
    target = request.recipe.target
    named += [("the recipe", target)] if target in _paths(request) else []
    for option, path in named:
        if not Path(path).is_absolute():
            raise OptionError(
                f"{option} is {path}, a path relative to this folder, which the machines of {request.via} do not have; {_elsewhere(request, path)}"
            )


def _check_ours(request: LaunchRequest) -> None:
    for name, path in _files(request):
        # A cluster's nodes may have disks that the machine which submits has not.
        if not path.exists() and not (request.via == SLURM and path.is_absolute()):
            raise NotFoundError(
                f"--{dashed(name)} is {path}, which does not exist here; give a path that does, or one in a bucket"
            )


def _elsewhere(request: LaunchRequest, path: str) -> str:
    """Places where the machines of a platform can have a path."""
    name = Path(path).name
    if request.via == GKE:
        volume = f"on the volume of --claim, as /runs/{name}" if request.site.claim else ""
        where = volume or f"in the image, or on a volume of --claim, as /runs/{name}"
    elif request.via == "skypilot":
        where = "in the bucket or the image of its task"
    else:
        where = "on their disks, by a startup script of yours"
    return f"put it {where}, and give that absolute path, which must hold the same here: the options are checked with it"


def _files(request: LaunchRequest) -> list[tuple[str, Path]]:
    """Options of the recipe with paths that are not in a bucket; of several paths each."""
    paths: list[tuple[str, Path]] = []
    for name, value in request.source.options.items():
        several = value if isinstance(value, tuple | list) else (value,)
        files = (path for path in several if isinstance(path, Path) and not is_in_bucket(path))
        paths += [(name, path) for path in files]
    return paths


def _local(request: LaunchRequest) -> list[tuple[str, Path]]:
    """Options of the recipe with paths that exist here."""
    return [(name, path) for name, path in _files(request) if path.exists()]


def _paths(request: LaunchRequest) -> list[str]:
    """Paths of this machine in the command: those in options, and the target if it is a path but not a recipe's file."""
    paths = [str(path) for _, path in _local(request)]
    target = request.recipe.target
    return [*paths, *([target] if request.recipe.file is None and Path(target).exists() else [])]


def bill(request: LaunchRequest, steps: int, step_seconds: float | None) -> LaunchBill:
    """Bill before the launch.

    Args:
        request: The request; a plan's forecast gives the time.
        steps: Steps of the job.
        step_seconds: Step time of a forecast made for the launch, without a plan.
    """
    on, chosen, purchase = request.on, request.chosen, request.purchase
    if request.via in OURS:
        return LaunchBill(purchase=purchase, usd_per_hour=None, instead=OURS[request.via])
    spot = purchase is Purchase.spot
    zone = request.site.zone
    price, region, as_of = on.rate("spot" if spot else "on_demand", zone)
    source, step = "", StepTime()
    if chosen is not None and chosen.forecast.step_seconds is not None:
        source, step = chosen.path, chosen.forecast
    elif step_seconds is not None:
        source, step = "a quick forecast", StepTime(step_seconds=step_seconds)

    def total(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * steps

    return LaunchBill(
        purchase=purchase,
        usd_per_hour=None if purchase is Purchase.reserved else price,
        as_of=as_of,
        region=region,
        zone=zone,
        source=source,
        seconds=total(step.step_seconds),
        seconds_low=total(step.step_seconds_low),
        seconds_high=total(step.step_seconds_high),
    )


def quick_step_seconds(job: "Job", on: Slice) -> float:
    """Step time in seconds from a quick forecast.

    Raises:
        DataError: the step does not fit, or the forecast has no time.
    """
    from systolic.chips.flags import resolved
    from systolic.compiling import Compiler
    from systolic.forecasting.run import forecast_job

    compiler = Compiler(flags=resolved("", on.chip)).quick()
    with working("forecasting") as progress:
        step = forecast_job(job, on, compiler=compiler, say=progress.stage)
    if not step.fits:
        raise DataError(
            f"{job.name} does not fit on {on.name}; systolic explain with the same options shows how to make it fit"
        )
    if step.step_seconds is None:
        raise DataError(f"the forecast of {job.name} on {on.name} has no time; leave out --quick")
    return step.step_seconds


def write(launch: Launch, prepared: Prepared, folder: Path) -> list[Path]:
    """Writes the files of a launch, and replaces those of an earlier launch in the folder.

    Raises:
        RunError: the folder is not writable.
    """
    texts = dict(prepared.files)
    if prepared.ships:
        packages = lock(EXTRAS.get(launch.on.platform, ()), ())
        head = f"{launch.header()}# Python {python()}\n"
        pins = "".join(f"{name}=={version}\n" for name, version in packages.pins.items())
        texts[REQUIREMENTS] = (
            head + pins + "".join(f"{requirement}\n" for requirement in packages.loose)
        )
        texts |= {f"{CODE}/{path}": text for path, text in launch.code.items()}
        texts[f"{CODE}/README"] = "The recipe of the launch, if it is a file.\n"
    for name, text in texts.items():
        write_atomically(folder / name, text)
    paths = [folder / name for name in texts]
    if prepared.ships:
        shutil.rmtree(folder / WHEELS, ignore_errors=True)
        (folder / WHEELS).mkdir()
        paths.append(write_wheel(folder / WHEELS))
    return paths


def _words(request: LaunchRequest) -> list[str]:
    """Arguments for the recipe's options, with the settings of the plan."""
    function, chosen = request.recipe.function, request.chosen
    options = dict(request.source.options)
    if request.via in ELSEWHERE:
        options |= {
            name: path.absolute() for name, path in _files(request) if options[name] is path
        }
    if chosen is None:
        return option_words(function, options, typed=request.source.given)
    settings = dict(chosen.settings)
    if chosen.steps and "steps" in inspect.signature(function).parameters:
        options["steps"] = chosen.steps
    words = option_words(function, options, settings, request.source.given)
    return [*words, *([f"--flags={' '.join(chosen.flags)}"] if chosen.flags else [])]


def _code(recipe: Recipe) -> dict[str, str]:
    assert recipe.file is not None
    texts = {}
    for name, content in {recipe.file.name: recipe.source, **recipe.modules}.items():
        try:
            texts[name] = content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}, imported by {recipe.target}, is not text; put it into the image"
            ) from error
    return texts


def _counted(on: Slice) -> str:
    """Slice name with its number of devices, for the launch's name: ``1xcpu`` for ``cpu``; others already have it."""
    return f"1x{on.name}" if on.platform != "tpu" and on.num_devices == 1 else on.name


def default_name(what: str, on: Slice) -> str:
    """A launch's name where none is given, on every platform: what is launched, and the slice in full."""
    counted = _counted(on)
    return fitting(f"{fitting(what, NAME_LENGTH - len(counted) - 1)}-{counted}")


def _stem(recipe: Recipe) -> str:
    if recipe.file is None:
        target = Path(recipe.target)
        # A model's folder has the name that its server has, however the path to it is written.
        return target.resolve().name if target.exists() else recipe.target
    function = recipes.split(recipe.target)[1]
    return recipe.file.stem if function == "job" else f"{recipe.file.stem}-{function}"


def describe_server(
    bundle: str,
    *,
    on: Slice,
    words: Sequence[str],
    made_by: Sequence[str],
    names: tuple[str, str],
    image: str,
    purchase: Purchase,
    site: Site,
) -> Launch:
    """Describes the launch of a server.

    Args:
        bundle: Local folder whose content is in the image, or a folder in a bucket.
        on: Slice of each pod.
        words: More arguments of ``systolic serve``.
        made_by: Command line, for the file's header.
        names: Names of the model and of the launch; empty ones are derived from the Bundle's.
        image: Container image.
        purchase: How the chips are paid for.
        site: Namespace and service account.

    Raises:
        OptionError: the Bundle does not exist, or an argument looks like a secret.
    """
    from systolic.runs.bundle.folder import MANIFEST
    from systolic.serving.docker import name_of

    refuse_secrets((*words, *made_by))
    if not is_bucket(bundle) and not (Path(bundle) / MANIFEST).is_file():
        raise OptionError(
            f"{bundle} is not a Bundle; make one with systolic import or export, or give gs://BUCKET/FOLDER"
        )
    model = names[0] or name_of(Path(bundle.rstrip("/").rpartition("/")[2] or bundle))
    return Launch(
        name=names[1] or default_name(model, on),
        on=on,
        target=model,
        options=tuple(words),
        made_by=tuple(made_by),
        run=bundle if is_bucket(bundle) else "",
        purchase=purchase,
        image=image,
        site=site,
        version=_version(),
    )


def server_bill(launch: Launch, server: GkeServer) -> LaunchBill:
    """Hourly price, for the minimum and the maximum number of pods."""
    spot = launch.purchase is Purchase.spot
    price, region, _ = launch.on.rate("spot" if spot else "on_demand")
    if price is None:
        text = f"no {launch.purchase.value} price in the catalogue"
    else:
        least, most = f"${price * server.replicas:,.2f}", f"${price * server.most:,.2f}"
        text = f"{least} an hour {launch.purchase.value} for {server.replicas} pod{'s' if server.replicas > 1 else ''}"
        if server.most > server.replicas:
            text += f" (minimum) to {most} for {server.most} (maximum)"
        text += f" (prices of {region})"
    return LaunchBill(
        purchase=launch.purchase,
        usd_per_hour=None if price is None else price * server.replicas,
        region=region,
        usd_per_hour_most=None if price is None else price * server.most,
        instead=text,
    )


def _version() -> str:
    from systolic import __version__

    return __version__
