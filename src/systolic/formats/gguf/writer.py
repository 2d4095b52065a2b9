"""A decoder written as a GGUF file, one tensor in memory at a time."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from systolic.artifact.tensors import TensorSpec
from systolic.core.errors import DataError, MissingExtraError, OptionError
from systolic.formats.gguf.metadata import Described
from systolic.formats.gguf.reader import ARCHITECTURES, FREQUENCIES, TensorChange, divisors
from systolic.formats.gguf.tensors import WHOLE
from systolic.formats.hugging_face.writer import Outgoing
from systolic.models.decoder.rotary import Stretching

PRECISIONS = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
"""Precisions of matrices to llama.cpp's number of the kind of file (``LlamaFileType``)."""
OF_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""Precision that keeps weights of a dtype as they are."""
LARGEST_F16 = 65504.0
NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


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


def plan(made: Outgoing, described: Described, precision: str) -> list[GgufSpec]:
    """The tensors of a file, in the order of ``made``: matrices in the precision, vectors in f32.

    A matrix whose rows no block of Q8_0 divides is f16, as llama.cpp's converter has it.

    Args:
        made: The model.
        described: The same in the terms of llama.cpp.
        precision: One of :data:`PRECISIONS`.

    Raises:
        MissingExtraError: the package ``gguf`` is not installed.
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise MissingExtraError("writing a GGUF file", "gguf") from error
    architecture = ARCHITECTURES[described.architecture]
    changes = architecture.changes(described.model)
    parts = {theirs: own for own, theirs in architecture.layer.items()}
    whole = {theirs: own for own, theirs in WHOLE.items()}
    kinds = GGMLQuantizationType
    found = []
    for spec in made.specs:
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
        found.append(GgufSpec(name=name, source=spec, change=change, kind=kind))
    return found


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

    out = GGUFWriter(file, described.architecture)
    for name, value in {**fields, **described.fields}.items():
        _add(out, name, value)
    for one in tensors:
        out.add_tensor_info(
            one.name, one.source.shape, np.dtype(np.float32), one.nbytes, raw_dtype=one.kind
        )
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

        for one in tensors:
            (piece,) = pieces(one.source.name)
            put(_stored(one, piece))
            del piece  # before the next one is made
            progress(one.nbytes)
        if extra is not None:
            put(extra)
        opened.write(bytes(-opened.tell() % out.data_alignment))


def _frequencies(described: Described) -> np.ndarray | None:
    """What llama3's rule makes of the frequencies of rotary embeddings."""
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
