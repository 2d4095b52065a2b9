"""Folders of Hugging Face: config.json, safetensors in one file or in shards, tokenizer."""

import json
import re
from pathlib import Path

from systolic.artifact.tensors import MappedTensor, read_header
from systolic.core.errors import DataError, NotFoundError
from systolic.interop.source import TransformersSource
from systolic.models.decoder.families.mixtures import refuse_quantized
from systolic.models.families import CONFIG, family, read_config
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
        if not (folder / WEIGHTS).is_file():
            raise NotFoundError(_no_weights(folder))
        return read_header(folder / WEIGHTS)[0], (folder / WEIGHTS,)
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


def _no_weights(folder: Path) -> str:
    other = next((name for name in OTHER_WEIGHTS if (folder / name).is_file()), None)
    if other is None:
        return f"{folder} has a {CONFIG} and no {WEIGHTS}; copy the weights too"
    return f"{folder} has its weights in {other}, which is not read (it may execute code); save it with transformers' save_pretrained, which writes {WEIGHTS}"


def _licence(folder: Path) -> str | None:
    card = folder / "README.md"
    if not card.is_file():
        return None
    found = LICENCE.search(card.read_text(errors="replace"))
    return found[1] if found else None
