"""Models from elsewhere as recipes: published ones by name, and those of a config.json, a Hugging Face folder or a Bundle.

Such a recipe is ``lm`` with other defaults: the model's sizes, rows as long as it takes up to :data:`ROW`
tokens, one row per device and full rematerialisation. Its weights are random; no file of weights is read.
"""

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as with_fields
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from systolic.core.errors import DataError, OptionError
from systolic.formats.program.model import ExportedProgram
from systolic.job import Job, Layout, Model, Remat
from systolic.models.decoder.config import Decoder
from systolic.models.families import (
    CONFIG,
    Config,
    family,
    find_published,
    notes_of,
    published,
    read_config,
)
from systolic.recipes.lm import BATCH, lm

ROW = 4096
"""Tokens of a row, or fewer where the model takes fewer."""
BUNDLE = "bundle.json"
"""File of a Bundle that describes its model."""
POSITIONS = ("max_position_embeddings", "n_positions")
"""Fields of a config.json with the tokens that a model takes at once."""


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model from elsewhere."""

    name: str
    """Name of its jobs."""
    origin: str
    """Origin of its sizes, for its description."""
    model: Model
    row: int
    """Tokens of a row by default."""


def names() -> list[str]:
    """Names of the published models."""
    return list(published())


def is_model(target: str) -> bool:
    """Whether a target names a published model, or a file or folder that describes one."""
    return find_published(target) is not None or _file(Path(target)) is not None


def recipe_of_model(target: str) -> Callable[..., Job]:
    """The function of a model's recipe.

    Args:
        target: For which :func:`is_model` holds.

    Raises:
        OptionError: the model is of a class that has no recipe, or has a field that ours does not follow.
        DataError: the file is damaged.
    """
    if (folder := _program(target)) is not None:
        from systolic.recipes.models.other import recipe_of_program  # imports NumPy

        return recipe_of_program(folder)
    named = _named(target)
    if not isinstance(named.model, Decoder):
        from systolic.recipes.models.other import recipe_of_other  # imports NumPy

        function = recipe_of_other(named.model, named.name)
        options = (function.__doc__ or "").partition(".")[2]
        function.__doc__ = f"{named.origin}, {type(named.model).__name__}: random weights.{options}"
        return function
    model = named.model
    defaults: dict[str, Any] = {
        "model": model,
        "sequence": named.row,
        "layout": Layout(remat=Remat.full),
    }

    @functools.wraps(lm)
    def job(**options: Any) -> Job:
        arguments: dict[str, Any] = {**defaults, **options}
        if arguments.get("batch") is None and arguments.get("batch_per_device") is None:
            arguments["batch_per_device"] = 1
        return with_fields(lm(**arguments), name=named.name)

    signature = inspect.signature(lm)
    job.__signature__ = signature.replace(  # ty: ignore[missing-attribute]
        parameters=[
            p.replace(default=defaults.get(name, p.default), kind=inspect.Parameter.KEYWORD_ONLY)
            for name, p in signature.parameters.items()
        ]
    )
    count = f"{model.num_parameters:,} parameters"
    about = f"{named.origin}, {count}: rows of {named.row} tokens, bf16 compute on TPUs, weights and optimizer state of training in f32."
    options = (lm.__doc__ or "").partition(".")[2]
    job.__doc__ = about + options.replace(f"by default {BATCH.per_device}", "by default 1")
    return job


def notes(target: str) -> list[str]:
    """Warnings about the config.json of a target for which :func:`is_model` holds: fields that are not read.

    Raises: as :func:`recipe_of_model`.
    """
    file = None if find_published(target) is not None else _file(Path(target))
    if file is None or file.name == BUNDLE:
        return []
    config = read_config(file)
    lines = list(notes_of(config, str(file)))
    if (packed := config.get("quantization_config")) is not None:
        kind = packed.get("quant_method") if isinstance(packed, dict) else packed
        lines.append(
            f"{file} says that the weights are in {kind}; sizes and times here are of plain ones"
        )
    return lines


def _program(target: str) -> Path | None:
    """Folder of a Bundle that holds a program of another framework."""
    file = None if find_published(target) is not None else _file(Path(target))
    if file is None or file.name != BUNDLE:
        return None
    model = read_config(file).get("model")
    held = isinstance(model, dict) and model.get("type") == ExportedProgram.__name__
    return file.parent if held else None


def _named(target: str) -> NamedModel:
    known = find_published(target)
    if known is not None:
        return NamedModel(
            name=known.name,
            origin=f"The published {known.hub}",
            model=known.model(),
            row=_row(known.config),
        )
    path = Path(target)
    file = _file(path)
    assert file is not None
    folder = file.parent if file.name in (CONFIG, BUNDLE) else file
    name = folder.absolute().name.removesuffix(".json")
    config = read_config(file)
    if file.name == BUNDLE:
        origin = file.parent / "source" / CONFIG
        known_config = read_config(origin) if origin.is_file() else {}
        return NamedModel(
            name=name,
            origin=f"The model of {target}",
            model=_of_bundle(config, file),
            row=_row(known_config),
        )
    return NamedModel(
        name=name,
        origin=f"The model of {target}",
        model=family(config, str(file)).model(config),
        row=_row(config),
    )


def _file(path: Path) -> Path | None:
    """The file that describes a model: a config.json, a Bundle's or that of a folder; ``None`` if there is none."""
    if path.is_dir():
        return next((path / name for name in (BUNDLE, CONFIG) if (path / name).is_file()), None)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        fields = json.loads(path.read_bytes())
    except ValueError:
        return None
    return path if isinstance(fields, dict) and "model_type" in fields else None


def _row(config: Config) -> int:
    positions = [config[name] for name in POSITIONS if config.get(name)]
    return min([ROW, *positions])


def _of_bundle(fields: Config, file: Path) -> Model:
    """The model of a bundle.json."""
    from systolic.runs.bundle.folder import MODELS  # imports NumPy

    record = dict(fields.get("model") or {})
    kind = record.pop("type", None)
    if not isinstance(kind, str):
        raise DataError(f"{file} was not written by systolic import; import the model again")
    if kind not in MODELS:
        raise OptionError(
            f"{file} has a model of the class {kind}, and only {', '.join(MODELS)} are forecast by their configuration; forecast a recipe with such a model"
        )
    try:
        return msgspec.convert(record, vars(import_module(MODELS[kind]))[kind])
    except msgspec.ValidationError as error:
        raise DataError(f"{file} is damaged ({error}); import the model again") from error
