"""GGUF files of llama.cpp: metadata as a config.json, tensors dequantized one at a time under transformers' names.

Names and metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What llama.cpp's converter changed
in the weights (``convert_hf_to_gguf.py``) is undone: the order of the rows of Llama's queries and keys, and the
one that is added to Gemma's norms.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from systolic.core.errors import DataError, MissingExtraError, OptionError, nearest
from systolic.interop.gguf_header import GgufHeader, GgufPlace
from systolic.interop.source import TransformersSource
from systolic.models.families import family

GEMMA3 = "gemma3.attention"
LAYERS_27B = 62
"""Layers of Gemma 3 27B, by which llama.cpp knows the one size whose products of attention are scaled by hidden size over heads."""
LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")

Fields = Mapping[str, Any]
"""Metadata by name."""
Change = Callable[[np.ndarray], np.ndarray]


def same(array: np.ndarray) -> np.ndarray:
    """The tensor itself."""
    return array


def unrotated(heads: int, array: np.ndarray) -> np.ndarray:
    """Rows of a query or key projection [heads * dim, inputs] in transformers' order.

    llama.cpp rotates neighbouring pairs of a head's dims, transformers the first half with the second.
    """
    rows, inputs = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(rows, inputs)


def less_one(array: np.ndarray) -> np.ndarray:
    """A norm's scale as Gemma has it, relative to one."""
    return array - array.dtype.type(1)


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
    change: Change

    def read(self) -> np.ndarray:
        """The tensor as transformers has it."""
        import gguf

        raw = np.memmap(self.file, np.uint8, "r", self.offset, self.stored)
        if self.kind.name in ("F32", "F16", "BF16"):
            return self.change(raw.view(self.dtype))
        return self.change(gguf.quants.dequantize(raw, self.kind))


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp as a family of transformers."""

    config: Callable[[Fields, "Reader"], dict[str, Any]]
    """Fields of its config.json."""
    layer: Mapping[str, str]
    """Names of a layer's tensors to transformers' names."""
    changes: Callable[[Fields], Mapping[str, Change]]
    """What to undo, by transformers' names in a layer."""
    norm: Change = same
    """What to undo in the last norm."""


class Reader:
    """Metadata and places of the tensors of a GGUF file.

    Raises:
        MissingExtraError: the package ``gguf`` is not installed.
        DataError: the file is none, or damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf  # noqa: F401 (fails where the package lacks, before anything is read)
        except ImportError as error:
            raise MissingExtraError("reading a GGUF file", "gguf") from error
        try:
            header = GgufHeader.of(path)
            self.fields, self.tensors = header.fields, header.tensors
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise DataError(f"{path} is no intact GGUF file ({error}); copy it again") from error
        self.path = path

    def need(self, name: str) -> Any:
        """A field.

        Raises:
            DataError: it is absent.
        """
        if name not in self.fields:
            raise DataError(f"{self.path} has no {name}; convert the model again")
        return self.fields[name]


def _shared(fields: Fields, reader: Reader) -> dict[str, Any]:
    """Fields of a config.json that all architectures have."""
    kind = reader.need("general.architecture")

    def own(name: str) -> Any:
        return reader.need(f"{kind}.{name}")

    heads, width = own("attention.head_count"), own("embedding_length")
    head_dim = fields.get(f"{kind}.attention.key_length", width // heads)
    if (rotated := fields.get(f"{kind}.rope.dimension_count", head_dim)) != head_dim:
        raise OptionError(
            f"{reader.path} rotates {rotated} of a head's {head_dim} dims and only all are known; import the Hugging Face folder of this model"
        )
    token = reader.tensors.get("token_embd.weight")
    if token is None:
        raise DataError(f"{reader.path} has no token_embd.weight; copy the whole file")
    tokens = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    named = {k: fields.get(f"tokenizer.ggml.{v}_token_id") for k, v in tokens.items()}
    return {
        "vocab_size": token.shape[0],
        "hidden_size": width,
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": own("context_length"),
        "rope_theta": _single(fields.get(f"{kind}.rope.freq_base", 10_000.0)),
        "rms_norm_eps": _single(own("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in reader.tensors,
        **{name: value for name, value in named.items() if value is not None},
    }


def _single(value: float) -> float:
    """A number as it was written before it was stored in float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _llama(fields: Fields, reader: Reader) -> dict[str, Any]:
    kind = fields.get("llama.rope.scaling.type") or "none"
    # llama.cpp takes a factor without a type as linear.
    factor = fields.get("llama.rope.scaling.factor") or fields.get("llama.rope.scale_linear") or 1
    if "rope_freqs.weight" in reader.tensors or kind != "none" or factor != 1:
        raise OptionError(
            f"{reader.path} scales its rotary embedding and does not say how in terms of a config.json; import the Hugging Face folder of this model"
        )
    if fields.get("llama.expert_count"):
        raise OptionError(
            f"{reader.path} is a mixture of experts, which is not read from GGUF; import the Hugging Face folder of this model"
        )
    return {
        **_shared(fields, reader),
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
    }


def _gemma3(fields: Fields, reader: Reader) -> dict[str, Any]:
    """Fields of a Gemma 3.

    Where the file is silent, llama.cpp's code for the architecture says them (``src/models/gemma3.cpp``).
    """
    made = _shared(fields, reader)
    layers, every = made["num_hidden_layers"], fields.get(f"{GEMMA3}.sliding_window_pattern", 6)
    window = fields.get(f"{GEMMA3}.sliding_window")
    if not isinstance(every, int):
        raise OptionError(
            f"{reader.path} names the layers with a window one by one and only a period of them is known; import the Hugging Face folder of this model"
        )
    made["rope_theta"] = _single(fields.get("gemma3.rope.freq_base", 1_000_000.0))
    width, heads = made["hidden_size"], made["num_attention_heads"]
    return {
        **made,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_scaling": _linear(fields, reader),
        "rope_local_base_freq": _single(fields.get("gemma3.rope.freq_base_swa", 10_000.0)),
        "query_pre_attn_scalar": width // heads if layers == LAYERS_27B else made["head_dim"],
        # transformers wants one also where no layer has it.
        "sliding_window": window or 512,
        "layer_types": [
            "sliding_attention" if window and (i + 1) % every else "full_attention"
            for i in range(layers)
        ],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": fields.get("gemma3.final_logit_softcapping") or None,
    }


def _linear(fields: Fields, reader: Reader) -> dict[str, Any] | None:
    """``rope_scaling`` of a Gemma 3 above 1B, whose layers of full attention alone are stretched.

    Raises:
        OptionError: it is of another kind.
    """
    kind = fields.get("gemma3.rope.scaling.type") or "none"
    factor = fields.get("gemma3.rope.scaling.factor")
    if kind == "none" and not factor:
        return None
    # llama.cpp takes a factor without a type as linear.
    if kind not in ("none", "linear") or not factor:
        raise OptionError(
            f"{reader.path} has rope.scaling.type {kind!r} with the factor {factor} and only linear with a factor is known for gemma3; import the Hugging Face folder of this model"
        )
    return {"rope_type": "linear", "factor": _single(factor)}


ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
ARCHITECTURES = {
    "llama": Architecture(
        config=_llama,
        layer={**ATTENTION, "ffn_norm": "post_attention_layernorm"},
        changes=lambda config: {
            "self_attn.q_proj": partial(unrotated, config["num_attention_heads"]),
            "self_attn.k_proj": partial(unrotated, config["num_key_value_heads"]),
        },
    ),
    "gemma3": Architecture(
        config=_gemma3,
        layer={
            **ATTENTION,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        changes=lambda config: dict.fromkeys(
            (
                "input_layernorm",
                "self_attn.q_norm",
                "self_attn.k_norm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            less_one,
        ),
        norm=less_one,
    ),
}
"""Architectures by llama.cpp's name (``general.architecture``)."""


def open_gguf(path: Path) -> TransformersSource:
    """A GGUF file as a source; its tokenizer is rebuilt once and kept in the cache.

    Raises:
        MissingExtraError: the package ``gguf`` or ``tokenizers`` is not installed.
        DataError: the file is damaged, or tensors are missing or unknown.
        OptionError: an architecture, a tokenizer or a field that is not known.
    """
    from systolic.interop.gguf_tokenizer import tokenizer_folder

    reader = Reader(path)
    kind = reader.need("general.architecture")
    if kind not in ARCHITECTURES:
        raise OptionError(
            f"{path} has the architecture {kind!r}{nearest(str(kind), ARCHITECTURES)}; read are {', '.join(ARCHITECTURES)}: import the Hugging Face folder of this model"
        )
    architecture = ARCHITECTURES[kind]
    config = architecture.config(reader.fields, reader)
    known = family(config, str(path))
    model, conversion = known.model(config), known.conversion(config)
    tensors = _tensors(reader, architecture, config)
    conversion.check(tensors, str(path))
    licence = reader.fields.get("general.license")
    return TransformersSource(
        path=path,
        model=model,
        config=config,
        kind="gguf",
        tensors=tensors,
        conversion=conversion,
        weight_files=(path,),
        folder=tokenizer_folder(path, reader.fields),
        licence=licence if isinstance(licence, str) else None,
    )


def _tensors(
    reader: Reader, architecture: Architecture, config: Mapping[str, Any]
) -> dict[str, GgufTensor]:
    """Tensors by transformers' names; unknown ones keep theirs, for the check to name."""
    changes = architecture.changes(config)
    whole = {
        "token_embd.weight": ("model.embed_tokens.weight", same),
        "output.weight": ("lm_head.weight", same),
        "output_norm.weight": ("model.norm.weight", architecture.norm),
    }
    made = {}
    for theirs, tensor in reader.tensors.items():
        name, change = whole.get(theirs, (theirs, same))
        if (parts := LAYER.fullmatch(theirs)) and parts[2] in architecture.layer:
            part = architecture.layer[parts[2]]
            name, change = f"model.layers.{parts[1]}.{part}.{parts[3]}", changes.get(part, same)
        made[name] = _tensor(reader.path, tensor, change)
    return made


def _tensor(path: Path, place: GgufPlace, change: Change) -> GgufTensor:
    kept = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
    rows = place.shape[:-1]
    return GgufTensor(
        file=path,
        offset=place.offset,
        stored=(*rows, place.bytes // max(math.prod(rows), 1)),
        kind=place.kind,
        shape=place.shape,
        dtype=kept.get(place.kind.name, np.dtype(np.float32)),
        change=change,
    )
