"""``python -m systolic.formats.hugging_face.reference``: outputs of transformers for :mod:`systolic.formats.parity`.

Reads one JSON object from stdin: ``path`` of the model, ``inputs`` (an .npz of arguments by name), ``loader`` (class
of transformers), ``outputs`` (fields of its answer), ``rounded`` (dtype that weights are rounded to, or null), ``texts`` for its tokenizer and ``out``,
the .npz to write.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import DataError
from systolic.core.machine import end_with
from systolic.formats.source import (
    COPIES,
    GGUF,
    STATE_DICTS,
    TransformersSource,
    is_ctranslate2,
    open_source,
)
from systolic.models.families import CONFIG

DROPPED = (
    "rope_scaling",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "layer_types",
    "final_logit_softcapping",
)
"""Fields of our configuration of a GGUF file that transformers' reader of such files leaves at their defaults."""
UNREAD = ("num_batches_tracked", "proj_out.weight")
"""Ends of names that files may lack: a counter that nothing reads, and logits tied to the embedding."""


def opened(path: Path, loader: Any, rounded: str | None = None) -> Any:
    """The model in float32, its weights rounded to another dtype before where one is given; its own code, if it has any, is not executed."""
    import torch

    place: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == GGUF:
        place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        place["config"] = whole_config(path)
    if path.suffix in STATE_DICTS or is_ctranslate2(path) or has_other_names(path):
        model = renamed(path, loader)
    else:
        model = loader.from_pretrained(**place, dtype=torch.float32, trust_remote_code=False)
    if rounded is not None:
        # What files hold: tables of wavelengths, which are computed, stay as they are.
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(tensor.to(getattr(torch, rounded)))
    return model


def whole_config(path: Path) -> Any:
    """The configuration that transformers reads from a GGUF file, with the fields that it leaves out (5.23)."""
    import transformers

    read = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    fields = open_source(path).config
    more = {name: fields[name] for name in DROPPED if fields.get(name) is not None}
    if not more:
        return read
    found = read.to_dict() | more
    if "layer_types" in more:
        found.pop("sliding_window_pattern", None)
    return transformers.AutoConfig.for_model(found.pop("model_type"), **found)


def has_other_names(path: Path) -> bool:
    """Whether a folder has its tensors under names that transformers may not know."""
    if not (path / CONFIG).is_file():
        return False
    source = open_source(path)
    return isinstance(source, TransformersSource) and source.renamed


def renamed(path: Path, loader: Any) -> Any:
    """A model whose file has the names of another library, with the same tensors under those of transformers.

    Raises:
        DataError: tensors are missing or unknown.
    """
    import torch
    import transformers

    source = open_source(path)
    assert isinstance(source, TransformersSource)
    fields = dict(source.config)
    kind = fields.pop("model_type")
    model = loader.from_config(transformers.AutoConfig.for_model(kind, **fields))
    given = {
        name: torch.from_numpy(np.array(tensor.read(), np.float32))
        for name, tensor in source.tensors.items()
    }
    lacking, unknown = model.load_state_dict(given, strict=False)
    unread = (*UNREAD, *COPIES) if fields.get("tie_word_embeddings", True) else UNREAD
    wrong = [*unknown, *(name for name in lacking if not name.endswith(unread))]
    if wrong:
        raise DataError(
            f"{path} and transformers' {kind} do not both have {wrong[0]}; report it with the file"
        )
    model.tie_weights()
    return model


def compute(model: Any, inputs: dict[str, np.ndarray], outputs: list[str]) -> np.ndarray:
    """Outputs float32[rows, ..., n]; several are joined, one position after another."""
    import torch

    given = {name: torch.from_numpy(value) for name, value in inputs.items()}
    with torch.no_grad():
        answer = model.eval()(**given)
    found = [answer[name].float().numpy() for name in outputs]
    if len(found) == 1:
        return found[0]
    return np.concatenate([one.reshape(len(one), -1, one.shape[-1]) for one in found], axis=1)


def words(path: Path, texts: list[str]) -> list[tuple[list[int], str]]:
    """Ids of texts with the special tokens around them, and the texts of those ids without; [] where transformers has no tokenizer for a folder."""
    if not texts:
        return []
    import transformers

    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        found = [tokenizer(text, padding=False, truncation=False)["input_ids"] for text in texts]
        return [(ids, tokenizer.decode(ids, skip_special_tokens=True)) for ids in found]
    except (
        Exception
    ):  # Classes that need other packages or files; the outputs are compared all the same.
        return []


def main() -> None:
    """Computes what stdin asks for."""
    end_with(os.getppid())
    import transformers

    asked = json.load(sys.stdin)
    transformers.logging.set_verbosity_error()
    model = opened(Path(asked["path"]), getattr(transformers, asked["loader"]), asked["rounded"])
    with np.load(asked["inputs"]) as inputs:
        found = compute(model, dict(inputs), asked["outputs"])
    np.savez(
        asked["out"],
        found=found,
        framework=f"transformers {transformers.__version__}",
        words=json.dumps(words(Path(asked["path"]), asked["texts"])),
    )


if __name__ == "__main__":
    main()
