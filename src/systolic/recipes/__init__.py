"""Recipes: typed functions that return a Job. Their signatures are the command line options.

A recipe is named by a module of this package (``bytes``), by a file and a function
(``path/to/file.py:job``), or by a model (``llama-3.1-70b``, a config.json, a folder with one): then it is ``lm`` with that model.
"""

import importlib.util
import inspect
import pkgutil
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from systolic.core.arguments import argument, arguments
from systolic.core.errors import NotFoundError, OptionError, RunError, nearest
from systolic.core.files import nearest_file
from systolic.core.option_words import nearest_option, path_text
from systolic.core.ranges import check_arguments, dashed
from systolic.job import Job, Layout
from systolic.job.layout import RENAMED
from systolic.models.families import near_published
from systolic.runs import recipe_folder
from systolic.runs.recipe_folder import OpenedFiles, Unwritten, is_beside, modules

_folders: list[str] = []
"""Folders of loaded recipes, at the end of ``sys.path``."""
_SUFFIX = re.compile(r"\.(?!py$)[a-z][a-z0-9]+", re.IGNORECASE)
"""Suffix of a file, which the version in a model's name (``Qwen2.5-0.5B``) is not; Python's are refused where they are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A function that returns a job, and where it came from."""

    target: str
    """The recipe's name as the user typed it."""
    function: Callable[..., Job]
    file: Path | None = None
    """The user's file; ``None`` for a shipped recipe."""
    source: bytes = b""
    """Content of the file when it was imported."""
    modules: Mapping[str, bytes] = field(default_factory=dict)
    """Modules that it imports from its folder: relative POSIX path to content."""
    reads: OpenedFiles | None = None
    """Other files of its folder that a user's recipe opens."""

    of_job: bool = False
    """Whether it stands for a Job, which no command can name."""

    @property
    def summary(self) -> str:
        """First line of its docstring."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    @property
    def layout(self) -> Layout | None:
        """Default of its option ``layout``; None where it has no such option."""
        known = inspect.signature(self.function).parameters.get("layout")
        return known.default if known is not None and isinstance(known.default, Layout) else None

    def __call__(self, options: Mapping[str, Any]) -> Job:
        """The job with these arguments.

        Raises:
            OptionError: an argument is out of range, or the function did not return a job.
        """
        check_arguments(self.function, options, lambda name: f"--{dashed(name)}")
        layout = options.get("layout", self.layout)
        if self.layout is not None and not isinstance(layout, Layout):
            raise OptionError(
                f"layout is {layout!r}; it takes a systolic.job.Layout, such as Layout(fsdp=-1)"
            )
        job = self.function(**options)
        if not isinstance(job, Job):
            raise OptionError(
                f"{self.target} returned {type(job).__name__}, not a Job; end the function with 'return Job(...)'"
            )
        return job


def shipped() -> list[str]:
    """Names of the recipes: the modules of this package, not its subpackages."""
    return sorted(each.name for each in pkgutil.iter_modules(__path__) if not each.ispkg)


def is_named(target: str) -> bool:
    """Whether a target names a shipped recipe or a model, and no file of Python."""
    return target in shipped() or import_module(f"{__name__}.models").is_model(target)


def refuse_missing_file(target: str) -> None:
    """Refuses a path that ends as a file's does, where nothing is there and no recipe or model has that name.

    Raises:
        NotFoundError: so; names the nearest file.
    """
    path = Path(target)
    if _SUFFIX.fullmatch(path.suffix) and not path.exists() and not is_named(target):
        raise NotFoundError(
            f"there is no file {target}{nearest_file(path)}; check the path, or give a recipe or a model that systolic recipes lists"
        )


def find(target: str) -> Recipe:
    """The recipe of a name, of ``file.py:function``, or of a model.

    Raises:
        NotFoundError: no such recipe, model, file or function; names the nearest.
        OptionError: the file does not import, or the model is not one that ours follow.
    """
    if target in shipped():
        module = import_module(f"{__name__}.{target}")
        return Recipe(target=target, function=vars(module)[target])
    path, name = split(target)
    if not path.endswith(".py"):
        models = import_module(f"{__name__}.models")
        if models.is_model(target):
            return Recipe(target=target, function=models.recipe_of_model(target))
        refuse_missing_file(target)
        raise NotFoundError(
            f"there is no recipe or model {target!r}{near_published(target, shipped())}; systolic recipes lists them, and your own is given as path/to/file.py:function"
        )
    return from_file(Path(path), name, target)


def notes(target: str, *, trains: bool) -> list[str]:
    """Warnings about a target that :func:`find` takes: of a model, fields that are not read and weights that are not.

    Args:
        target: What the user named.
        trains: Whether it is trained now.
    """
    if target in shipped() or split(target)[0].endswith(".py"):
        return []
    lines = import_module(f"{__name__}.models").notes(target)
    if trains:
        lines.append(
            f"{target} is trained from random weights, and none of its files are read; fine-tune a model with systolic train sft --from DIR"
        )
    return lines


def split(target: str) -> tuple[str, str]:
    """File and function of ``file.py:function``; the function is ``job`` where none is named."""
    path, colon, name = target.rpartition(":")
    return (path, name) if colon else (target, "job")


def from_file(path: Path, name: str, target: str, beside: Path | None = None) -> Recipe:
    """The function ``name`` of a Python file; modules beside the file can be imported by it.

    Args:
        path: The file.
        name: Name of the function.
        target: The name as the user typed it.
        beside: Folder to use in place of the file's, with its modules and the files that it reads;
            given for a run's copy.

    Raises:
        NotFoundError: no such file or function.
        OptionError: it does not import.
    """
    if not path.is_file():
        raise NotFoundError(
            f"{path} is not a file; give the path of a Python file as path/to/file.py:function"
        )
    module_name = f"systolic_recipe_{path.stem}"
    loader = Unwritten(module_name, str(path))
    spec = importlib.util.spec_from_loader(module_name, loader)
    if spec is None or path.suffix != ".py":
        raise NotFoundError(f"{path} cannot be imported as Python; give a file that ends in .py")
    folder = path.resolve().parent if beside is None else beside.resolve()
    _forget(folder)
    module = importlib.util.module_from_spec(spec)
    reads = OpenedFiles(folder) if beside is None else None
    if beside is not None:
        # Files that the recipe finds relative to itself are in the run, too.
        module.__file__ = str(folder / Path(split(target)[0]).name)
    source = path.read_bytes()
    sys.modules[module_name] = module
    before = set(sys.modules)
    _import(loader, module, path, folder)
    _travel(module, set(sys.modules) - before, folder)
    functions = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module_name
    }
    if name not in functions:
        raise NotFoundError(
            f"{path} has no function {name}{nearest(name, functions)}; a recipe is a function that returns a Job"
        )
    needed = modules(path) if beside is None else {}
    return Recipe(
        target=target,
        function=functions[name],
        file=path,
        source=source,
        modules=needed,
        reads=reads,
    )


def _import(loader: Any, module: ModuleType, path: Path, folder: Path) -> None:
    """Executes a recipe's module with its folder first on ``sys.path``, then moves it last, for imports inside functions."""
    from systolic.runs.job_record import MovedModules

    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
    sys.path.insert(0, str(folder))
    recipe_folder.write_none(folder)
    try:
        loader.exec_module(module)
    except Exception as error:
        where = _line(error, path)
        raise OptionError(
            f"{path}{where} failed to import: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(folder))
    # The newest recipe's folder comes before earlier ones, and all come after installed packages.
    if str(folder) in _folders:
        _folders.remove(str(folder))
        sys.path.remove(str(folder))
    sys.path.insert(len(sys.path) - len(_folders), str(folder))
    _folders.append(str(folder))


def _forget(folder: Path) -> None:
    """Drops modules of earlier recipes that share a name with one in ``folder``."""
    tops = {path.stem for path in folder.glob("*") if path.suffix == ".py" or path.is_dir()}
    others = [Path(other) for other in _folders if other != str(folder)]
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        if any(is_beside(name, other) for other in others):
            del sys.modules[name]


def _travel(module: ModuleType, imported: set[str], folder: Path) -> None:
    """Pickles the module's classes and functions by value, since a compile process can't import the file by name."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    for name in imported:
        if is_beside(name, folder):
            cloudpickle.register_pickle_by_value(sys.modules[name])


def _line(error: BaseException, path: Path) -> str:
    trace, line = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a recipe as JSON values."""
    return msgspec.to_builtins(
        dict(options),
        enc_hook=lambda value: path_text(value) if isinstance(value, Path) else str(value),
    )


class _NewFields(dict[str, Any]):
    """Fields of a record with their new values, which are told from a value that is a dict."""


def expanded(
    recipe: Recipe, options: Mapping[str, Any], base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments from Python in which ``"model.layers": 12`` is a field of an argument, as on the command line; ``"model": {"layers": 12}`` is the same.

    Args:
        recipe: The recipe.
        options: By parameter, or as an option is typed, without the dashes before it.
        base: Arguments of which fields are changed; by default the recipe's.

    Raises:
        OptionError: the recipe has no such option.
    """
    parameters = inspect.signature(recipe.function).parameters
    started = {
        **{name: parameter.default for name, parameter in parameters.items()},
        **(base or {}),
    }
    options = _flat(options, started)
    by_parameter = {name: value for name, value in options.items() if name in parameters}
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if name in parameters:
            continue
        first, *inner = option_parts(recipe, name)
        if not inner:
            by_parameter[first] = value
            continue
        place = changes.setdefault(first, _NewFields())
        for part in inner[:-1]:
            place = place.setdefault(part, _NewFields())
        place[inner[-1]] = value
    before = {**started, **by_parameter}
    return by_parameter | {
        name: _changed(before[name], fields, dashed(name)) for name, fields in changes.items()
    }


def _flat(options: Mapping[str, Any], started: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the entries of a dict for a record as fields of it."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        record = started.get(name)
        if isinstance(value, Mapping) and is_dataclass(record):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def option_parts(recipe: Recipe, name: str) -> list[str]:
    """Parameter of a recipe and fields below it that an option names, with or without the dashes before it.

    Raises:
        OptionError: the recipe has no such option.
    """
    parameters = inspect.signature(recipe.function).parameters
    known = [f"--{each}" for each in _option_names(recipe.function)]
    typed = f"--{dashed(name.removeprefix('--'))}"
    if typed not in known:
        near = nearest_option(typed, known)
        if name.startswith("--"):
            raise OptionError(f"{recipe.target} has no option {name}{near}")
        near = near.replace("--", "")
        raise OptionError(
            f"{recipe.target} has no option {name!r}{near}; its options are {', '.join(parameters)}, and their fields, such as 'layout.fsdp'"
        )
    first, *inner = typed[2:].replace("-", "_").split(".")
    return [first if first in parameters else f"{first}_", *inner]


def _changed(record: Any, changes: Mapping[str, Any], option: str) -> Any:
    """A record with other values of fields, all changed at once, since one may need another."""
    if not is_dataclass(record) or isinstance(record, type):
        raise OptionError(
            f"{option}.{next(iter(changes))} is a field of {record!r}; give all of {option}, or leave the field out"
        )
    hints = typing.get_type_hints(type(record), include_extras=True)
    values = {
        name: _changed(getattr(record, name), value, f"{option}.{dashed(name)}")
        if isinstance(value, _NewFields)
        else argument(f"{option}.{dashed(name)}", value, hints[name], getattr(record, name))
        for name, value in changes.items()
    }
    return replace(record, **values)


def _option_names(function: Callable[..., Any], prefix: str = "") -> list[str]:
    """Options of a function and of the records that it takes, as they are typed, without the dashes before them."""
    options = []
    hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, parameter.annotation)
        typed = f"{prefix}{dashed(name)}"
        options.append(typed)
        if isinstance(hint, type) and is_dataclass(hint):
            options += _option_names(hint, f"{typed}.")
    return options


def converted(recipe: Recipe, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments from Python, with text as a path or a choice where the recipe takes one.

    Raises:
        OptionError: a number, text or None where the recipe takes another type.
    """
    return arguments(recipe.function, options)


def typed(recipe: Recipe, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments saved by :func:`plain`, as the types of the recipe's signature.

    Raises:
        RunError: the recipe has changed and no longer takes them.
    """
    hints = typing.get_type_hints(recipe.function)
    unknown = set(options) - set(hints)
    if unknown:
        raise RunError(
            f"the recipe {recipe.target} no longer takes {', '.join(sorted(unknown))}; use the version of Systolic that trained this run"
        )
    saved = dict(options)
    if isinstance(saved.get("layout"), dict):
        saved["layout"] = {RENAMED.get(key, key): v for key, v in saved["layout"].items()}
    try:
        return {
            name: msgspec.convert(value, hints[name], dec_hook=lambda kind, value: kind(value))
            for name, value in saved.items()
        }
    except msgspec.ValidationError as error:
        raise RunError(
            f"the recipe {recipe.target} no longer takes its saved options ({error}); use the version of Systolic that trained this run"
        ) from error
