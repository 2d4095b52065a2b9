"""A model as a folder that transformers opens: config.json, safetensors, tokenizer; one tensor in memory at a time."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from systolic.core.errors import OptionError
from systolic.core.units import with_article
from systolic.data.text.text_data import TextData
from systolic.formats.export import Exported, ExportSource, compared, payload_of
from systolic.formats.source import Source, TransformersSource, most_common
from systolic.formats.weights import SourceWeights, weight_progress
from systolic.job import Model
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.mup import StandardWeights, standard
from systolic.models.families import CONFIG, GENERATION, HOMES, Config, Family, UnsaidError
from systolic.models.mapping import Conversion, Tensors
from systolic.runs.bundle.folder import Bundle, check_free, draft
from systolic.runs.bundle.tensors import TensorSpec

DTYPES = ("dtype", "torch_dtype")
"""Names of the weights' dtype in a config.json, of transformers 5 and before."""
CONSTANTS = ("rope_theta", "rope_scaling", "norm_eps", "experts_per_token")
"""Fields that change what a model computes and that a resumed training may change."""
END = "eos_token_id"
"""Field with the ids that end a text, one or several."""
TEXT = ("bos_token_id", END, "pad_token_id", "max_position_embeddings")
"""Fields of a config.json about the text of a model, which no weights tell."""
UNKNOWN = 1000
"""Differences from a family that refuses a model before all are counted."""
SHOWN = 3
"""Fields in a refusal."""
VARIANCE = ".running_var"
"""End of the name of a batch norm's variance."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A model on its way into a folder of transformers."""

    config: Config
    specs: list[TensorSpec]
    pieces: Callable[[str], Iterator[np.ndarray]]
    """The tensor of a name; called in the order of ``specs``."""


class LazyWeights(Mapping[str, Any]):
    """Weights of a Bundle by path, mapped when they are asked for: all layers of a stack are one array."""

    def __init__(self, bundle: Bundle) -> None:
        self._tensors = bundle.tensors
        self._last: dict[str, np.ndarray] = {}
        """The matrix that was asked for last: a quantized one is restored once for all layers of its stack."""

    def __getitem__(self, path: str) -> np.ndarray:
        if path not in self._last:
            self._last = {path: self._tensors[path].read()}
        return self._last[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def outgoing(source: Source) -> Outgoing:
    """A source's model, with the config.json that it came with.

    Raises:
        OptionError: no family of transformers computes what the model does; names the field.
    """
    if isinstance(source, TransformersSource):
        tensors, rules = source.tensors, source.conversion.rules
        names = [n for rule in rules for place in rule.places() for n in rule.names(place)]
        specs = [TensorSpec(name=n, shape=tensors[n].shape, dtype=tensors[n].dtype) for n in names]
        pieces = lambda name: iter([tensors[name].read()])  # noqa: E731
        return _with_batch_counters(
            Outgoing(config=source.config, specs=specs, pieces=pieces), tensors
        )
    from systolic.formats.bundle import BundleSource  # which imports this module

    if not isinstance(source, BundleSource):
        return outgoing_model(source.model, SourceWeights(source), source.config)
    return outgoing_model(source.model, LazyWeights(source.bundle), source.config)


def outgoing_model(model: Model, weights: Mapping[str, Any], origin: Config) -> Outgoing:
    """A model with its weights by path.

    Args:
        model: The model.
        weights: Parameters and other variables: arrays.
        origin: The config.json that the model came with; {} for one that was made here.

    Raises:
        OptionError: no family of transformers computes what the model does; names the field.
    """
    if isinstance(model, Decoder) and model.mup:
        weights = StandardWeights(model, weights)
    config = _written(model, origin)
    conversion = _family(config).conversion(config)
    stream = conversion.tensors(weights)

    def pieces(name: str) -> Iterator[np.ndarray]:
        next_name, array = next(stream)
        assert next_name == name, (next_name, name)
        yield array

    return _with_batch_counters(
        Outgoing(config=config, specs=_specs(conversion, weights), pieces=pieces), {}
    )


def _with_batch_counters(model: Outgoing, files: Tensors) -> Outgoing:
    """The model with the counters int64[] of its batch norms, which transformers misses and nothing reads: those of its files, else 0."""
    found = [spec.name for spec in model.specs if spec.name.endswith(VARIANCE)]
    names = dict.fromkeys(f"{n.removesuffix(VARIANCE)}.num_batches_tracked" for n in found)
    specs = [TensorSpec(name=name, shape=(), dtype=np.dtype(np.int64)) for name in names]

    def pieces(name: str) -> Iterator[np.ndarray]:
        if name not in names:
            return model.pieces(name)
        return iter([files[name].read() if name in files else np.zeros((), np.int64)])

    return replace(model, specs=[*model.specs, *specs], pieces=pieces)


def _written(model: Model, origin: Config) -> Config:
    """The config.json for a model: its origin's where the model is still the same, with fields about its text in any case."""
    model = standard(model) if isinstance(model, Decoder) else model
    same = origin and not differences(model, origin)
    said = origin if same else _said(model)
    if isinstance(model, Decoder) and model.drops:
        raise OptionError(
            f"model.capacity-factor is {model.capacity_factor:g}, which leaves tokens without a slot out, and {said['model_type']} of transformers leaves none out; train on with systolic resume and --model.dispatch dropless, or keep it as a Bundle"
        )
    if same:
        return origin
    return {**said} | {name: origin[name] for name in TEXT if name in origin and name not in said}


def config_of(model: Model, origin: Config) -> Config:
    """The config.json of the family of transformers that computes what a model does, see :func:`outgoing_model`; {} where none does."""
    try:
        return _written(model, origin)
    except OptionError:
        return {}


def with_text(
    config: Config, files: Mapping[str, bytes], data: TextData
) -> tuple[Config, dict[str, bytes]]:
    """A config.json and the files beside it, with the tokens that end a text of ``data`` and the model's context.

    Args:
        config: Of the model; what it says of tokens and context goes before.
        files: Name to content; a generation_config.json among them has the same ends afterwards.
        data: What the model was trained on.
    """
    said, start = dict(config), data.get_tokenizer().start
    if start is not None:
        said.setdefault("bos_token_id", start)
    if "n_positions" not in said and not said.get("rope_scaling"):
        said.setdefault("max_position_embeddings", data.context)
    contents = dict(files)
    kept = json.loads(contents.get(GENERATION, b"{}"))
    for fields in (said, kept):
        before = fields.get(END)
        ids = before if isinstance(before, list) else [before]
        known = [token for token in ids if token is not None]
        if more := sorted(data.ends - set(known)):
            all_of_them = [*known, *more]
            fields[END] = all_of_them if len(all_of_them) > 1 else all_of_them[0]
    if GENERATION in contents and json.loads(contents[GENERATION]) != kept:
        contents[GENERATION] = json.dumps(kept, indent=2).encode()
    return said, contents


def _specs(conversion: Conversion, weights: Mapping[str, Any]) -> list[TensorSpec]:
    """Names, shapes and dtypes of all tensors; all places of a stack have those of the first."""
    specs = []
    for rule in conversion.rules:
        places = list(rule.places())
        first = rule.write([np.asarray(weights[path][places[0]]) for path in rule.ours])
        for place in places:
            specs += [
                TensorSpec(name=name, shape=array.shape, dtype=array.dtype)
                for name, array in zip(rule.names(place), first, strict=True)
            ]
    return specs


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
            away = differences(model, config)
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


def differences(model: Model, config: Config) -> list[str]:
    """Fields in which a model is not the one of a config.json, as text."""
    said = _family(config).model(config)
    if type(said) is not type(model):
        return [f"it is {with_article(type(model).__name__)}"]
    named = model.lasting() | set(CONSTANTS) if model.lasting() else set(_facts(model))
    mine, theirs = _facts(model), _facts(said)
    return [
        f"model.{name.replace('_', '-')} is {mine[name]}, not {theirs[name]}"
        for name in mine
        if name in named and mine[name] != theirs[name]
    ]


def _facts(model: Model) -> dict[str, Any]:
    """Fields as plain values, with those that stand for another resolved."""
    facts: dict[str, Any] = msgspec.to_builtins(model, enc_hook=str)
    if isinstance(model, Decoder):
        facts["embedding_scale"] = model.embedding_factor
    return facts


def export_folder(
    source: ExportSource, out: Path, options: None, say: Callable[[str], None]
) -> Exported:
    """Writes a run or a model in files as a folder that transformers opens; adapters are merged.

    Args:
        source: The run or the model.
        out: The new folder.
        options: The format has none.
        say: Called with each stage.

    Raises:
        OptionError: no family of transformers computes what the model does; names the field.
        TakenError: ``out`` exists.
        RunError: the disk is full, or outputs differ.
    """
    del options
    check_free(out)
    payload = payload_of(source)
    model = payload.model
    stored = next((name for name in DTYPES if name in model.config), DTYPES[0])
    # Weights of another dtype than the origin's, such as a run's frozen ones, have their own now.
    config = {stored: None, **model.config} | {stored: most_common(model.specs)}
    with draft(out) as folder:
        folder.add(CONFIG, json.dumps(config, indent=2).encode())
        for name, content in payload.files.items():
            folder.add(name, content)
        size = sum(spec.nbytes for spec in model.specs)
        folder.weights(model.specs, model.pieces, weight_progress(size, say), stem="model")
        comparison = compared(source, folder.folder, model.specs, say)
        folder.rename()
    return Exported.of(
        out,
        model.config["model_type"],
        model.specs,
        restored=payload.restored,
        reads_bytes=payload.reads_bytes,
        **comparison,
    )
