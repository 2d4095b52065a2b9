"""Folders of Hugging Face: config.json, safetensors in one file or in shards, tokenizer."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import refuse_pointer
from systolic.formats.source import COPIES, TransformersSource, gguf_inside
from systolic.models.config_fields import notes_of
from systolic.models.decoder.families.fields import refuse_quantized
from systolic.models.families import CONFIG, family, read_config
from systolic.models.mapping import Conversion, Rule, Tensor, Tensors
from systolic.runs.bundle.tensors import MappedTensor, read_header

One = TypeVar("One", bound=Tensor)

WRAPPERS = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
)
"""Parts of names of modules that DataParallel, torch.compile, FSDP, activation checkpoints and Lightning wrap others in."""

ANCHORS = 3
"""Tensors by whose names a prefix is looked for."""


def as_expected(tensors: Mapping[str, One], conversion: Conversion) -> dict[str, One]:
    """Tensors under the names that a conversion reads, where files have them with a wrapper's parts or another prefix.

    transformers opens such folders: saved by AutoModel (``layers.0…`` for ``model.layers.0…``), as a part of a
    larger model (``model.language_model.…``), or with the embedding under the name of the last matrix that it is
    tied to. Unknown names stay as they are, for the conversion's check to name.
    """
    wanted = _wanted(conversion.rules)
    if wanted <= set(tensors):
        return dict(tensors)
    unwrapped = {_unwrapped(name): tensor for name, tensor in tensors.items()}
    if len(unwrapped) < len(tensors):
        unwrapped = dict(tensors)
    best = max(
        (
            _renamed(unwrapped, old, new, wanted)
            for old, new in {("", ""), *_prefixes(unwrapped, wanted)}
        ),
        key=lambda renamed: len(wanted & set(renamed)),
    )
    return _with_embedding(best, conversion, wanted)


def _wanted(rules: Sequence[Rule]) -> set[str]:
    return {name for rule in rules for place in rule.places() for name in rule.names(place)}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _prefixes(tensors: Mapping[str, One], wanted: set[str]) -> Iterator[tuple[str, str]]:
    """Prefixes in files, and what stands in their place in wanted names: those of some missing tensors' longest common ends."""
    for name in sorted(wanted - set(tensors), key=lambda other: (-other.count("."), other))[
        :ANCHORS
    ]:
        parts = name.split(".")
        for cut in range(len(parts)):
            end = ".".join(parts[cut:])
            matches = [other for other in tensors if other == end or other.endswith(f".{end}")]
            if matches:
                yield from ((match.removesuffix(end), name.removesuffix(end)) for match in matches)
                break


def _renamed(tensors: Mapping[str, One], old: str, new: str, wanted: set[str]) -> dict[str, One]:
    renamed: dict[str, One] = {}
    for name, tensor in tensors.items():
        other = new + name.removeprefix(old)
        moved = name not in wanted and name.startswith(old) and other in wanted
        renamed[other if moved and other not in tensors else name] = tensor
    return renamed


def _with_embedding(
    tensors: dict[str, One], conversion: Conversion, wanted: set[str]
) -> dict[str, One]:
    """The embedding of tied weights that a file has as the last matrix alone."""
    rule = next((rule for rule in conversion.rules if "embedding" in rule.ours), None)
    if rule is None or len(rule.theirs) != 1 or rule.theirs[0] in tensors:
        return tensors
    copies = (
        name
        for name in tensors
        if name not in wanted
        and any(name == ending or name.endswith(f".{ending}") for ending in COPIES)
    )
    if (copy := next(copies, None)) is None:
        return tensors
    renamed = dict(tensors)
    renamed[rule.theirs[0]] = renamed.pop(copy)
    return renamed


WEIGHTS = "model.safetensors"

INDEX = "model.safetensors.index.json"

OTHER_WEIGHTS = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
    "flax_model.msgpack",
)
"""Weights in formats that are not read, with pickles among them."""

PACKED = ("gpt_oss",)
"""Families that read weights in a format of blocks with scales, and refuse others themselves."""

SHARD = re.compile(r"model-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
"""Name of a part of the weights."""

PICKLES = re.compile(
    r"(pytorch_model|model|consolidated|flax_model|tf_model).*\.(bin|pth|pt|ckpt|msgpack|h5)"
)
"""Names of weights in other formats, in one file or in parts."""

LICENCE = re.compile(r"\A---\n(?:.*\n)*?license: *[\"']?([\w.+-]+)", re.MULTILINE)
"""Licence in the front matter of a model card."""


def open_folder(folder: Path) -> TransformersSource:
    """A folder with config.json and weights; reads descriptions only.

    Raises:
        NotFoundError: it has no weights in safetensors, or a shard is missing.
        OptionError: its family, or a field of its config.json, is not known.
        DataError: a file is damaged, or tensors are missing or unknown.
    """
    config = read_config(folder)
    known = family(config, str(folder / CONFIG))
    stored, files = tensors_of(folder)
    settled, tensors = known.settle(config, stored)
    model, conversion = known.model(settled), known.conversion(settled)
    if config["model_type"] not in PACKED:
        refuse_quantized(config)
    before = set(tensors)
    tensors = as_expected(tensors, conversion)
    if said := _headless(folder, tensors, conversion):
        raise DataError(said)
    conversion.check(tensors, str(folder))
    return TransformersSource(
        path=folder,
        model=model,
        config=config,
        kind="hugging-face",
        tensors=tensors,
        conversion=conversion,
        weight_files=files,
        folder=folder,
        renamed=before != set(tensors),
        licence=_licence(folder),
        notes=notes_of(settled, str(folder / CONFIG)),
    )


def tensors_of(folder: Path) -> tuple[dict[str, MappedTensor], tuple[Path, ...]]:
    """Tensors of a folder by name, and the files that hold them.

    Raises:
        NotFoundError: no safetensors there, or a shard is missing.
        DataError: a file is damaged, or lacks a tensor that the index says it has.
    """
    index = folder / INDEX
    if not index.is_file():
        if (folder / WEIGHTS).is_file():
            return read_header(folder / WEIGHTS)[0], (folder / WEIGHTS,)
        return _without_index(folder)
    refuse_pointer(index)
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        wanted = {str(name): str(file) for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index} is damaged ({error}); copy it again") from error
    names = sorted(set(wanted.values()))
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise NotFoundError(
            f"{folder} lacks {len(missing)} of {len(names)} shards, first {missing[0]}; copy the whole folder"
        )
    shards = {name: read_header(folder / name)[0] for name in names}
    gone = [name for name, file in wanted.items() if name not in shards[file]]
    if gone:
        raise DataError(
            f"{folder / wanted[gone[0]]} lacks {gone[0]}, which {index.name} says it has; copy the folder again"
        )
    tensors = {name: shards[file][name] for name, file in wanted.items()}
    return tensors, tuple(folder / name for name in names)


def _without_index(folder: Path) -> tuple[dict[str, MappedTensor], tuple[Path, ...]]:
    """Tensors of shards that no index lists.

    Raises:
        NotFoundError: there is no shard, or one is missing.
        DataError: two have the same tensor.
    """
    parts = {file: named for file in folder.iterdir() if (named := SHARD.fullmatch(file.name))}
    if not parts:
        raise NotFoundError(_no_weights(folder))
    counts = sorted({int(named["count"]) for named in parts.values()})
    names = [
        f"model-{number:05}-of-{counts[0]:05}.safetensors" for number in range(1, counts[0] + 1)
    ]
    missing = [name for name in names if not (folder / name).is_file()]
    if len(counts) > 1 or missing:
        missed = f"first {missing[0]}" if missing else f"of {' and '.join(map(str, counts))} shards"
        raise NotFoundError(
            f"{folder} has {len(parts)} shards, no {INDEX}, and lacks {len(missing)}, {missed}; copy the whole folder"
        )
    tensors: dict[str, MappedTensor] = {}
    for name in names:
        held = read_header(folder / name)[0]
        if twice := next((key for key in held if key in tensors), None):
            raise DataError(
                f"{folder / name} has {twice}, which another shard has too; copy the folder again"
            )
        tensors |= held
    return tensors, tuple(folder / name for name in names)


def _headless(folder: Path, tensors: Tensors, conversion: Conversion) -> str | None:
    """Advice on a language model that lacks only its last matrix; ``None`` for other models."""
    wanted = {
        name for rule in conversion.rules for place in rule.places() for name in rule.names(place)
    }
    missing = wanted - set(tensors)
    if not missing or not all(name.endswith(COPIES) for name in missing):
        return None
    return f"{folder} lacks {', '.join(sorted(missing))} alone, as AutoModel saves it, and its config.json says that it is not tied to the embedding; save it with AutoModelForCausalLM, or set tie_word_embeddings to true where they are one"


def _no_weights(folder: Path) -> str:
    has = f"{folder} has a {CONFIG} and no {WEIGHTS}"
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    if "adapter_model.safetensors" in names or "adapter_config.json" in names:
        return f"{folder} holds an adapter of PEFT and not the model itself; merge it into its model with PEFT's merge_and_unload, and give what save_pretrained writes then"
    pickles = [name for name in names if name in OTHER_WEIGHTS or PICKLES.fullmatch(name)]
    if pickles:
        return f"{folder} has its weights in {pickles[0]}, which is not read (it may execute code); save it with transformers' save_pretrained, which writes {WEIGHTS}"
    if unfinished := [name for name in names if name.endswith((".incomplete", ".part", ".aria2"))]:
        return f"{has}, and {unfinished[0]} is a download that has not ended; download the folder again"
    if said := gguf_inside(folder):
        return f"{has}; {said}"
    others = [name for name in names if name.endswith(".safetensors")]
    if len(others) == 1:
        return f"{has}; its weights are in {others[0]}: if they are all of the model's, rename it to {WEIGHTS}"
    if others:
        return f"{has}; its weights are in {len(others)} files such as {others[0]}, which no {INDEX} lists: copy that index too"
    return f"{has}; copy the weights too"


def _licence(folder: Path) -> str | None:
    card = folder / "README.md"
    if not card.is_file():
        return None
    match = LICENCE.search(card.read_text(errors="replace"))
    return match[1] if match else None
