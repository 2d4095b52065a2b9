"""Folders of PEFT: low-rank adapters beside a model in files, read as that model with the adapters merged, and written from a run's."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError, RunError, SystolicError
from systolic.core.files import digest
from systolic.data.fingerprint import of_files
from systolic.formats.comparison import Parity, compare, probe_of
from systolic.formats.export import (
    TOLERANCES,
    ExportableRun,
    Exported,
    ExportSource,
    kept_config,
    no_room,
    text_files,
)
from systolic.formats.hugging_face.writer import config_of
from systolic.formats.registry import ADAPTERS, in_files, is_peft
from systolic.formats.source import HUB_NAME, OTHER_FILES, TEXT_FILES, Source, open_source
from systolic.formats.weights import structure_of, weight_progress
from systolic.job import Adapter, AdapterKind, Job, Model
from systolic.models.adapters import BASE, EXPERTS, STACKED, A, B, merged, num_inputs
from systolic.models.decoder.config import Decoder
from systolic.models.families import CONFIG, family
from systolic.models.mapping import Rule
from systolic.runs.bundle.folder import MANIFEST, check_free, draft
from systolic.runs.bundle.tensors import MappedTensor, TensorSpec, read_header
from systolic.runs.weights import plain_parameters

if TYPE_CHECKING:
    import jax

STEM, PICKLED = "adapter_model", "adapter_model.bin"
WEIGHTS = f"{STEM}.safetensors"
"""File of the adapters; the other is a pickle, which is not read."""
BASE_NAME = "base_model_name_or_path"
PREFIX, SUFFIX = "base_model.model.", ".weight"
"""Beginning and end of the names of adapters: what PEFT wraps the model in."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
OWN: Mapping[str, int] = {"r": 8, "lora_alpha": 8}
"""Fields that PEFT's LoraConfig has values for where a file names none."""
UNREAD: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (),
    "use_dora": (),
    "lora_bias": (),
    "layer_replication": (),
    "trainable_token_indices": (),
    "target_parameters": (),
    "use_qalora": (),
    "alora_invocation_tokens": (),
}
"""Fields whose values, beside these and empty ones, add something to the model that is no low-rank product."""
CHANGING_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of initialisations after which PEFT takes the adapter's first product from the base's matrices (``init_lora_weights``)."""
FUSED = (".gate_proj", ".up_proj", ".down_proj")
"""Ends of names that PEFT (0.21, on transformers 5) takes for experts in a mixture, also where they are no expert's."""
SHOWN = 3
"""Names in a message."""


class Pair(NamedTuple):
    """An adapter of ours at a path: W + scale A B."""

    a: np.ndarray
    """float32[*stack, *inputs, rank]."""
    b: np.ndarray
    """float32[*stack, rank, *outputs]."""


@dataclass(frozen=True, kw_only=True)
class Home:
    """A tensor of transformers, with the matrices of ours in it and the order of their rows and columns there."""

    rule: Rule
    tensor: int
    """Its number in the rule's names."""
    inputs: np.ndarray
    """Number here of each input there: int[inputs]."""
    outputs: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """Path of ours to the outputs there that it makes, and their numbers here: int[n] each."""
    transposed: bool
    """Whether the file has inputs first (GPT-2's Conv1D)."""

    def module(self, place: Sequence[int]) -> str:
        """Name of the module at an index of the stack: ``model.layers.0.self_attn.q_proj``."""
        return self.rule.names(place)[self.tensor].removesuffix(SUFFIX)

    @property
    def target(self) -> str:
        """The end of its modules' names in all layers: ``self_attn.q_proj``."""
        return self.rule.theirs[self.tensor].removesuffix(SUFFIX).rpartition("}.")[2]

    @property
    def num_outputs(self) -> int:
        """Outputs of the tensor."""
        return sum(len(there) for there, _ in self.outputs.values())


def homes_of(model: Model, config: Mapping[str, Any], source: str) -> list[Home]:
    """The tensors of transformers that a model's adapters stand beside.

    Args:
        model: The model.
        config: Fields of the config.json of its family.
        source: Its name in messages.

    Raises:
        OptionError: no family of transformers computes what the model does.
    """
    if not config or (isinstance(model, Decoder) and model.mup):
        raise OptionError(
            f"{source} is no model of a family of transformers, so that its matrices have no names there; use it here, or export it merged with --to bundle"
        )
    structure, names = structure_of(model), model.adaptable()

    def inputs(path: str) -> int:
        """Leading dims of a matrix without its stack that are inputs; 0 where it takes no adapter."""
        axes = structure.axes.get(path)
        if path.rpartition("/")[2] not in names or axes is None or EXPERTS in axes:
            return 0
        return num_inputs(tuple(axis for axis in axes if axis not in STACKED))

    homes = []
    for rule in family(config, source).conversion(config).rules:
        if any(inputs(path) for path in rule.ours):
            sizes = [structure.params[path].shape[len(rule.stack) :] for path in rule.ours]
            homes += _homes(rule, sizes, [inputs(path) for path in rule.ours])
    return homes


def _homes(rule: Rule, shapes: Sequence[tuple[int, ...]], inputs: Sequence[int]) -> Iterator[Home]:
    """Homes of a rule's matrices, found by writing the elements' numbers in place of weights."""
    sizes = [math.prod(shape) for shape in shapes]
    starts = np.cumsum([0, *sizes])
    kind = np.int32 if starts[-1] < 2**31 else np.int64
    numbers = [
        np.arange(start, start + size, dtype=kind).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]
    for tensor, matrix in enumerate(rule.write(numbers)):
        if matrix.ndim != 2:
            continue  # a bias
        wide = [math.prod(s[n:]) for s, n in zip(shapes, inputs, strict=True)]
        first = int(np.searchsorted(starts, matrix[0, 0], "right")) - 1
        # Outputs of an input follow each other here: the next row holds another output, or another input.
        transposed = len(matrix) > 1 and (matrix[1, 0] - matrix[0, 0]) % wide[first] == 0
        rows = matrix.T if transposed else matrix
        owner = np.searchsorted(starts, rows[:, 0], "right") - 1
        column = (rows[np.flatnonzero(owner == first)[0]] - starts[first]) // wide[first]
        outputs = {}
        for which in dict.fromkeys(owner.tolist()):
            there = np.flatnonzero(owner == which)
            here = (rows[there, 0] - starts[which]) % wide[which]
            expected = starts[which] + column[None] * wide[which] + here[:, None]
            assert (rows[there] == expected).all(), rule.theirs
            outputs[rule.ours[which]] = (there, here)
        yield Home(rule=rule, tensor=tensor, inputs=column, outputs=outputs, transposed=transposed)


# Reading


def base_of(folder: Path, base: Path | None = None) -> Path:
    """The model that a folder's adapters stand beside.

    Args:
        folder: Of PEFT.
        base: In place of the one that its adapter_config.json names.

    Raises:
        NotFoundError: it is not there.
        DataError: the file is damaged.
    """
    named = str(_config(folder).get(BASE_NAME) or "")
    for path in (base,) if base else (Path(named), folder / named) if named else ():
        if path.exists() and path.resolve() != folder.resolve():
            return path
    if base:
        raise NotFoundError(f"{base} does not exist; check --base")
    hub = f": hf download {named} --local-dir DIR" if HUB_NAME.fullmatch(named) else ""
    raise NotFoundError(
        f"{folder} holds adapters of PEFT on {named or 'a model that it does not name'}, which is not here; get that model{hub}, and write its folder as {BASE_NAME} in {folder / ADAPTERS}, or give it with systolic import {folder} --base DIR"
    )


def _config(folder: Path) -> dict[str, Any]:
    try:
        fields = json.loads((folder / ADAPTERS).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / ADAPTERS} is damaged ({error}); copy it again") from error
    if not isinstance(fields, dict):
        raise DataError(f"{folder / ADAPTERS} is no JSON object; copy it again")
    return fields


def _checked(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The adapter_config.json of a folder with low-rank adapters and nothing else, with PEFT's own rank and alpha where it names none, and notes of these.

    Raises:
        OptionError: it asks for more; names the field.
        DataError: its rank or alpha is no number.
        NotFoundError: the folder has no weights that are read.
    """
    config = _config(folder)
    if config.get("peft_type") != "LORA":
        raise OptionError(
            f"{folder} has the peft_type {config.get('peft_type')!r}, and adapters of LORA alone are read; merge it with PEFT (merge_and_unload), and give the merged model"
        )
    for name, known in UNREAD.items():
        value = config.get(name)
        if value and value not in known:
            raise OptionError(
                f"{folder} has {name} {value!r}, which is no low-rank product and is not read; train it without, or merge it with PEFT (merge_and_unload) and give the merged model"
            )
    begun = str(config.get("init_lora_weights", "")).lower()
    if begun.startswith(CHANGING_BASE):
        raise OptionError(
            f"{folder} has init_lora_weights {begun!r}, which changes the base's own matrices, and is not read; save it with PEFT's path_initial_model_for_weight_conversion, or merge it (merge_and_unload) and give the merged model"
        )
    lacking = {name: value for name, value in OWN.items() if name not in config}
    config |= lacking
    for name in OWN:
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise DataError(f"{name} in {folder / ADAPTERS} is {value!r}; it is a number above 0")
    if not (folder / WEIGHTS).is_file():
        why = f"no {WEIGHTS}"
        if (folder / PICKLED).is_file():
            why = f"its weights in {PICKLED}, which is not read (it may execute code)"
        raise NotFoundError(f"{folder} has {why}; save it with PEFT's save_pretrained")
    return config, tuple(
        f"{folder / ADAPTERS} has no {name}; PEFT's own is taken, {value}"
        for name, value in lacking.items()
    )


def _pattern(text: str) -> re.Pattern[str]:
    """A regular expression of an adapter_config.json."""
    try:
        return re.compile(text)
    except re.error as error:
        raise DataError(
            f"{ADAPTERS} names modules by {text!r}, which is no regular expression ({error}); mend it, or give a list of names"
        ) from error


def _matching(patterns: Mapping[str, Any], module: str, usual: float) -> float:
    """The value of the first pattern that a module's name ends with, as PEFT finds it."""
    for pattern, value in patterns.items():
        if _pattern(rf"(.*\.)?({pattern})$").match(module):
            return float(value)
    return usual


def _takes(about: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT puts an adapter beside a module: ``check_target_module_exists`` of its tuners."""

    def among(names: Sequence[str] | str) -> bool:
        if isinstance(names, str):
            return names == "all-linear" or _pattern(names).fullmatch(module) is not None
        return any(f".{module}".endswith(f".{name}") for name in names)

    targets, layers = about.get("target_modules"), about.get("layers_to_transform")
    if among(about.get("exclude_modules") or ()) or not (targets is None or among(targets)):
        return False
    if layers in (None, []) or isinstance(targets, str) or module in (targets or ()):
        return True  # A name that is whole goes before the layers.
    patterns = about.get("layers_pattern") or [r"[^.]*"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    matches = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module) for pattern in patterns)
    match = next((candidate for candidate in matches if candidate), None)
    return bool(match) and int(match[1]) in (layers if isinstance(layers, list) else [layers])


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _taken(
    folder: Path, about: Mapping[str, Any], tensors: dict[str, MappedTensor]
) -> tuple[dict[str, MappedTensor], tuple[str, ...]]:
    """The adapters that PEFT would read of a file, and a note of those that it leaves out.

    Raises:
        DataError: they are none.
    """
    module = {name: name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP) for name in tensors}  # fmt: skip
    taken = {name: tensor for name, tensor in tensors.items() if _takes(about, module[name])}
    left = sorted({module[name] for name in tensors if name not in taken})
    if not left:
        return taken, ()
    fields = [field for field in ("target_modules", "exclude_modules", "layers_to_transform") if about.get(field) not in (None, [])]  # fmt: skip
    warning = f"{folder / ADAPTERS} leaves out adapters that {WEIGHTS} has, by its {' and '.join(fields)}: {_first_of(left)}"
    if not taken:
        raise DataError(f"{warning}, which are all; correct it, or copy the folder again")
    return taken, (f"{warning}; they are not read, as PEFT does not",)


@dataclass(frozen=True, kw_only=True)
class PeftAdapters:
    """PEFT's adapters of a model, which are read when they are asked for."""

    path: Path
    model: Model
    beside: Path
    """The model that they stand beside."""
    homes: Sequence[Home]
    adapters: Mapping[str, MappedTensor]
    """Tensors by their names in the file."""
    about: Mapping[str, Any]
    """Fields of adapter_config.json."""
    notes: tuple[str, ...] = ()
    """Warnings about the files."""

    @property
    def scale(self) -> float:
        """Factor of the products of modules without a pattern of their own."""
        return self._scale(float(self.about["lora_alpha"]), float(self.about["r"]))

    def _scale(self, alpha: float, rank: float) -> float:
        return alpha / (math.sqrt(rank) if self.about.get("use_rslora") else rank)

    @cached_property
    def pairs(self) -> dict[str, Pair]:
        """Adapters by our paths, for :attr:`scale`; of a smaller rank than others, or none, in a layer they end with zeros."""
        pairs_by_path: dict[str, dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]] = {}
        for home in self.homes:
            for place in home.rule.places():
                module = home.module(place)
                if f"{PREFIX}{module}{DOWN}" in self.adapters:
                    for path, pair in self._read(home, module).items():
                        pairs_by_path.setdefault(path, {})[place] = pair
        shapes = structure_of(self.model).params
        return {
            path: self._stacked(path, shapes[path].shape, at) for path, at in pairs_by_path.items()
        }

    def _read(self, home: Home, module: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Pairs float32[inputs, rank] and [rank, outputs] of one module, by path."""
        down, up = (
            np.asarray(self.adapters[f"{PREFIX}{module}{end}"].read(), np.float32)
            for end in (DOWN, UP)
        )
        rank = down.shape[0]
        wanted = (rank, len(home.inputs)), (home.num_outputs, rank)
        if (down.shape, up.shape) != wanted:
            raise DataError(
                f"the adapter of {module} in {self.path} is {down.shape} and {up.shape}, and the model takes {wanted[0]} and {wanted[1]}; it belongs to another model than {self.beside}"
            )
        kept = float(_matching(self.about.get("rank_pattern") or {}, module, self.about["r"]))
        alpha = _matching(self.about.get("alpha_pattern") or {}, module, self.about["lora_alpha"])
        if kept != rank:
            raise DataError(
                f"the adapter of {module} in {self.path} has the rank {rank}, and {ADAPTERS} says {kept:g}; copy the folder again"
            )
        a = np.empty((len(home.inputs), rank), np.float32)
        a[home.inputs] = down.T
        pairs = {}
        for number, (path, (there, here)) in enumerate(home.outputs.items()):
            if up.any() and not up[there].any():
                continue  # Of several matrices in a tensor this one has no adapter.
            b = np.empty((rank, len(there)), np.float32)
            b[:, here] = up[there].T * (self._scale(alpha, rank) / self.scale)
            pairs[path] = _own_block(a, b, up, there, number, len(home.outputs))
        return pairs

    def _stacked(
        self,
        path: str,
        shape: tuple[int, ...],
        at: Mapping[tuple[int, ...], tuple[np.ndarray, np.ndarray]],
    ) -> Pair:
        rule = next(home.rule for home in self.homes if path in home.outputs)
        stacked = len(rule.stack)
        axes = structure_of(self.model).axes[path]
        assert axes is not None
        split = stacked + num_inputs(tuple(axis for axis in axes if axis not in STACKED))
        rank = max(a.shape[1] for a, _ in at.values())
        outer, inputs, outputs = shape[:stacked], shape[stacked:split], shape[split:]
        a = np.zeros((*outer, math.prod(inputs), rank), np.float32)
        b = np.zeros((*outer, rank, math.prod(outputs)), np.float32)
        for place, (down, up) in at.items():
            a[place][:, : down.shape[1]], b[place][: up.shape[0]] = down, up
        return Pair(a.reshape(*outer, *inputs, rank), b.reshape(*outer, rank, *outputs))

    @cached_property
    def adapter(self) -> Adapter | None:
        """Adapters of ours that are the same, so that their training goes on; ``None`` where ranks differ or a layer has none."""
        ranks = {pair.a.shape[-1] for pair in self.pairs.values()}
        names = {path.rpartition("/")[2] for path in self.pairs}
        own = {path: home for home in self.homes for path in home.outputs}
        wanted = {path for path in own if path.rpartition("/")[2] in names}
        whole = all(
            f"{PREFIX}{own[path].module(place)}{DOWN}" in self.adapters
            for path in wanted
            for place in own[path].rule.places()
        )
        if len(ranks) != 1 or not whole:
            return None
        every = {path.rpartition("/")[2] for path in own}
        return Adapter(
            kind=AdapterKind.lora,
            rank=(rank := ranks.pop()),
            alpha=self.scale * rank,
            targets=() if names == every else tuple(sorted(names)),
        )


@dataclass(frozen=True, kw_only=True)
class PeftSource(PeftAdapters, Source):
    """A model with PEFT's adapters merged into its matrices, which are read when they are asked for."""

    base: Source

    @property
    def dtype(self) -> str:
        """See :class:`Source`."""
        return self.base.dtype

    def each(self, like: "Mapping[str, jax.ShapeDtypeStruct]") -> "Iterator[tuple[str, jax.Array]]":
        """See :class:`Source`."""
        import jax

        adapter = Adapter(kind=AdapterKind.lora, rank=1, alpha=self.scale)
        for path, value in self.base.each(like):
            if path not in self.pairs:
                yield path, value
                continue
            pair = {f"{path}/{A}": self.pairs[path].a, f"{path}/{B}": self.pairs[path].b}
            arrays = {name: jax.numpy.asarray(array) for name, array in pair.items()}
            weight = merged(arrays, {f"{path}/{BASE}": value}, adapter)[path]
            yield path, jax.device_put(weight, like[path].sharding)

    def pieces(self, path: str) -> Iterator[np.ndarray]:
        """See :class:`Source`."""
        if path not in self.pairs:
            yield from self.base.pieces(path)
            return
        pair = self.pairs[path]
        shape = structure_of(self.model).params[path].shape
        row = 0
        for piece in self.base.pieces(path):
            rows = len(piece) if piece.ndim == len(shape) else 1
            a, b = pair.a[row : row + rows], pair.b[row : row + rows]
            more = np.stack([_product(down, up) for down, up in zip(a, b, strict=True)])
            row += rows
            yield (piece + self.scale * more.reshape(piece.shape)).astype(piece.dtype)

    def files(self) -> dict[str, Path]:
        """See :class:`Source`; its own files before those of the base."""
        own = {name: self.path / name for name in (*TEXT_FILES, *OTHER_FILES)}
        return self.base.files() | {name: file for name, file in own.items() if file.is_file()}

    def dtypes(self) -> "Mapping[str, np.dtype]":
        """See :class:`Source`."""
        return self.base.dtypes()

    def verify(self) -> None:
        """See :class:`Source`."""
        self.base.verify()

    def trained_job(self) -> Job | None:
        """See :class:`Source`."""
        return self.base.trained_job()

    def origin(self, path: str, piece: int) -> str:
        """See :class:`Source`."""
        return self.base.origin(path, piece)

    def fingerprint(self) -> str:
        """See :class:`Source`."""
        return digest({"base": self.base.fingerprint(), "adapters": adapters_digest(self.path)})


def adapters_digest(folder: Path) -> str:
    """Fingerprint of the adapters of a folder of PEFT; empty where its files are missing."""
    own = of_files(folder, [folder / ADAPTERS, folder / WEIGHTS])
    return "" if own is None else own.digest


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[inputs, rank] times [rank, outputs], both with several dims of inputs and outputs."""
    return a.reshape(-1, a.shape[-1]) @ b.reshape(len(b), -1)


def _own_block(
    a: np.ndarray, b: np.ndarray, up: np.ndarray, there: np.ndarray, number: int, several: int
) -> tuple[np.ndarray, np.ndarray]:
    """The part of a pair that one of several matrices in a tensor uses, where each uses one block of the rank by itself."""
    size, rest = divmod(a.shape[1], several)
    if several == 1 or rest or not size:
        return a, b
    own = np.zeros(a.shape[1], bool)
    own[number * size : (number + 1) * size] = True
    others = np.ones(len(up), bool)
    others[there] = False
    if up[np.ix_(there, ~own)].any() or up[np.ix_(others, own)].any():
        return a, b
    return a[:, own], b[own]


def open_peft(folder: Path, base: Path | None = None) -> PeftSource:
    """A folder of PEFT on its base; reads descriptions only.

    Args:
        folder: With adapter_config.json and adapter_model.safetensors.
        base: The base, in place of the one that it names.

    Raises: as :func:`open_adapters`, and
        NotFoundError: the base is missing.
        OptionError: the base is quantized.
    """
    _checked(folder)  # What it is comes before where its base is.
    inner = open_source(base_of(folder, base))
    if inner.quantization:
        raise OptionError(
            f"{inner.path} is quantized, and adapters are merged into matrices of floats; give the model that it was made from with --base"
        )
    own = open_adapters(folder, inner.path, inner.model, inner.config)
    fields: dict[str, Any] = vars(own) | {"notes": (*inner.notes, *own.notes)}
    return PeftSource(
        **fields,
        config=inner.config,
        kind="peft",
        licence=inner.licence,
        base=inner,
    )


def open_adapters(
    folder: Path, beside: Path, model: Model, config: Mapping[str, Any]
) -> PeftAdapters:
    """The adapters of a folder of PEFT ``beside`` a model with the fields of its config.json; reads descriptions only.

    Raises:
        NotFoundError: a file is missing.
        OptionError: it holds more than low-rank adapters, or adapters of matrices that take none here.
        DataError: a file is damaged.
    """
    about, notes = _checked(folder)
    homes = homes_of(model, config_of(model, config), str(beside))
    tensors = read_header(folder / WEIGHTS)[0]
    modules = [f"{PREFIX}{home.module(at)}" for home in homes for at in home.rule.places()]
    known = {module + end for module in modules for end in (DOWN, UP)}
    if unknown := sorted(set(tensors) - known):
        raise OptionError(
            f"{folder} has adapters that {beside} takes none for here: {_first_of(unknown)}; known are those of {', '.join(dict.fromkeys(home.target for home in homes))}: merge it with PEFT (merge_and_unload) and give the merged model"
        )
    halves = {name.removesuffix(DOWN).removesuffix(UP) for name in tensors}
    if lone := sorted(half for half in halves if not {half + DOWN, half + UP} <= set(tensors)):
        raise DataError(f"{folder / WEIGHTS} has half of the adapter {lone[0]}; copy it again")
    if not tensors:
        raise DataError(f"{folder / WEIGHTS} has no adapters; save it again")
    tensors, unread = _taken(folder, about, dict(tensors))
    return PeftAdapters(
        path=folder,
        model=model,
        beside=beside,
        homes=homes,
        adapters=tensors,
        about=about,
        notes=(*notes, *unread),
    )


def same_adapter(source: PeftSource, wanted: Adapter) -> None:
    """Refuses to train on other adapters than a folder has.

    Raises:
        OptionError: kind, rank, alpha or targets differ, or the folder's are none of ours; says what to give.
    """
    own = source.adapter
    merge = f"merge it first with systolic import {source.path} --out DIR and begin with that"
    if own is None:
        raise OptionError(
            f"the adapters of {source.path} have several ranks, or a layer lacks one, and a run has one rank in all layers; {merge}"
        )
    if (wanted.rank, frozenset(wanted.targets)) != (own.rank, frozenset(own.targets)) or (
        not math.isclose(wanted.alpha, own.alpha, rel_tol=1e-6)
    ):
        targets = f" --targets {' '.join(own.targets)}" if own.targets else ""
        raise OptionError(
            f"{source.path} has other adapters than the job; train them on with --rank {own.rank} --alpha {own.alpha:g}{targets}, or {merge}"
        )


# Writing


@dataclass(frozen=True, kw_only=True)
class OutgoingAdapters:
    """A run's adapters on their way into a folder of PEFT."""

    config: dict[str, Any]
    specs: list[TensorSpec]
    arrays: Mapping[str, np.ndarray]


def outgoing_adapters(
    model: Model, adapter: Adapter, params: Mapping[str, Any], origin: Mapping[str, Any], base: str
) -> OutgoingAdapters:
    """Adapters under PEFT's names, with their adapter_config.json.

    Matrices of ours that are one tensor there, as queries, keys and values of GPT-2, have one adapter of their ranks
    together, in which each uses a block of its own.

    Args:
        model: The model.
        adapter: Rank and alpha.
        params: A and B by our paths.
        origin: The config.json of the model that they stand beside.
        base: Its path.

    Raises: as :func:`homes_of`, and
        OptionError: PEFT would put them elsewhere.
    """
    homes = homes_of(model, config_of(model, origin), base)
    used = [home for home in homes if any(f"{path}/{A}" in params for path in home.outputs)]
    misread = [home.target for home in used if home.target.endswith(FUSED)]
    if isinstance(model, Decoder) and model.experts > 1 and misread:
        raise OptionError(
            f"the run has adapters of {', '.join(misread)}, and PEFT takes these names in a mixture for its experts and loses them; give --to hf, or train adapters of attention alone (--targets query value)"
        )
    arrays: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for home in used:
        own = [path for path in home.outputs if f"{path}/{A}" in params]
        if len(own) > 1:
            ranks[home.target] = len(own) * adapter.rank
        for place in home.rule.places():
            down, up = _written(home, own, adapter.rank, params, place)
            arrays[f"{PREFIX}{home.module(place)}{DOWN}"] = down
            arrays[f"{PREFIX}{home.module(place)}{UP}"] = up
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE_NAME: base,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(dict.fromkeys(home.target for home in used)),
        "fan_in_fan_out": any(home.transposed for home in used),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": ranks,
        "alpha_pattern": {name: rank * adapter.scale for name, rank in ranks.items()},
        "modules_to_save": None,
        "inference_mode": True,
    }
    specs = [TensorSpec(name=n, shape=a.shape, dtype=a.dtype) for n, a in arrays.items()]
    return OutgoingAdapters(config=config, specs=specs, arrays=arrays)


def _written(
    home: Home, own: Sequence[str], rank: int, params: Mapping[str, Any], place: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """lora_A [ranks, inputs] and lora_B [outputs, ranks] of the module at an index of the stack."""
    down = np.zeros((len(own) * rank, len(home.inputs)), np.float32)
    up = np.zeros((home.num_outputs, len(own) * rank), np.float32)
    for number, path in enumerate(own):
        block = slice(number * rank, (number + 1) * rank)
        a = np.asarray(params[f"{path}/{A}"][place], np.float32).reshape(-1, rank)
        b = np.asarray(params[f"{path}/{B}"][place], np.float32).reshape(rank, -1)
        there, here = home.outputs[path]
        down[block] = a[home.inputs].T
        up[there, block] = b[:, here].T
    return down, up


def known_base(start: Path | None) -> str:
    """The base for an adapter_config.json: the folder that a run began with, or the base of its own adapters."""
    if start is None:
        return ""
    try:
        home = base_of(start) if is_peft(start) else start
    except SystolicError:
        home = start
    return str(home.resolve())


def export_peft(
    source: ExportSource, out: Path, options: None, say: Callable[[str], None]
) -> Exported:
    """Writes the adapters of a run as a folder that PEFT opens beside the model that the run began with.

    Args:
        source: The run.
        out: The new folder.
        options: The format has none.
        say: Called with each stage.

    Raises:
        OptionError: the path has no adapters, or they stand beside a model that no family of transformers computes.
        TakenError: ``out`` exists.
        RunError: the folder's adapters, or the outputs of the model with them, are others.
    """
    del options
    path = source.path
    check_free(out)
    if in_files(path):
        raise OptionError(
            f"{path} is a model in files, which holds no adapters by themselves; give a run of systolic train sft --adapter lora, or --to hf for all of its weights"
        )
    run = source.open_run()
    job = run.job
    if not job.adapter:
        raise OptionError(
            f"{path} trained all weights and has no adapters; give --to hf, which writes them all"
        )
    base = known_base(job.start)
    adapters = outgoing_adapters(
        job.model, job.adapter, run.weights.params, kept_config(run.path), base or str(path)
    )
    with draft(out) as folder:
        folder.add(ADAPTERS, json.dumps(adapters.config, indent=2).encode())
        for name, content in text_files(job.data).items():
            folder.add(name, content)
        size = sum(spec.nbytes for spec in adapters.specs)
        folder.weights(
            adapters.specs,
            lambda name: iter([adapters.arrays[name]]),
            weight_progress(size, say),
            stem=STEM,
        )
        parity, notes = _compared(folder.folder, Path(base), source, run, say)
        folder.rename()
    return Exported(
        path=out,
        kind="peft",
        parameters=sum(array.size for array in adapters.arrays.values()),
        bytes=size,
        parity=parity,
        notes=(*notes, *_base_notes(Path(base))),
    )


def _compared(
    folder: Path, base: Path, exported: ExportSource, run: ExportableRun, say: Callable[[str], None]
) -> tuple[Parity | None, list[str]]:
    """The outputs of the base with a folder's adapters against those of the run; why they were not compared."""
    try:
        source = open_peft(folder, base)
    except NotFoundError as error:
        return None, [f"not compared with the run: {error}"]
    if run.job.adapter.kind is AdapterKind.qlora:
        return None, [
            f"not compared with the run, whose frozen matrices are rounded to 4 bits (nf4): beside those of {base} as they are, outputs differ by that rounding; load the base in 4 bits (nf4) to have them"
        ]
    if (why := no_room(plain_parameters(run.steps))) is not None:
        return None, [why]
    say("comparing")
    probe = probe_of(source)
    ours, _ = exported.answers(source, probe.ours)
    theirs = exported.outputs(probe.ours)
    dtype = {"float32": "f32"}.get(source.dtype, "bf16")
    parity = compare(ours, theirs, "the run", TOLERANCES[dtype], probe)
    if not parity.passed:
        raise RunError(
            f"the adapters written of {run.path} compute something else: {parity.line()}; please report it, nothing was kept"
        )
    return parity, []


def _base_notes(base: Path) -> list[str]:
    """Notes on the base, if PEFT can't open it."""
    if (base / CONFIG).is_file():
        return []
    what = "a Bundle" if (base / MANIFEST).is_file() else "no folder of transformers"
    return [
        f"its base, {base}, is {what}, which PEFT does not open: write it with systolic export {base} --to hf --out DIR, and give that folder to PEFT or as {BASE_NAME} in {ADAPTERS}"
    ]
