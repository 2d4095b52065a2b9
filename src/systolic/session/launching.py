"""Makes a launch of a recipe and its options: description, files and bill."""

import inspect
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic import recipes
from systolic.chips import Slice
from systolic.core.errors import DataError, OptionError
from systolic.core.files import write_atomically
from systolic.core.option_words import option_words
from systolic.core.ranges import dashed
from systolic.launching import CODE, Launch, LaunchBill, Prepared, Purchase, Site, SlurmOptions
from systolic.launching.names import NAME_LENGTH, fitting, is_bucket
from systolic.recipes import Recipe
from systolic.session.docker.lock import lock, python
from systolic.session.docker.wheel import write_wheel

if TYPE_CHECKING:
    from systolic.job import Job
    from systolic.runs.plan_choice import Chosen

LOCAL, SLURM, DOCKER, GKE = "local", "slurm", "docker", "gke"
OURS: Mapping[str, str] = {
    LOCAL: "none: runs on this machine",
    DOCKER: "none: runs on this machine",
    SLURM: "none: the cluster accounts for its hours",
}
"""Text of the bill for each platform that sees this machine's disk."""
ELSEWHERE = (SLURM, DOCKER)
"""Those platforms that run in another folder, so that paths must be absolute."""
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


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Request for a launch; empty fields take the platform's defaults."""

    recipe: Recipe
    options: Mapping[str, Any]
    """Options of the recipe, by parameter."""
    on: Slice
    via: str
    made_by: Sequence[str]
    """Command line, for the headers of the files."""
    typed: frozenset[str] = frozenset()
    """Options of the recipe that were typed, as in ``option_words``."""
    chosen: "Chosen | None" = None
    """Candidate of a plan that sets part of the job."""
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
    name = request.name or _default_name(recipe, on)
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
    there = next(one for one in (Path(run), *Path(run).parents) if one.exists())
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
    found = [
        f"--{dashed(name)} is {value}, a path of this machine; it must exist at the same path on the others"
        for name, value in _local(request)
    ]
    if request.recipe.target in _paths(request):
        found.append(
            f"{request.recipe.target} is a path of this machine; it must exist on the others"
        )
    return found


def check_paths(request: LaunchRequest) -> None:
    """Refuses paths in the command that no other machine can have: those relative to this folder.

    Raises:
        OptionError: an option, or the recipe, is one.
    """
    if request.via in OURS:
        return
    words = [(word.partition("=")[0], word.partition("=")[2] or word) for word in request.train]
    named = [(f"--{dashed(name)}", str(value)) for name, value in _local(request)]
    named += [("--train", word) for _, word in words if "/" in word and Path(word).exists()]
    target = request.recipe.target
    named += [("the recipe", target)] if target in _paths(request) else []
    for option, path in named:
        if not Path(path).is_absolute():
            raise OptionError(
                f"{option} is {path}, a path relative to this folder, which the machines of {request.via} do not have; {_elsewhere(request, path)}"
            )


def _elsewhere(request: LaunchRequest, path: str) -> str:
    """Where the machines of a platform can have a path."""
    name = Path(path).name
    if request.via == GKE:
        volume = f"on the volume of --claim, as /runs/{name}" if request.site.claim else ""
        where = volume or f"in the image, or on a volume of --claim, as /runs/{name}"
    elif request.via == "skypilot":
        where = "in the bucket or the image of its task"
    else:
        where = "on their disks, by a startup script of yours"
    return f"put it {where}, and give that absolute path, which must hold the same here: the options are checked with it"


def _local(request: LaunchRequest) -> list[tuple[str, Path]]:
    """Options of the recipe with paths that exist here; of several paths each."""
    found: list[tuple[str, Path]] = []
    for name, value in request.options.items():
        several = value if isinstance(value, tuple | list) else (value,)
        found += [(name, one) for one in several if isinstance(one, Path) and one.exists()]
    return found


def _paths(request: LaunchRequest) -> list[str]:
    """Paths of this machine in the command: those in options, and the target if it is a path but not a recipe's file."""
    found = [str(one) for _, one in _local(request)]
    target = request.recipe.target
    return [*found, *([target] if request.recipe.file is None and Path(target).exists() else [])]


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
    source, times = "", dict[str, float | None]()
    if chosen is not None and chosen.forecast:
        source, times = chosen.path, dict(chosen.forecast)
    elif step_seconds is not None:
        source, times = "a quick forecast", {"step_seconds": step_seconds}

    def total(name: str) -> float | None:
        one = times.get(name)
        return None if one is None else one * steps

    return LaunchBill(
        purchase=purchase,
        usd_per_hour=None if purchase is Purchase.reserved else price,
        as_of=as_of,
        region=region,
        zone=zone,
        source=source,
        seconds=total("step_seconds"),
        seconds_low=total("step_seconds_low"),
        seconds_high=total("step_seconds_high"),
    )


def quick_step_seconds(job: "Job", on: Slice, say: Callable[[str], None]) -> float:
    """Step time in seconds from a quick forecast.

    Raises:
        DataError: the step does not fit, or the forecast has no time.
    """
    from systolic.chips.flags import resolved
    from systolic.compiling import Compiler
    from systolic.forecasting.run import forecast_job

    compiler = Compiler(flags=resolved("", on.chip)).quick()
    made = forecast_job(job, on, compiler=compiler, say=say)
    if not made.fits:
        raise DataError(
            f"{job.name} does not fit on {on.name}; systolic explain with the same options shows how to make it fit"
        )
    if made.step_seconds is None:
        raise DataError(f"the forecast of {job.name} on {on.name} has no time; leave out --quick")
    return made.step_seconds


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
        texts[REQUIREMENTS] = head + pins + "".join(f"{one}\n" for one in packages.loose)
        texts |= {f"{CODE}/{path}": text for path, text in launch.code.items()}
        texts[f"{CODE}/README"] = "The recipe of the launch, if it is a file.\n"
    for name, text in texts.items():
        write_atomically(folder / name, text)
    found = [folder / name for name in texts]
    if prepared.ships:
        shutil.rmtree(folder / WHEELS, ignore_errors=True)
        (folder / WHEELS).mkdir()
        found.append(write_wheel(folder / WHEELS))
    return found


def _words(request: LaunchRequest) -> list[str]:
    """Arguments for the recipe's options, with the settings of the plan."""
    function, chosen = request.recipe.function, request.chosen
    options = dict(request.options)
    if request.via in ELSEWHERE:
        options |= {n: v.absolute() for n, v in options.items() if isinstance(v, Path)}
    if chosen is None:
        return option_words(function, options, typed=request.typed)
    settings = dict(chosen.settings)
    if chosen.steps and "steps" in inspect.signature(function).parameters:
        options["steps"] = chosen.steps
    words = option_words(function, options, settings, request.typed)
    return [*words, *([f"--flags={' '.join(chosen.flags)}"] if chosen.flags else [])]


def _code(recipe: Recipe) -> dict[str, str]:
    assert recipe.file is not None
    found = {}
    for name, content in {recipe.file.name: recipe.source, **recipe.modules}.items():
        try:
            found[name] = content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}, imported by {recipe.target}, is not text; put it into the image"
            ) from error
    return found


def _counted(on: Slice) -> str:
    """Slice name with its number of devices, for the launch's name: ``1xcpu`` for ``cpu``; others already have it."""
    return f"1x{on.name}" if on.platform != "tpu" and on.num_devices == 1 else on.name


def _default_name(recipe: Recipe, on: Slice) -> str:
    """A launch's name where none is given: the recipe, its function where that is not ``job``, and the slice in full."""
    return default_name(_stem(recipe), on)


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


def _version() -> str:
    from systolic import __version__

    return __version__
