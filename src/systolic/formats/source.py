"""A model in files: a folder of Hugging Face transformers, a GGUF file or a Bundle, opened without reading weights."""

import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import refuse_pointer
from systolic.data.fingerprint import of_files
from systolic.formats.registry import GGUF, MODELS, ONNX, function_of, model_format
from systolic.job import Dtypes, Job, Model, Quantization, Stored
from systolic.models.families import CONFIG, GENERATION, Config
from systolic.models.mapping import Conversion, Tensor, Tensors
from systolic.runs.bundle.tensors import TensorSpec

if TYPE_CHECKING:
    import jax

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "additional_chat_templates/rag.jinja",
    GENERATION,
)
"""Files that belong to a model's text, copied as they are."""
LENGTHS, POOLING = "sentence_bert_config.json", "1_Pooling/config.json"
"""Files of sentence-transformers: the longest text, and how vectors of tokens become one."""
PROMPTS = "config_sentence_transformers.json"
"""Its file of texts that are written before others."""
OTHER_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    LENGTHS,
    POOLING,
    PROMPTS,
)
"""Files about a model's other inputs, copied as they are."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*(?<!\.gguf)(?<!\.pth)(?<!\.pt)")
"""Pattern of a name on Hugging Face: an owner and a model."""
COPIES = ("lm_head.weight", "proj_out.weight", "cls.predictions.decoder.weight")
"""Names of a language model's last matrix, which tied weights leave out or keep as a copy of the embedding."""
ROWS = 4096
"""Rows of a matrix that are compared at a time."""
SHOWN_FILES = 3
"""Files of a folder that a message names."""


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A model in files. Opening reads descriptions and no weights."""

    path: Path
    """The folder or file that the user named."""
    model: Model
    config: Config
    """Fields of its config.json; {} where its origin has none."""
    kind: str
    """Format: ``hugging-face``, ``gguf``, ``ctranslate2`` or ``bundle``."""
    licence: str | None = None
    """Licence that its files name, such as ``apache-2.0``; ``None`` where they name none."""
    notes: tuple[str, ...] = ()
    """Warnings about its files, such as fields of config.json that are not read."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """Numpy name of the dtype that most weights are stored in."""

    @property
    def quantization(self) -> Quantization:
        """Matrices that the files hold as codes and scales under :data:`CODES` and :data:`SCALES`; as floats under their own paths."""
        return Quantization()

    def arrays(self, like: "Mapping[str, jax.ShapeDtypeStruct]") -> "dict[str, jax.Array]":
        """All that :meth:`each` gives."""
        return dict(self.each(like))

    @abstractmethod
    def each(self, like: "Mapping[str, jax.ShapeDtypeStruct]") -> "Iterator[tuple[str, jax.Array]]":
        """Parameters and other variables with their paths, made shard by shard when they are asked for.

        At most one tensor is read at a time. Variables that the files lack are left out.

        Args:
            like: Shape, dtype and sharding of each that is wanted.

        Raises:
            DataError: a tensor has another shape than the model's.
        """

    @abstractmethod
    def files(self) -> dict[str, Path]:
        """Files of tokenizer, chat template and preprocessing, by name."""

    def config_bytes(self) -> bytes:
        """The config.json as it came, or its fields where there is no such file."""
        return json.dumps(dict(self.config), indent=2).encode()

    def verify(self) -> None:
        """Compares the contents with the digests that were written beside them, where a format has any; reads everything.

        Raises:
            DataError: a file is damaged.
        """
        return

    @abstractmethod
    def fingerprint(self) -> str:
        """Digest of names, sizes and a sample of the contents; a copy elsewhere has the same."""

    @abstractmethod
    def dtypes(self) -> "Mapping[str, np.dtype]":
        """Dtype of each parameter in the files, by path."""

    @abstractmethod
    def pieces(self, path: str) -> Iterator[np.ndarray]:
        """A parameter in consecutive pieces of its first dims, one in memory at a time."""

    def origin(self, path: str, piece: int) -> str:
        """Name in the files of what a parameter's piece of that number is made of."""
        del piece
        return path

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer.json; ``None`` where there is none."""
        return self.files().get("tokenizer.json")

    def trained_job(self) -> Job | None:
        """The job that it was trained under here; ``None`` for a model of another library.

        Raises:
            DataError: it does not read in this version.
        """
        return None

    def describe(self) -> str:
        """The model on one line: ``Decoder (llama), weights in bfloat16, hugging-face DIR``."""
        return f"{type(self.model).__name__} ({self.config.get('model_type', self.kind)}), weights in {self.dtype}, {self.kind} {self.path}"


@dataclass(frozen=True, kw_only=True)
class TransformersSource(Source):
    """A model of a family of transformers, by a config.json's fields and tensors under its names."""

    tensors: Tensors
    conversion: Conversion
    weight_files: tuple[Path, ...]
    folder: Path
    """Holds the files of tokenizer and preprocessing."""
    renamed: bool = False
    """Whether the files have other names for the tensors than the family, which transformers may not open."""

    @cached_property
    def dtype(self) -> str:
        """See :class:`Source`."""
        return most_common(self.tensors.values())

    def each(self, like: "Mapping[str, jax.ShapeDtypeStruct]") -> "Iterator[tuple[str, jax.Array]]":
        """See :class:`Source`."""
        self.verify()
        return self.conversion.each(self.tensors, like)

    def dtypes(self) -> dict[str, np.dtype]:
        """See :class:`Source`."""
        paths = [path for rule in self.conversion.rules for path in rule.ours]
        return {path: self.conversion.dtype(path, self.tensors) for path in paths}

    def pieces(self, path: str) -> Iterator[np.ndarray]:
        """See :class:`Source`."""
        return self.conversion.pieces(path, self.tensors)

    def verify(self) -> None:
        """Compares copies of the embedding, which a file of tied weights may hold beside it.

        Raises:
            DataError: one differs.
        """
        rule = next((rule for rule in self.conversion.rules if "embedding" in rule.ours), None)
        if rule is None or len(rule.theirs) != 1:
            return
        (own,) = rule.theirs
        used = {name for rule in self.conversion.rules for name in rule.theirs}
        for name in set(COPIES) & set(self.tensors) - used:
            if not _equal(self.tensors[own].read(), self.tensors[name].read()):
                raise DataError(
                    f"{self.path} has a {name} that differs from {own}, and its config.json says that they are one; set tie_word_embeddings to false in it"
                )

    def origin(self, path: str, piece: int) -> str:
        """See :class:`Source`."""
        rule = next(rule for rule in self.conversion.rules if path in rule.ours)
        return " or ".join(rule.names(list(rule.places())[piece]))

    def files(self) -> dict[str, Path]:
        """See :class:`Source`."""
        named = {name: self.folder / name for name in (*TEXT_FILES, *OTHER_FILES)}
        return {name: file for name, file in named.items() if file.is_file()}

    def fingerprint(self) -> str:
        """See :class:`Source`."""
        root = self.path if self.path.is_dir() else self.path.parent
        config = root / CONFIG
        files = [*([config] if config.is_file() else []), *self.weight_files]
        contents = of_files(root, files)
        assert contents is not None  # there are weights
        return contents.digest


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two matrices are equal, compared some rows at a time."""
    return first.shape == second.shape and all(
        np.array_equal(first[start : start + ROWS], second[start : start + ROWS])
        for start in range(0, len(first), ROWS)
    )


def dtypes_of(source: Source) -> Dtypes:
    """Dtypes that hold a source's weights exactly: bf16 where they are stored so, else f32."""
    return Dtypes(parameters=Stored.bf16 if source.dtype == "bfloat16" else Stored.f32)


def most_common(tensors: "Iterable[Tensor | TensorSpec]") -> str:
    """Numpy name of the dtype with the most elements."""
    elements: dict[str, int] = {}
    for tensor in tensors:
        name = tensor.dtype.name
        elements[name] = elements.get(name, 0) + int(np.prod(tensor.shape, dtype=np.int64))
    return max(elements, key=lambda name: elements[name])


def open_source(path: Path | str, base: Path | None = None) -> Source:
    """The model at a path, in any of the formats of :data:`systolic.formats.registry.MODELS`.

    Args:
        path: A folder or a file.
        base: For a PEFT folder, the model that its adapters stand beside, in place of the one that it names.

    Raises:
        NotFoundError: nothing is there, or a file of it is missing.
        OptionError: it is of another kind, or of a family or with a field that is not known, or has no base.
        DataError: a file is damaged, or tensors are missing or unknown; names the first.
    """
    path = Path(path)
    if not path.exists():
        if HUB_NAME.fullmatch(str(path)):
            raise NotFoundError(
                f"{path} does not exist; hubs are not read: if it is a model's name there, download it with hf download {path} --local-dir {path.name}, and give that folder"
            )
        raise NotFoundError(f"{path} does not exist; check the path")
    form = model_format(path)
    if base is not None and (form is None or not form.has_base):
        raise OptionError(f"--base is {base} and {path} is no PEFT folder; leave it out")
    if form is not None:
        read = function_of(form.read)
        return read(path) if base is None else read(path, base)
    if path.suffix == ONNX:
        raise OptionError(
            f"{path} is an ONNX file, and no maintained package turns ONNX into JAX (jaxonnxruntime's last release is of 2023); import what it was exported from: a Hugging Face folder, a PyTorch module or a Keras model"
        )
    if said := gguf_inside(path, "systolic import ") or _instead(path):
        raise OptionError(f"{path} is no model itself; {said}")
    *most, last = (each.described for each in MODELS)
    raise OptionError(
        f"{path} is no model in a format known here; give {', '.join(most)} or {last}"
    )


def _instead(path: Path) -> str:
    """Content of a path that holds no model itself, and what to give instead; "" if unknown."""
    if path.is_file():
        refuse_pointer(path)
        beside = path.parent if (path.parent / CONFIG).is_file() else None
        return f"it is a file of one: give its folder, {beside}" if beside else ""
    if (path / "adapter_config.json").is_file():
        return "it holds adapters of PEFT: merge them into their model with PEFT's merge_and_unload, and give what save_pretrained writes then"
    if (path / "params.json").is_file():
        return f"it is in its makers' own format (params.json): give the same model in the format of transformers, with a {CONFIG}"
    inside = (*path.glob(f"*/{CONFIG}"), *path.glob(f"snapshots/*/{CONFIG}"))
    inner = sorted(file.parent for file in inside if b'"model_type"' in file.read_bytes())
    if inner:
        more = f", or one of {len(inner) - 1} others" if len(inner) > 1 else ""
        return f"it holds a model in a folder of it, with its {CONFIG}: give {shlex.quote(str(inner[-1]))}{more}"
    if any(path.glob("*.safetensors")):
        return f"it has weights and no {CONFIG}: copy that from where the model came from"
    return ""


def gguf_inside(path: Path, command: str = "") -> str:
    """Advice on a folder whose models are GGUF files, with the words of a command before each; "" for any other."""
    files = sorted(path.glob(f"*{GGUF}")) if path.is_dir() else []
    if not files:
        return ""
    names = [shlex.quote(str(file)) for file in files]
    if len(files) == 1:
        return f"it holds a GGUF file: give {command}{names[0]}"
    more = f", ... ({len(files)} in all)" if len(files) > SHOWN_FILES else ""
    return f"it holds GGUF files: give one, {command}{' or '.join(names[:SHOWN_FILES])}{more}"
