"""Folders of Hugging Face: config.json, safetensors in one file or in shards, tokenizer."""

import json
import re
from pathlib import Path

from systolic.artifact.tensors import MappedTensor, read_header
from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import refuse_pointer
from systolic.formats.hugging_face.names import as_expected
from systolic.formats.source import COPIES, TransformersSource, gguf_inside
from systolic.models.decoder.families.mixtures import refuse_quantized
from systolic.models.families import CONFIG, family, read_config
from systolic.models.mapping import Conversion, Tensors
from systolic.models.unread import notes_of

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
    found, files = tensors_of(folder)
    settled, tensors = known.settle(config, found)
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
    found = {name: shards[file][name] for name, file in wanted.items()}
    return found, tuple(folder / name for name in names)


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
        told = f"first {missing[0]}" if missing else f"of {' and '.join(map(str, counts))} shards"
        raise NotFoundError(
            f"{folder} has {len(parts)} shards, no {INDEX}, and lacks {len(missing)}, {told}; copy the whole folder"
        )
    found: dict[str, MappedTensor] = {}
    for name in names:
        held = read_header(folder / name)[0]
        if twice := next((one for one in held if one in found), None):
            raise DataError(
                f"{folder / name} has {twice}, which another shard has too; copy the folder again"
            )
        found |= held
    return found, tuple(folder / name for name in names)


def _headless(folder: Path, tensors: Tensors, conversion: Conversion) -> str | None:
    """What to do about a language model that lacks its last matrix alone."""
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
    found = LICENCE.search(card.read_text(errors="replace"))
    return found[1] if found else None
