"""A model as a folder that transformers opens: config.json, safetensors, tokenizer; one tensor in memory at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from systolic.artifact.tensors import TensorSpec
from systolic.core.errors import OptionError
from systolic.interop.source import Source, TransformersSource
from systolic.job import Model
from systolic.models.decoder.config import Decoder
from systolic.models.families import HOMES, Config, Family, UnsaidError
from systolic.models.mapping import Conversion

CONSTANTS = ("rope_theta", "rope_scaling", "norm_eps", "experts_per_token")
"""Fields that change what a model computes and that a resumed training may change."""
UNKNOWN = 1000
"""Differences from a family that refuses a model before all are counted."""
SHOWN = 3
"""Fields in a refusal."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A model on its way into a folder of transformers."""

    config: Config
    specs: list[TensorSpec]
    pieces: Callable[[str], Iterator[np.ndarray]]
    """The tensor of a name; called in the order of ``specs``."""


class LazyWeights(Mapping[str, Any]):
    """Weights of a source by path, whole ones mapped when they are asked for."""

    def __init__(self, source: Source) -> None:
        self._source, self._paths = source, tuple(source.dtypes())

    def __getitem__(self, path: str) -> np.ndarray:
        (whole,) = self._source.pieces(path)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def outgoing(source: Source) -> Outgoing:
    """A source's model, with the config.json that it came with.

    Raises:
        OptionError: no family of transformers computes what the model does; names the field.
    """
    if isinstance(source, TransformersSource):
        tensors, rules = source.tensors, source.conversion.rules
        names = [n for rule in rules for place in rule.places() for n in rule.names(place)]
        specs = [TensorSpec(name=n, shape=tensors[n].shape, dtype=tensors[n].dtype) for n in names]
        return Outgoing(
            config=source.config, specs=specs, pieces=lambda name: iter([tensors[name].read()])
        )
    return outgoing_model(source.model, LazyWeights(source), source.config)


def outgoing_model(model: Model, weights: Mapping[str, Any], origin: Config) -> Outgoing:
    """A model with its weights by path.

    Args:
        model: The model.
        weights: Parameters and other variables: arrays.
        origin: The config.json that the model came with; {} for one that was made here.

    Raises:
        OptionError: no family of transformers computes what the model does; names the field.
    """
    config = origin if origin and not _differences(model, origin) else _said(model)
    conversion = _family(config).conversion(config)
    stream = conversion.tensors(weights)

    def pieces(name: str) -> Iterator[np.ndarray]:
        found, array = next(stream)
        assert found == name, (found, name)
        yield array

    return Outgoing(config=config, specs=_specs(conversion, weights), pieces=pieces)


def config_of(model: Model) -> Config:
    """The config.json of the family of transformers that computes what a model does; {} where none does."""
    try:
        return _said(model)
    except OptionError:
        return {}


def _specs(conversion: Conversion, weights: Mapping[str, Any]) -> list[TensorSpec]:
    """Names, shapes and dtypes of all tensors; all places of a stack have those of the first."""
    made = []
    for rule in conversion.rules:
        places = list(rule.places())
        first = rule.write([np.asarray(weights[path][places[0]]) for path in rule.ours])
        for place in places:
            made += [
                TensorSpec(name=name, shape=array.shape, dtype=array.dtype)
                for name, array in zip(rule.names(place), first, strict=True)
            ]
    return made


def _family(config: Config) -> Family:
    kind = config["model_type"]
    return import_module(HOMES[kind]).FAMILIES[kind]


def _said(model: Model) -> dict[str, Any]:
    """The config.json of the family that computes what a model does.

    Raises:
        OptionError: none does; names the fields of the nearest.
    """
    nearest: tuple[tuple[int, bool], str] | None = None
    for kind in sorted(HOMES):
        known = import_module(HOMES[kind]).FAMILIES[kind]
        try:
            config = known.config(model)
            away = _differences(model, config)
            size = len(away), False
        except (AssertionError, AttributeError):
            continue  # a family of another type of model
        except UnsaidError as error:
            config, away = {}, list(error.fields)
            size = len(away), not error.whole
        except OptionError as error:
            # How much else differs is not known, so that it comes after those that say all.
            config, away, size = {}, [str(error)], (UNKNOWN, True)
        if not away:
            return config
        if nearest is None or size < nearest[0]:
            nearest = size, f"{'; '.join(away[:SHOWN])} (nearest is {kind})"
    raise OptionError(
        f"no family of transformers computes this {type(model).__name__}: {nearest[1] if nearest else 'none has its type'}; keep it as a Bundle, or train with options that a family has"
    )


def _differences(model: Model, config: Config) -> list[str]:
    """Fields in which a model is not the one of a config.json, as text."""
    said = _family(config).model(config)
    if type(said) is not type(model):
        return [f"it is a {type(model).__name__}"]
    named = model.lasting() | set(CONSTANTS) if model.lasting() else set(_facts(model))
    mine, theirs = _facts(model), _facts(said)
    return [
        f"model.{name.replace('_', '-')} is {mine[name]}, not {theirs[name]}"
        for name in mine
        if name in named and mine[name] != theirs[name]
    ]


def _facts(model: Model) -> dict[str, Any]:
    """Fields as plain values, with those that stand for another resolved."""
    found: dict[str, Any] = msgspec.to_builtins(model, enc_hook=str)
    if isinstance(model, Decoder):
        found["embedding_scale"] = model.embedding_factor
    return found
