"""Folders of CTranslate2: Whisper's weights in a model.bin, under the names of transformers.

A model.bin is a header (format number, name and revision of the model's kind), then each array with its
name, shape, dtype and bytes, then aliases; numbers are little-endian (CTranslate2, ``ModelSpec.save``).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import DataError, OptionError
from systolic.formats.registry import BINARY, BINARY_FORMATS
from systolic.formats.source import TransformersSource
from systolic.models.families import CONFIG, family, read_config
from systolic.models.whisper.config import Whisper
from systolic.models.whisper.families import config as config_of

KIND = "WhisperSpec"
DTYPES = {0: "<f4", 1: "|i1", 2: "<i2", 3: "<i4", 4: "<f2"}
"""CTranslate2's numbers of dtypes; bfloat16 (5) is not read."""
GELU = 3
"""CTranslate2's number of the GELU by the error function."""


@dataclass(frozen=True, kw_only=True)
class BinTensor:
    """Some rows of an array in a model.bin; of projections that are stored as one, those of one of them."""

    raw: np.ndarray
    """The file's bytes, mapped."""
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray:
        """A view of the mapped file."""
        size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        return self.raw[self.offset : self.offset + size].view(self.dtype).reshape(self.shape)

    def part(self, number: int, parts: int) -> "BinTensor":
        """One of equal parts of the first dim."""
        shape = (self.shape[0] // parts, *self.shape[1:])
        size = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        offset = self.offset + number * size
        return BinTensor(raw=self.raw, offset=offset, shape=shape, dtype=self.dtype)


def open_ctranslate2(folder: Path) -> TransformersSource:
    """A Whisper in a folder of CTranslate2; reads descriptions only.

    Raises:
        OptionError: another kind of model, quantized weights, or another structure.
        DataError: the file is damaged.
    """
    file = folder / BINARY
    arrays = read_bin(file)
    for name, known in (("activation", GELU), ("pre_norm", 1), ("scale_embeddings", 0)):
        value = int(arrays[f"decoder/{name}"].read()) if f"decoder/{name}" in arrays else known
        if value != known:
            raise OptionError(f"decoder/{name} of {file} is {value} and only {known} is known")
    try:
        model, tensors = _sizes(arrays), _renamed(arrays)
    except KeyError as error:
        raise DataError(f"{file} lacks {error.args[0]}; convert the model again") from error
    about = read_config(folder) if (folder / CONFIG).is_file() else {}
    config = config_of(model) | {
        "suppress_tokens": about.get("suppress_ids", []),
        "begin_suppress_tokens": about.get("suppress_ids_begin", []),
    }
    conversion = family(config, str(file)).conversion(config)
    conversion.check(tensors, str(file))
    return TransformersSource(
        path=folder,
        model=model,
        config=config,
        kind="ctranslate2",
        tensors=tensors,
        conversion=conversion,
        weight_files=(file,),
        folder=folder,
    )


def read_bin(file: Path) -> dict[str, BinTensor]:
    """Arrays of a model.bin by name, mapped.

    Raises:
        OptionError: it holds another kind of model, or quantized weights.
        DataError: it is damaged.
    """
    raw = np.memmap(file, np.uint8, "r")
    place = 0

    def number(size: int) -> int:
        nonlocal place
        place += size
        return int.from_bytes(raw[place - size : place].tobytes(), "little")

    def text() -> str:
        nonlocal place
        size = number(2)
        place += size
        return raw[place - size : place - 1].tobytes().decode()

    version, kind, _ = number(4), text(), number(4)
    if version not in BINARY_FORMATS or kind != KIND:
        raise OptionError(
            f"{file} is a {kind} in format {version}, and only a {KIND} is read; convert the model from its Hugging Face folder"
        )
    arrays: dict[str, BinTensor] = {}
    for _ in range(number(4)):
        name = text()
        shape = tuple(number(4) for _ in range(number(1)))
        dtype, size = number(1), number(4)
        if dtype not in DTYPES or name.endswith("_scale"):
            raise OptionError(
                f"{name} of {file} is quantized or in bfloat16, which is not read; convert the model with --quantization float16"
            )
        tensor = BinTensor(raw=raw, offset=place, shape=shape, dtype=np.dtype(DTYPES[dtype]))
        place += size
        if size != int(np.prod(shape, dtype=np.int64)) * tensor.dtype.itemsize or place > len(raw):
            raise DataError(f"{file} is damaged at {name}; copy it again")
        arrays[name] = tensor
    return arrays


def _sizes(arrays: Mapping[str, BinTensor]) -> Whisper:
    def layers(side: str) -> int:
        numbers = [re.match(rf"{side}/layer_(\d+)/", name) for name in arrays]
        return 1 + max((int(number[1]) for number in numbers if number), default=-1)

    vocab, width = arrays["decoder/embeddings/weight"].shape
    return Whisper(
        encoder_layers=layers("encoder"),
        decoder_layers=layers("decoder"),
        d_model=width,
        d_ff=arrays["encoder/layer_0/ffn/linear_0/weight"].shape[0],
        heads=int(arrays["encoder/num_heads"].read()),
        vocab=vocab,
        mels=arrays["encoder/conv1/weight"].shape[1],
        frames=arrays["encoder/position_encodings/encodings"].shape[0],
        positions=arrays["decoder/position_encodings/encodings"].shape[0],
    )


def _renamed(arrays: Mapping[str, BinTensor]) -> dict[str, Any]:
    """Tensors under the names of transformers; keys' biases, which are zeros, are left out."""
    renamed: dict[str, Any] = {
        "model.decoder.embed_tokens.weight": arrays["decoder/embeddings/weight"],
    }
    for kind in ("weight", "bias"):
        for conv in ("conv1", "conv2"):
            renamed[f"model.encoder.{conv}.{kind}"] = arrays[f"encoder/{conv}/{kind}"]
    for side in ("encoder", "decoder"):
        renamed[f"model.{side}.embed_positions.weight"] = arrays[
            f"{side}/position_encodings/encodings"
        ]
        _norm(renamed, arrays, f"model.{side}.layer_norm", f"{side}/layer_norm")
    for number in sorted({name.rpartition("/ffn/linear_0/")[0] for name in arrays} - {""}):
        side, _, layer = number.partition("/layer_")
        ours = f"model.{side}.layers.{layer}."
        _norm(renamed, arrays, f"{ours}self_attn_layer_norm", f"{number}/self_attention/layer_norm")
        _norm(renamed, arrays, f"{ours}final_layer_norm", f"{number}/ffn/layer_norm")
        for kind in ("weight", "bias"):
            renamed[f"{ours}fc1.{kind}"] = arrays[f"{number}/ffn/linear_0/{kind}"]
            renamed[f"{ours}fc2.{kind}"] = arrays[f"{number}/ffn/linear_1/{kind}"]
        own = [f"{number}/self_attention/linear_{i}" for i in range(2)]
        _attention(renamed, arrays, f"{ours}self_attn.", (("qkv", own[0]), ("out", own[1])))
        if side == "decoder":
            _norm(
                renamed, arrays, f"{ours}encoder_attn_layer_norm", f"{number}/attention/layer_norm"
            )
            cross = [f"{number}/attention/linear_{i}" for i in range(3)]
            parts = (("q", cross[0]), ("kv", cross[1]), ("out", cross[2]))
            _attention(renamed, arrays, f"{ours}encoder_attn.", parts)
    return renamed


def _norm(renamed: dict[str, Any], arrays: Mapping[str, BinTensor], ours: str, theirs: str) -> None:
    renamed[f"{ours}.weight"], renamed[f"{ours}.bias"] = (
        arrays[f"{theirs}/gamma"],
        arrays[f"{theirs}/beta"],
    )


def _attention(
    renamed: dict[str, Any],
    arrays: Mapping[str, BinTensor],
    ours: str,
    parts: tuple[tuple[str, str], ...],
) -> None:
    """Projections ``q``, ``k``, ``v`` that lie one after another in an array, and the output's."""
    for letters, theirs in parts:
        for kind in ("weight", "bias"):
            whole = arrays[f"{theirs}/{kind}"]
            for number, letter in enumerate(letters if letters != "out" else ("out",)):
                part = whole.part(number, 1 if letters == "out" else len(letters))
                if letter == "k" and kind == "bias":
                    if part.read().any():
                        raise OptionError(
                            f"{theirs}/bias has biases of keys, which Whisper has not; convert the model from its Hugging Face folder"
                        )
                    continue
                renamed[f"{ours}{letter}_proj.{kind}"] = part
