"""A decoder written as a GGUF file: its metadata, its tensors one at a time, and its tokenizer."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import DataError, OptionError, RunError, extra
from systolic.core.units import with_article
from systolic.formats.comparison import Parity, compare, probe_of
from systolic.formats.export import (
    OF_DTYPES,
    ExportPayload,
    ExportSource,
    elements_of,
    floats_line,
    no_room,
    payload_of,
    tolerance_of,
)
from systolic.formats.gguf.reader import (
    ARCHITECTURES,
    FREQUENCIES,
    LAYERS_27B,
    ORIGINAL,
    PUBLISHED,
    WHOLE,
    TensorChange,
    divisors,
)
from systolic.formats.gguf.tokenizer import Words, words_of
from systolic.formats.hugging_face.writer import Outgoing
from systolic.formats.registry import GGUF
from systolic.formats.source import most_common, open_source
from systolic.formats.weights import weight_progress
from systolic.models.decoder.config import Decoder, Mlp
from systolic.models.decoder.options import Stretching
from systolic.models.families import Config, family
from systolic.runs.bundle.folder import BundleDraft, check_free, draft
from systolic.runs.bundle.tensors import TensorSpec

Away = list[str]
"""Differences as text: ``model.window is 64, not 0``."""

LINEAR = (Stretching.none, Stretching.linear)

POSITIONS = "max_position_embeddings"

USUAL = 1024
"""Tokens at once of a model that does not say it."""
KINDS = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}
"""``model_type`` of a config.json to the architecture that it is written as."""
PRECISIONS = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
"""Precisions of matrices to llama.cpp's number of the kind of file (``LlamaFileType``)."""
LARGEST_F16 = 65504.0
NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class GgufWriting:
    """How decoders are written as an architecture."""

    fields: Callable[[Decoder], dict[str, Any]]
    """Metadata beside the sizes, without the architecture's name before them."""
    away: Callable[[Decoder], Away]
    """Differences between what llama.cpp computes and the decoder."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A decoder in the terms of llama.cpp."""

    architecture: str
    model: Decoder
    fields: dict[str, Any]
    """Metadata by name."""


def describe(config: Config, source: str) -> Described:
    """The architecture and the metadata of the model of a config.json.

    Args:
        config: Its fields.
        source: Its name in messages.

    Raises:
        OptionError: llama.cpp has no such architecture, or none that is read here, or computes something else.
    """
    kind = config["model_type"]
    if kind not in KINDS:
        raise OptionError(
            f"{source} is {with_article(kind)}, which is not written as GGUF; written are {', '.join(KINDS)}: give --to hf, and llama.cpp's own converter that folder"
        )
    model = family(config, source).model(config)
    assert isinstance(model, Decoder)
    name = KINDS[kind]
    if away := WRITTEN[name].away(model):
        raise OptionError(
            f"{source} is not what llama.cpp computes for {name}: {'; '.join(away)}; give --to hf or keep it as a Bundle"
        )
    said = config.get("text_config", config).get(POSITIONS)
    scaling = model.rope_scaling
    context = said or int(scaling.factor * (scaling.original_positions if scaling else USUAL))
    own = {**_sizes(model, context), **WRITTEN[name].fields(model)}
    return Described(
        architecture=name, model=model, fields={f"{name}.{key}": own[key] for key in own}
    )


def _sizes(model: Decoder, context: int) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab,
        "context_length": context,
        "embedding_length": model.d_model,
        "block_count": model.layers,
        "feed_forward_length": model.d_ff,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "attention.layer_norm_rms_epsilon": float(model.norm_eps),
        "rope.dimension_count": model.head_dim,
        "rope.freq_base": float(model.rope_theta),
    }


def _rope(model: Decoder) -> dict[str, Any]:
    """Stretched rotary embeddings; those of llama3 are a tensor."""
    scaling = model.rope_scaling
    if scaling.kind is Stretching.linear:
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if scaling.kind is Stretching.llama3:
        return {ORIGINAL: scaling.original_positions}
    return {}


def _gemma(model: Decoder) -> dict[str, Any]:
    fields = _rope(model)
    if model.window:
        fields["attention.sliding_window"] = model.window
        # Without layers of full attention the period is one that no layer ends.
        fields["attention.sliding_window_pattern"] = model.global_every or model.layers + 1
    if model.logit_cap:
        fields["final_logit_softcapping"] = float(model.logit_cap)
    return fields


def _gemma2(model: Decoder) -> dict[str, Any]:
    return {**_gemma(model), "attn_logit_softcapping": float(model.attention_cap)}


def _gemma3(model: Decoder) -> dict[str, Any]:
    local = model.local_rope_theta or model.rope_theta
    return {**_gemma(model), "rope.freq_base_swa": float(local)}


def _holding(*facts: tuple[bool, str]) -> Away:
    """The texts of the facts that hold."""
    return [text for holds, text in facts if holds]


def _shared_away(model: Decoder, mlp: Mlp, kinds: tuple[Stretching, ...]) -> Away:
    scaling = model.rope_scaling.kind
    known = " or ".join(kind.value for kind in kinds)
    return _holding(
        (model.mlp is not mlp, f"model.mlp is {model.mlp.value}, not {mlp.value}"),
        (scaling not in kinds, f"model.rope-scaling.kind is {scaling.value}, not {known}"),
    )


def _plain_away(model: Decoder, *more: Stretching) -> Away:
    window = f"model.window is {model.window}, and it has full attention alone"
    return [
        *_shared_away(model, Mlp.swiglu, (*LINEAR, *more)),
        *_holding((model.window > 0, window)),
    ]


def _llama_away(model: Decoder) -> Away:
    scaling = model.rope_scaling
    own = {name: vars(scaling)[name] for name in PUBLISHED}
    stated = ", ".join(f"{name} {value:g}" for name, value in own.items())
    known = ", ".join(f"{name} {value:g}" for name, value in PUBLISHED.items())
    return [
        *_plain_away(model, Stretching.llama3),
        *_holding((own != PUBLISHED, f"model.rope-scaling has {stated}, not {known}")),
    ]


def _qwen2_away(model: Decoder) -> Away:
    width = model.heads * model.head_dim
    reason = f"model.heads times model.head-dim is {width}, not model.d-model {model.d_model}"
    return [*_plain_away(model), *_holding((width != model.d_model, reason))]


def _gemma_away(name: str, model: Decoder) -> Away:
    largest = model.layers == LAYERS_27B[name]
    scalar = model.d_model // model.heads if largest else model.head_dim
    own = model.query_pre_attn_scalar or model.head_dim
    return [
        *_shared_away(model, Mlp.geglu, LINEAR),
        *_holding(
            (own != scalar, f"model.query-pre-attn-scalar is {own:g}, not {scalar}"),
            (model.qkv_bias, "model.qkv-bias is on, not off"),
            (model.out_bias, "model.out-bias is on, not off"),
        ),
    ]


def _gemma2_away(model: Decoder) -> Away:
    return [
        *_gemma_away("gemma2", model),
        *_holding(
            (not model.logit_cap, "model.logit-cap is 0, and it always has one"),
            (not model.attention_cap, "model.attention-cap is 0, and it always has one"),
            (not model.tie_embeddings, "model.tie-embeddings is off, not on"),
            (not model.window, "model.window is 0, and it always has one"),
        ),
    ]


WRITTEN = {
    "llama": GgufWriting(fields=_rope, away=_llama_away),
    "qwen2": GgufWriting(fields=_rope, away=_qwen2_away),
    "qwen3": GgufWriting(fields=_rope, away=_plain_away),
    "gemma2": GgufWriting(fields=_gemma2, away=_gemma2_away),
    "gemma3": GgufWriting(fields=_gemma3, away=partial(_gemma_away, "gemma3")),
}
"""Architectures of :data:`ARCHITECTURES` to how they are written."""

assert set(WRITTEN) == set(ARCHITECTURES)


@dataclass(frozen=True, kw_only=True)
class GgufSpec:
    """A tensor that will be written."""

    name: str
    source: TensorSpec
    """Its name, shape and dtype in transformers."""
    change: TensorChange
    kind: Any
    """Quantization (``GGMLQuantizationType``)."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        from gguf.constants import GGML_QUANT_SIZES

        block, size = GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.source.shape)) // block * size


def plan(outgoing: Outgoing, described: Described, precision: str) -> list[GgufSpec]:
    """The tensors of a file, in the order of ``outgoing``: matrices in the precision, vectors in f32.

    A matrix whose rows no block of Q8_0 divides is f16, as llama.cpp's converter has it.

    Args:
        outgoing: The model.
        described: The same in the terms of llama.cpp.
        precision: One of :data:`PRECISIONS`.

    Raises:
        MissingExtraError: the package ``gguf`` is not installed.
    """
    with extra("writing a GGUF file", "gguf"):
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    architecture = ARCHITECTURES[described.architecture]
    changes = architecture.changes(described.model)
    parts = {theirs: own for own, theirs in architecture.layer.items()}
    whole = {theirs: own for own, theirs in WHOLE.items()}
    kinds = GGMLQuantizationType
    tensors = []
    for spec in outgoing.specs:
        kind = kinds[precision.upper()] if len(spec.shape) > 1 else kinds.F32
        if spec.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            kind = kinds.F16
        if spec.name in whole:
            name, change = whole[spec.name], TensorChange()
            change = architecture.norm if spec.name == "model.norm.weight" else change
        else:
            layer = NAME.fullmatch(spec.name)
            assert layer is not None, spec.name
            name = f"blk.{layer[1]}.{parts[layer[2]]}.{layer[3]}"
            change = changes.get(layer[2], TensorChange())
        tensors.append(GgufSpec(name=name, source=spec, change=change, kind=kind))
    return tensors


def write_gguf(
    file: Path,
    described: Described,
    fields: Mapping[str, Any],
    tensors: list[GgufSpec],
    pieces: Callable[[str], Iterator[np.ndarray]],
    progress: Callable[[int], None],
) -> None:
    """Writes a file.

    Args:
        file: The file, which is replaced.
        described: The model in the terms of llama.cpp.
        fields: Metadata beside those of the model.
        tensors: Of :func:`plan`.
        pieces: The tensor of a name of transformers; called in their order.
        progress: Called with the bytes of each tensor that was written.

    Raises:
        OSError: the disk is full.
        DataError: a weight is no number.
        OptionError: a weight is too large for f16.
    """
    from gguf import GGUFWriter
    from gguf.constants import GGMLQuantizationType

    out, float32 = GGUFWriter(file, described.architecture), np.dtype(np.float32)
    for name, value in {**fields, **described.fields}.items():
        _add(out, name, value)
    for tensor in tensors:
        shape = tensor.source.shape
        out.add_tensor_info(tensor.name, shape, float32, tensor.nbytes, raw_dtype=tensor.kind)
    extra = _frequencies(described)
    if extra is not None:
        kind = GGMLQuantizationType.F32
        out.add_tensor_info(FREQUENCIES, extra.shape, extra.dtype, extra.nbytes, raw_dtype=kind)
    try:
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_ti_data_to_file()
    finally:
        out.close()
    with file.open("ab") as opened:

        def put(data: np.ndarray) -> None:
            opened.write(bytes(-opened.tell() % out.data_alignment))
            opened.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)

        for tensor in tensors:
            (piece,) = pieces(tensor.source.name)
            put(_stored(tensor, piece))
            del piece  # before the next one is made
            progress(tensor.nbytes)
        if extra is not None:
            put(extra)
        opened.write(bytes(-opened.tell() % out.data_alignment))


def _frequencies(described: Described) -> np.ndarray | None:
    """Divisors of the frequencies of rotary embeddings by llama3's rule; ``None`` for other rules."""
    model = described.model
    if model.rope_scaling.kind is not Stretching.llama3:
        return None
    return divisors(model.rope_scaling, model.rope_theta, model.head_dim)


def _stored(spec: GgufSpec, piece: np.ndarray) -> np.ndarray:
    """A tensor as it is stored.

    Raises:
        DataError: it holds NaN or infinity.
        OptionError: it holds a number that f16 does not have.
    """
    from gguf.quants import quantize

    wide = np.ascontiguousarray(spec.change.write(piece), np.float32)
    largest = float(max(wide.max(initial=0.0), -wide.min(initial=0.0)))
    if not largest < np.inf:
        raise DataError(
            f"{spec.source.name} holds NaN or infinity, so that the model computes no numbers; train from a checkpoint before that, or copy the file again"
        )
    if spec.kind.name == "F16" and largest > LARGEST_F16:
        raise OptionError(
            f"{spec.source.name} holds {largest:g} and the largest number of f16 is {LARGEST_F16:g}; give --precision bf16 or f32"
        )
    return quantize(wide, spec.kind)


def _add(out: Any, name: str, value: Any) -> None:
    """Adds a field by its type; whole numbers are unsigned and of 32 bits, as llama.cpp reads them."""
    if isinstance(value, bool):
        out.add_bool(name, value)
    elif isinstance(value, int):
        out.add_uint32(name, value)
    elif isinstance(value, float):
        out.add_float32(name, value)
    elif isinstance(value, str):
        out.add_string(name, value)
    else:
        out.add_array(name, value)


@dataclass(frozen=True, kw_only=True)
class GgufOptions:
    """A GGUF file to write.

    Raises:
        OptionError: the precision is unknown.
    """

    precision: str = AUTO
    """Precision of the matrices, one of :data:`PRECISIONS`; ``auto`` keeps that of the weights. Vectors are f32."""

    def __post_init__(self) -> None:
        if self.precision not in (AUTO, *PRECISIONS):
            raise OptionError(
                f"precision is {self.precision!r}; a GGUF file takes {AUTO}, {', '.join(PRECISIONS)}"
            )


@dataclass(frozen=True, kw_only=True)
class ExportedGguf:
    """A GGUF file that was written."""

    path: Path
    architecture: str
    """llama.cpp's name of it."""
    precision: str
    """Precision of the matrices."""
    parameters: int
    """Elements of all tensors."""
    bytes: int
    """Size of the file."""
    parity: Parity | None
    """Differences between the logits of the file and those of the source."""
    notes: tuple[str, ...]
    """Properties that GGUF can't express, and why there is no parity."""
    seconds: float = 0.0
    """Time that the export took."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": str(self.path),
            "architecture": self.architecture,
            "precision": self.precision,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "parity": None if self.parity is None else self.parity.to_json(),
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    @property
    def kind(self) -> str:
        """Architecture and precision in words."""
        return f"{self.architecture} in {self.precision}"

    def lines(self) -> list[str]:
        """The comparison, and notes."""
        return [*([self.parity.line()] if self.parity else []), *self.notes]


def export_gguf(
    source: ExportSource, out: Path, options: GgufOptions, say: Callable[[str], None]
) -> ExportedGguf:
    """Writes a language model as a GGUF file, opened again and compared before it gets its name.

    Args:
        source: The run or the model.
        out: The new file.
        options: The precision of the matrices.
        say: Called with each stage.

    Raises:
        OptionError: no architecture of llama.cpp computes what the model does, or GGUF has no tokenizer of its kind.
        TakenError: ``out`` exists.
        DataError: a weight is no number.
        RunError: the disk is full, or the logits of the file are others; nothing is left at ``out``.
    """
    if out.suffix != GGUF:
        raise OptionError(f"{out} is no name of a GGUF file; give --out {out}{GGUF}")
    check_free(out)
    path, payload = source.path, payload_of(source)
    described = describe(payload.model.config, str(path))
    precision = options.precision
    if precision == AUTO:
        precision = OF_DTYPES.get(most_common(payload.model.specs), "f32")
    tensors = plan(payload.model, described, precision)
    unchecked, parity = no_room(elements_of([tensor.source for tensor in tensors])), None
    with draft(out) as folder:
        file = folder.folder / out.name
        words = _write(folder, file, path, payload, described, tensors, precision, say)
        restored = floats_line(payload.restored)
        del payload
        if unchecked is None:
            say("comparing")
            parity = _compared(file, source, precision)
        size = file.stat().st_size
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        os.replace(file, out)
    return ExportedGguf(
        path=out,
        architecture=described.architecture,
        precision=precision,
        parameters=sum(int(np.prod(tensor.source.shape)) for tensor in tensors),
        bytes=size,
        parity=parity,
        notes=(*_notes(words, tensors, precision, unchecked), *restored),
    )


def _write(
    folder: BundleDraft,
    file: Path,
    path: Path,
    payload: ExportPayload,
    described: Described,
    tensors: list[GgufSpec],
    precision: str,
    say: Callable[[str], None],
) -> Words:
    """Writes the draft of the file; returns its tokenizer."""
    say("tokenizer")
    for name, content in payload.files.items():
        folder.add(name, content)
    words = words_of(
        folder.folder,
        payload.model.config,
        described.model.vocab,
        starts=payload.starts,
        source=str(path),
    )
    fields = {**_general(path, payload, precision), **words.fields}
    progress = weight_progress(sum(tensor.nbytes for tensor in tensors), say)
    write_gguf(file, described, fields, tensors, payload.model.pieces, progress)
    return words


def _general(path: Path, payload: ExportPayload, precision: str) -> dict[str, Any]:
    """Metadata about the file."""
    fields = {
        "general.type": "model",
        "general.name": path.resolve().name.removesuffix(GGUF),
        "general.license": payload.licence,
        "general.file_type": PRECISIONS[precision],
        "general.quantization_version": 2,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _notes(
    words: Words, tensors: list[GgufSpec], precision: str, unchecked: str | None
) -> tuple[str, ...]:
    narrow = (
        [tensor for tensor in tensors if tensor.kind.name == "F16"] if precision != "f16" else []
    )
    notes = list(words.notes)
    if narrow:
        notes.append(
            f"{len(narrow)} matrices are f16: {precision} takes rows of a multiple of 32 numbers"
        )
    if unchecked is not None:
        notes.append(unchecked)
    return tuple(notes)


def _compared(file: Path, source: ExportSource, precision: str) -> Parity:
    """Logits of a written file against those of its source, both computed here in float32.

    Raises:
        RunError: they are others.
    """
    written = open_source(file)
    probe = probe_of(written)
    ours, _ = source.answers(written, probe.ours)
    theirs = source.outputs(probe.ours)
    parity = compare(ours, theirs, "the source", tolerance_of(precision, source.path))
    if not parity.passed:
        raise RunError(
            f"the GGUF file of {source.path} computes something else: {parity.line()}; please report it, nothing was kept"
        )
    return parity
