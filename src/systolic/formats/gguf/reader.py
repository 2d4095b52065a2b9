"""GGUF files of llama.cpp: metadata as a config.json, tensors dequantized one at a time under transformers' names.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Read here rather than by the package ``gguf``,
which makes an array of each of the 100,000 words of a vocabulary and takes seconds.
"""

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from systolic.core.errors import (
    DataError,
    NotFoundError,
    OptionError,
    SystolicError,
    extra,
    misspelt,
)
from systolic.core.files import refuse_pointer
from systolic.formats.gguf.tokenizer import token_id
from systolic.formats.source import TransformersSource
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.options import RopeScaling, Stretching
from systolic.models.families import family

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f"},
    **{7: "<?", 10: "<Q", 11: "<q", 12: "<d"},
}
"""Kinds of numbers, in :mod:`struct`'s words."""
ALIGNMENT = 32
"""Default of ``general.alignment``, in bytes."""
MOST_DIMS = 8
MOST_DEPTH = 4
"""Lists within lists of a field."""
PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of a part of a split file, counted from 1 (llama.cpp's ``gguf-split``)."""
COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
"""Fields of a part: parts in all, its own number from 0, and the tensors of all."""
LAYERS_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of Gemma 27B, by which llama.cpp knows the one size whose products of attention are scaled by hidden size over heads."""
CAPS = {"attention": 50.0, "final": 30.0}
"""Soft caps of a Gemma 2 whose file gives none."""
FREQUENCIES = "rope_freqs.weight"
"""Tensor of the numbers that the frequencies of rotary embeddings are divided by."""
PUBLISHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Numbers of Llama 3.1, 3.2 and 3.3, which no field of a file has."""
ORIGINAL = "rope.scaling.original_context_length"
Fields = Mapping[str, Any]
"""Metadata by name."""
Edit = Callable[[np.ndarray], np.ndarray]
EVERY_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
"""Tensors that a layer of every architecture has: matrices of attention and MLP, and the norm before attention."""
TWO_NORMS = {**EVERY_LAYER, "ffn_norm": "post_attention_layernorm"}
"""Tensors of a layer with two norms."""
QUERY_KEY_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
"""Norms of queries and keys, in addition."""
FOUR_NORMS = {
    **EVERY_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Tensors of a layer with four norms."""
PLAIN = ("F32", "F16", "BF16")
"""Kinds of numbers that are read as they are."""
LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
EMBEDDING, OUTPUT, LAST_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
WHOLE = {
    EMBEDDING: "model.embed_tokens.weight",
    OUTPUT: "lm_head.weight",
    LAST_NORM: "model.norm.weight",
}
"""Tensors outside the layers to transformers' names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufPlace:
    """A tensor's place in a file."""

    shape: tuple[int, ...]
    """Outermost dim first."""
    kind: Any
    """Quantization (``GGMLQuantizationType``)."""
    offset: int
    """Place of its first byte in the file."""
    bytes: int
    file: Path
    """The file itself, or the part of it that has the tensor."""


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Metadata of a GGUF file, and the places of its tensors."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufPlace]

    @classmethod
    def of(cls, path: Path) -> "GgufHeader":
        """The header of a file.

        Raises:
            ValueError: the file is none, or damaged.
        """
        refuse_pointer(path)
        with path.open("rb") as file:
            if path.stat().st_size < len(MAGIC):
                raise ValueError("it is too short")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Cursor(content, path).header()


def read_parts(path: Path) -> tuple[GgufHeader, tuple[Path, ...]]:
    """The header of a file, of all its parts where it is split, and the files; any part names them all.

    Raises:
        NotFoundError: a part is missing.
        DataError: the parts are not those of one file.
        ValueError: a file is none, or damaged.
    """
    first = GgufHeader.of(path)
    count = first.fields.get(COUNT, 1)
    if not isinstance(count, int) or count <= 1:
        return first, (path,)
    number = first.fields.get(NUMBER)
    named = PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise DataError(
            f"{path} is one of {count} parts of a split model (its {NUMBER} is {number}), and its name is not that of a part, such as model-00001-of-{count:05}.gguf; give the parts their names back"
        )
    files = [
        path.with_name(f"{named['name']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)
    ]
    if missing := [file.name for file in files if not file.is_file()]:
        raise NotFoundError(
            f"{path} is one of {count} parts of a split model, and {len(missing)} are missing beside it, first {missing[0]}; copy all parts into one folder"
        )
    headers = [first if file == path else _part(file) for file in files]
    places: dict[str, GgufPlace] = {}
    for place, (file, header) in enumerate(zip(files, headers, strict=True)):
        if header.fields.get(COUNT) != count or header.fields.get(NUMBER) != place:
            raise DataError(
                f"{file} says that it is part {header.fields.get(NUMBER)} (from 0) of {header.fields.get(COUNT)}, and its name says {place} of {count}; copy the parts again"
            )
        if twice := next((name for name in header.tensors if name in places), None):
            raise DataError(f"{file} has {twice}, which another part has too; copy the parts again")
        places |= header.tensors
    whole = headers[0].fields.get(TENSORS, len(places))
    if whole != len(places):
        raise DataError(
            f"the {count} parts of {path} have {len(places)} tensors and should have {whole}; copy them again"
        )
    return GgufHeader(fields=headers[0].fields, tensors=places), tuple(files)


def _part(file: Path) -> GgufHeader:
    try:
        return GgufHeader.of(file)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{file} is no intact part of a GGUF file ({error}); copy it again"
        ) from error


class _Cursor:
    """A place in a file that moves over what is read."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self.content, self.at, self.path = content, 0, path

    def header(self) -> GgufHeader:
        if self.taken(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        if (version := self.number("<I")) not in VERSIONS:
            raise ValueError(f"version {version} is not known")
        num_tensors, num_fields = self.number("<Q"), self.number("<Q")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self.text()
            if name in fields:
                raise ValueError(f"it has two fields {name}")
            fields[name] = self.value(self.number("<I"))
        infos = [self._info() for _ in range(num_tensors)]
        unit = fields.get("general.alignment", ALIGNMENT)
        if not isinstance(unit, int) or unit < 1:
            raise ValueError(f"general.alignment is {str(unit)[:40]}")
        start = -(-self.at // unit) * unit
        tensors: dict[str, GgufPlace] = {}
        for name, shape, kind, offset, size in infos:
            if name in tensors:
                raise ValueError(f"it has two tensors {name}")
            if start + offset + size > len(self.content):
                raise ValueError(f"it ends within {name}")
            tensors[name] = GgufPlace(
                shape=shape, kind=kind, offset=start + offset, bytes=size, file=self.path
            )
        return GgufHeader(fields=fields, tensors=tensors)

    def _info(self) -> tuple[str, tuple[int, ...], Any, int, int]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dims = self.text(), self.number("<I")
        if dims > MOST_DIMS:
            raise ValueError(f"{name} has {dims} dims")
        shape = tuple(self.number("<Q") for _ in range(dims))[::-1]
        at, number = self.at, self.number("<I")
        if number not in GGML_QUANT_SIZES:
            raise ValueError(f"{name[:80]} is of the unknown kind {number}, at byte {at:,}")
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        elements = math.prod(shape)
        return name, shape, kind, self.number("<Q"), elements // block * size

    def taken(self, count: int) -> bytes:
        # Asked before anything is copied: a damaged length may be that of the whole file.
        if count > len(self.content) - self.at:
            raise ValueError("it ends within its header")
        content = self.content[self.at : self.at + count]
        self.at += count
        return content

    def number(self, kind: str) -> Any:
        (number,) = struct.unpack(kind, self.taken(struct.calcsize(kind)))
        return number

    def text(self) -> str:
        content = self.taken(self.number("<Q"))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            place = self.at - len(content) + error.start
            raise ValueError(f"damaged at byte {place:,}: text there is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            if depth > MOST_DEPTH:
                raise ValueError("a field is a list of lists of lists")
            return self._array(self.number("<I"), self.number("<Q"), depth + 1)
        if kind not in SCALARS:
            raise ValueError(f"a field is of the unknown kind {kind}")
        return self.number(SCALARS[kind])

    def _array(self, kind: int, count: int, depth: int) -> list[Any]:
        if count > len(self.content) - self.at:
            raise ValueError("it ends within its header")
        if kind in SCALARS and kind != BOOL:
            dtype = np.dtype(SCALARS[kind])
            return np.frombuffer(self.taken(count * dtype.itemsize), dtype).tolist()
        read: Callable[[], Any] = self.text if kind == STRING else lambda: self.value(kind, depth)
        return [read() for _ in range(count)]


def same(array: np.ndarray) -> np.ndarray:
    """The tensor itself."""
    return array


def unrotated(heads: int, array: np.ndarray) -> np.ndarray:
    """Rows of a query or key projection [heads * dim, ...] in transformers' order.

    llama.cpp rotates neighbouring pairs of a head's dims, transformers the first half with the second.
    """
    rows, *rest = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(array.shape)


def rotated(heads: int, array: np.ndarray) -> np.ndarray:
    """Rows of a query or key projection [heads * dim, ...] in llama.cpp's order, see :func:`unrotated`."""
    rows, *rest = array.shape
    pairs = array.reshape(heads, 2, rows // heads // 2, *rest)
    return pairs.swapaxes(1, 2).reshape(array.shape)


def less_one(array: np.ndarray) -> np.ndarray:
    """A norm's scale as Gemma has it, relative to one."""
    return array - array.dtype.type(1)


def plus_one(array: np.ndarray) -> np.ndarray:
    """A norm's scale as llama.cpp has it, float32."""
    return array.astype(np.float32) + np.float32(1)


@dataclass(frozen=True, kw_only=True)
class TensorChange:
    """A difference between a tensor of transformers and that of a GGUF file."""

    read: Edit = same
    """The tensor of a file as transformers has it."""
    write: Edit = same
    """The inverse."""


NONE = TensorChange()

OFFSET = TensorChange(read=less_one, write=plus_one)


def rotation(heads: int) -> TensorChange:
    """Order of the rows of a projection of so many heads."""
    return TensorChange(read=partial(unrotated, heads), write=partial(rotated, heads))


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp as a family of transformers."""

    config: Callable[[Fields, "Reader"], dict[str, Any]]
    """Fields of its config.json."""
    layer: Mapping[str, str]
    """Names of a layer's tensors to transformers' names."""
    changes: Callable[[Decoder], Mapping[str, TensorChange]] = lambda _: {}
    """Changes by transformers' names in a layer, without ``.weight`` or ``.bias``."""
    norm: TensorChange = NONE
    """Change of the last norm."""


class Reader:
    """Metadata and places of the tensors of a GGUF file.

    Raises:
        MissingExtraError: the package ``gguf`` is not installed.
        DataError: the file is none, or damaged.
    """

    def __init__(self, path: Path) -> None:
        with extra("reading a GGUF file", "gguf"):
            import gguf  # noqa: F401 (fails where the package lacks, before anything is read)
        try:
            header, self.files = read_parts(path)
            self.fields, self.tensors = header.fields, header.tensors
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{path} is no intact GGUF file ({reason}); copy it again") from error
        self.path = path

    def count(self, name: str, default: int | None = None) -> int:
        """A field that counts something.

        Raises:
            DataError: it is absent and has no default, or is no number from 1.
        """
        number = self.need(name) if default is None else self.fields.get(name, default)
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**31:
            raise DataError(
                f"{self.path} has a {name} of {str(number)[:40]}, and it is a number from 1; convert the model again"
            )
        return number

    def token(self, name: str) -> int | None:
        """The id of a special token; ``None`` where there is none, which some files write as 4294967295."""
        return token_id(self.fields, name)

    def need(self, name: str) -> Any:
        """A field.

        Raises:
            DataError: it is absent.
        """
        if name not in self.fields:
            raise DataError(f"{self.path} has no {name}; convert the model again")
        return self.fields[name]


# Reading


def _shared(fields: Fields, reader: Reader) -> dict[str, Any]:
    """Fields of a config.json that all architectures have."""
    kind = reader.need("general.architecture")

    def own(name: str, default: int | None = None) -> int:
        return reader.count(f"{kind}.{name}", default)

    heads, width = own("attention.head_count"), own("embedding_length")
    head_dim = own("attention.key_length", max(width // heads, 1))
    if (layers := own("block_count")) > len(reader.tensors):
        raise DataError(
            f"{reader.path} has {layers} layers by its {kind}.block_count and {len(reader.tensors)} tensors; copy or convert it again"
        )
    if (rotated := fields.get(f"{kind}.rope.dimension_count", head_dim)) != head_dim:
        raise OptionError(
            f"{reader.path} rotates {rotated} of a head's {head_dim} dims and only all are known; import the Hugging Face folder of this model"
        )
    token = reader.tensors.get("token_embd.weight")
    if token is None:
        raise DataError(f"{reader.path} has no token_embd.weight; copy the whole file")
    tokens = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    named = {k: reader.token(v) for k, v in tokens.items()}
    return {
        "vocab_size": token.shape[0],
        "hidden_size": width,
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": own("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": own("context_length"),
        "rope_theta": _single(fields.get(f"{kind}.rope.freq_base", 10_000.0)),
        "rms_norm_eps": _single(reader.need(f"{kind}.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in reader.tensors,
        **{name: value for name, value in named.items() if value is not None},
    }


def _single(value: float) -> float:
    """A number as it was written before it was stored in float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _llama(fields: Fields, reader: Reader) -> dict[str, Any]:
    if fields.get("llama.expert_count"):
        raise OptionError(
            f"{reader.path} is a mixture of experts, which is not read from GGUF; import the Hugging Face folder of this model"
        )
    config = _shared(fields, reader)
    return {
        **config,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in reader.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in reader.tensors,
        "rope_scaling": _stretched(fields, reader, config) or _linear(fields, reader),
    }


def _qwen(fields: Fields, reader: Reader) -> dict[str, Any]:
    kind = reader.need("general.architecture")
    return {
        **_shared(fields, reader),
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "hidden_act": "silu",
        "rope_scaling": _linear(fields, reader),
    } | ({"attention_bias": "blk.0.attn_q.bias" in reader.tensors} if kind == "qwen3" else {})


def _gemma2(fields: Fields, reader: Reader) -> dict[str, Any]:
    """Fields of a Gemma 2."""
    return {
        **_gemma(fields, reader, every=2, window=4096),
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "rope_scaling": _linear(fields, reader),
        "attn_logit_softcapping": fields.get("gemma2.attn_logit_softcapping", CAPS["attention"]),
        "final_logit_softcapping": fields.get("gemma2.final_logit_softcapping", CAPS["final"]),
    }


def _gemma3(fields: Fields, reader: Reader) -> dict[str, Any]:
    """Fields of a Gemma 3."""
    config = _gemma(fields, reader, every=6, window=None)
    config["rope_theta"] = _single(fields.get("gemma3.rope.freq_base", 1_000_000.0))
    return {
        **config,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_scaling": _linear(fields, reader),
        "rope_local_base_freq": _single(fields.get("gemma3.rope.freq_base_swa", 10_000.0)),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": fields.get("gemma3.final_logit_softcapping") or None,
    }


def _gemma(fields: Fields, reader: Reader, *, every: int, window: int | None) -> dict[str, Any]:
    """Fields of both.

    Where the file is silent, llama.cpp's code for the architecture says them (``src/models/gemma3.cpp``).

    Args:
        fields: Metadata.
        reader: The file.
        every: Period of the layers without a window, where the file gives none.
        window: Window, where the file gives none.
    """
    config, kind = _shared(fields, reader), reader.need("general.architecture")
    layers = config["num_hidden_layers"]
    every = fields.get(f"{kind}.attention.sliding_window_pattern", every)
    window = fields.get(f"{kind}.attention.sliding_window", window)
    if not isinstance(every, int):
        raise OptionError(
            f"{reader.path} names the layers with a window one by one and only a period of them is known; import the Hugging Face folder of this model"
        )
    width, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads
        if layers == LAYERS_27B[kind]
        else config["head_dim"],
        # transformers wants one also where no layer has it.
        "sliding_window": window or 512,
        "layer_types": [
            "sliding_attention" if window and (i + 1) % every else "full_attention"
            for i in range(layers)
        ],
    }


def _linear(fields: Fields, reader: Reader) -> dict[str, Any] | None:
    """``rope_scaling`` of a linear kind; of a Gemma 3 above 1B the layers of full attention alone are stretched.

    Raises:
        OptionError: it is of another kind.
    """
    name = reader.need("general.architecture")
    kind = fields.get(f"{name}.rope.scaling.type") or "none"
    factor = fields.get(f"{name}.rope.scaling.factor") or fields.get(f"{name}.rope.scale_linear")
    if kind == "none" and (not factor or factor == 1):
        return None
    # llama.cpp takes a factor without a type as linear.
    if kind not in ("none", "linear") or not factor:
        raise OptionError(
            f"{reader.path} has rope.scaling.type {kind!r} with the factor {factor} and only linear with a factor is known for {name}; import the Hugging Face folder of this model"
        )
    return {"rope_type": "linear", "factor": _single(factor)}


def _stretched(fields: Fields, reader: Reader, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """``rope_scaling`` of Llama 3.1 and its successors, which a file has as the numbers that result from it.

    Raises:
        OptionError: they are not those of the published constants.
    """
    place = reader.tensors.get(FREQUENCIES)
    if place is None:
        return None
    stored = np.fromfile(place.file, np.float32, place.shape[0], offset=place.offset)
    size, factor = config["head_dim"], float(stored.max(initial=0.0))
    if place.kind.name != "F32" or stored.shape != (size // 2,) or not 1 < factor < np.inf:
        raise OptionError(_unknown(reader))
    scaling = RopeScaling(
        kind=Stretching.llama3,
        factor=factor,
        original_positions=fields.get(f"llama.{ORIGINAL}", 8192),
        low_freq_factor=PUBLISHED["low_freq_factor"],
        high_freq_factor=PUBLISHED["high_freq_factor"],
    )
    if not np.allclose(divisors(scaling, config["rope_theta"], size), stored, rtol=1e-4):
        raise OptionError(_unknown(reader))
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_positions,
        **PUBLISHED,
    }


def _unknown(reader: Reader) -> str:
    return f"{reader.path} scales its rotary embedding and does not say how in terms of a config.json; import the Hugging Face folder of this model"


def divisors(scaling: RopeScaling, theta: float, size: int) -> np.ndarray:
    """Numbers float32[size / 2] that llama3's rule divides the frequencies of rotary embeddings by.

    Args:
        scaling: Of the kind llama3.
        theta: Base of the wavelengths.
        size: Dims of a head.
    """
    waves = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
    turns = scaling.original_positions / waves
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - kept) / scaling.factor + kept)).astype(np.float32)


def _rotations(model: Decoder) -> dict[str, TensorChange]:
    return {
        "self_attn.q_proj": rotation(model.heads),
        "self_attn.k_proj": rotation(model.kv_heads),
    }


def _offsets(names: Mapping[str, str]) -> Callable[[Decoder], Mapping[str, TensorChange]]:
    """Changes of all norms of a layer."""
    norms = [theirs for name, theirs in names.items() if name.endswith("norm")]
    return lambda _: dict.fromkeys(norms, OFFSET)


ARCHITECTURES = {
    "llama": Architecture(config=_llama, layer=TWO_NORMS, changes=_rotations),
    "qwen2": Architecture(config=_qwen, layer=TWO_NORMS),
    "qwen3": Architecture(config=_qwen, layer={**TWO_NORMS, **QUERY_KEY_NORMS}),
    "gemma2": Architecture(
        config=_gemma2,
        layer=FOUR_NORMS,
        changes=_offsets(FOUR_NORMS),
        norm=OFFSET,
    ),
    "gemma3": Architecture(
        config=_gemma3,
        layer={**FOUR_NORMS, **QUERY_KEY_NORMS},
        changes=_offsets({**FOUR_NORMS, **QUERY_KEY_NORMS}),
        norm=OFFSET,
    ),
}
"""Architectures by llama.cpp's name (``general.architecture``)."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor of a GGUF file, mapped and dequantized when it is read."""

    file: Path
    offset: int
    stored: tuple[int, ...]
    """Shape of the stored bytes."""
    kind: Any
    """Quantization (``GGMLQuantizationType``)."""
    shape: tuple[int, ...]
    dtype: np.dtype
    change: Edit

    def read(self) -> np.ndarray:
        """The tensor as transformers has it."""
        import gguf

        raw = np.memmap(self.file, np.uint8, "r", self.offset, self.stored)
        if self.kind.name in PLAIN:
            return self.change(raw.view(self.dtype))
        return self.change(gguf.quants.dequantize(raw, self.kind))


def open_gguf(path: Path) -> TransformersSource:
    """A GGUF file as a source; its tokenizer is rebuilt once and kept in the cache.

    Raises:
        MissingExtraError: the package ``gguf`` or ``tokenizers`` is not installed.
        DataError: the file is damaged, or tensors are missing or unknown.
        OptionError: an architecture, a tokenizer or a field that is not known.
    """
    reader = Reader(path)
    try:
        return _opened(reader)
    except SystolicError:
        raise
    except (
        Exception
    ) as error:  # A file may say anything; the library of tokenizers raises bare Exception.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"{path} has metadata that contradict themselves or are damaged ({reason}); copy or convert it again"
        ) from error


def _opened(reader: Reader) -> TransformersSource:
    from systolic.formats.gguf.tokenizer import tokenizer_folder, unknown_ids

    path, kind = reader.path, reader.need("general.architecture")
    if reader.fields.get("general.type") == "adapter":
        raise OptionError(
            f"{path} is a low-rank adapter of llama.cpp and no model; give the PEFT folder that it was converted from"
        )
    if kind not in ARCHITECTURES:
        raise OptionError(
            f"{path} has the architecture {str(kind)[:60]!r}{misspelt(str(kind), ARCHITECTURES)}; read are {', '.join(ARCHITECTURES)}: import the Hugging Face folder of this model"
        )
    architecture = ARCHITECTURES[kind]
    config = architecture.config(reader.fields, reader)
    known = family(config, str(path))
    model, conversion = known.model(config), known.conversion(config)
    assert isinstance(model, Decoder)
    tensors = _tensors(reader, architecture, model)
    conversion.check(tensors, str(path))
    licence = reader.fields.get("general.license")
    return TransformersSource(
        path=path,
        model=model,
        config=config,
        kind="gguf",
        tensors=tensors,
        conversion=conversion,
        weight_files=reader.files,
        folder=tokenizer_folder(path, reader.fields),
        licence=licence if isinstance(licence, str) else None,
        notes=unknown_ids(path, reader.fields),
    )


def _tensors(reader: Reader, architecture: Architecture, model: Decoder) -> dict[str, GgufTensor]:
    """Tensors by transformers' names; unknown ones keep theirs, for the check to name."""
    changes = architecture.changes(model)
    tensors = {}
    for theirs, tensor in reader.tensors.items():
        if theirs == FREQUENCIES:
            continue  # part of the configuration
        name, change = WHOLE.get(theirs, theirs), NONE
        if theirs == LAST_NORM:
            change = architecture.norm
        elif (parts := LAYER.fullmatch(theirs)) and parts[2] in architecture.layer:
            part = architecture.layer[parts[2]]
            name, change = f"model.layers.{parts[1]}.{part}.{parts[3]}", changes.get(part, NONE)
        if not _is_read(tensor.kind):
            raise OptionError(
                f"{tensor.file} has {theirs} stored as {tensor.kind.name}, which is not read; convert the model again as F16 or Q8_0"
            )
        tensors[name] = _tensor(tensor, change.read)
    return tensors


@lru_cache
def _is_read(kind: Any) -> bool:
    """Whether the package ``gguf`` makes floats of a kind of stored numbers."""
    import gguf

    _, size = gguf.constants.GGML_QUANT_SIZES[kind]
    if kind.name in PLAIN:
        return True
    try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except (NotImplementedError, ValueError, KeyError):
        return False
    return True


def _tensor(place: GgufPlace, change: Edit) -> GgufTensor:
    kept = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
    rows = place.shape[:-1]
    return GgufTensor(
        file=place.file,
        offset=place.offset,
        stored=(*rows, place.bytes // max(math.prod(rows), 1)),
        kind=place.kind,
        shape=place.shape,
        dtype=kept.get(place.kind.name, np.dtype(np.float32)),
        change=change,
    )
