"""Formats by name: how files of each are known, and the functions that read and write them; imports without jax and NumPy.

A format is a module or a folder beside this one, and a line in :data:`MODELS`, :data:`FRAMEWORKS`,
:data:`MODEL_WRITERS` or :data:`PROGRAM_WRITERS`. Functions are named as ``module:function``, so that a format's
module is imported when it is used.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, check
from systolic.job import Precision
from systolic.models.families import CONFIG
from systolic.runs.run import JOB

BUNDLE_FILE = "bundle.json"
"""``systolic.runs.bundle.folder.MANIFEST``, whose module imports NumPy."""
ADAPTERS = "adapter_config.json"
"""File that makes a folder one of PEFT, with adapters beside a model that lies elsewhere."""
FULL_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""Files of a whole model, which some folders have beside that of PEFT."""
BINARY = "model.bin"
"""Weights of a CTranslate2 folder."""
BINARY_FORMATS = (4, 5, 6)
"""Format numbers of it that are read."""
GGUF, ONNX = ".gguf", ".onnx"
"""Suffixes of files."""
STATE_DICTS = (".pth", ".pt")
"""Suffixes of files that ``torch.save`` writes of a module's ``state_dict()``."""
SAVED_MODEL = "saved_model.pb"
"""File of a SavedModel."""
ROWS = 4
"""Examples of a comparison by default."""
_HERE = "systolic.formats."


def function_of(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; imports its module."""
    module, _, function = name.partition(":")
    return vars(import_module(module))[function]


# Reading


class ModelFormat(NamedTuple):
    """A format of models in files."""

    kind: str
    """``kind`` of its sources."""
    read: str
    """Function of a path, and of a ``base`` where the format has one, to a :class:`~systolic.formats.source.Source`."""
    matches: Callable[[Path], bool]
    """Whether a path that exists is of the format."""
    described: str
    """The format in words, for messages."""
    has_base: bool = False
    """Whether its models stand beside another one, which ``--base`` names."""


class FrameworkFormat(NamedTuple):
    """A model of another framework, which becomes a program in a process that has the framework."""

    kind: str
    read: str
    """Function of a source, a signature and example inputs to a pure function; it needs jax, NumPy and the framework only."""
    matches: Callable[[str], bool]
    """Whether a source, a path or ``file.py:function``, is of the format."""


def is_peft(path: Path) -> bool:
    """Whether a path is a folder of PEFT with adapters alone."""
    whole = any((path / name).is_file() for name in FULL_WEIGHTS)
    return (path / ADAPTERS).is_file() and not whole


def is_ctranslate2(path: Path) -> bool:
    """Whether a path is a folder of CTranslate2."""
    if not (path / BINARY).is_file():
        return False
    with (path / BINARY).open("rb") as opened:
        return int.from_bytes(opened.read(4), "little") in BINARY_FORMATS


def _is_function(source: str) -> bool:
    return source.endswith(".py") or source.rpartition(":")[0].endswith(".py")


MODELS = (
    ModelFormat(
        "bundle",
        f"{_HERE}bundle:open_bundled",
        lambda path: (path / BUNDLE_FILE).is_file(),
        f"a Bundle (with {BUNDLE_FILE})",
    ),
    ModelFormat(
        "peft", f"{_HERE}peft:open_peft", is_peft, f"a PEFT folder (with {ADAPTERS})", has_base=True
    ),
    ModelFormat(
        "ctranslate2",
        f"{_HERE}ctranslate2:open_ctranslate2",
        is_ctranslate2,
        f"a CTranslate2 folder (with {BINARY})",
    ),
    ModelFormat(
        "hugging-face",
        f"{_HERE}hugging_face.reader:open_folder",
        lambda path: (path / CONFIG).is_file(),
        f"a Hugging Face folder (with {CONFIG})",
    ),
    ModelFormat(
        "gguf",
        f"{_HERE}gguf.reader:open_gguf",
        lambda path: path.suffix == GGUF and path.is_file(),
        "a GGUF file",
    ),
    ModelFormat(
        "torchvision",
        f"{_HERE}torch:open_state_dict",
        lambda path: path.suffix in STATE_DICTS and path.is_file(),
        f"a state dict of torchvision ({', '.join(STATE_DICTS)})",
    ),
)
"""Formats of models in files; a path is of the first that matches."""
FRAMEWORKS = (
    FrameworkFormat("function", f"{_HERE}program.child:function_in_file", _is_function),
    FrameworkFormat(
        "torch-export", f"{_HERE}torch:exported_program", lambda source: source.endswith(".pt2")
    ),
    FrameworkFormat(
        "keras", f"{_HERE}program.child:keras_file", lambda source: source.endswith(".keras")
    ),
    FrameworkFormat(
        "saved-model",
        f"{_HERE}tensorflow.reader:saved_model_function",
        lambda source: (Path(source) / SAVED_MODEL).is_file(),
    ),
)
"""Models of other frameworks; a source is of the first that matches."""


def model_format(path: Path) -> ModelFormat | None:
    """The format of a path; ``None`` for a path of no known format."""
    return next((each for each in MODELS if each.matches(path)), None)


def framework_format(source: str) -> FrameworkFormat | None:
    """The framework's format of a source; ``None`` for a source of none."""
    return next((each for each in FRAMEWORKS if each.matches(source)), None)


def known_source(path: Path) -> bool:
    """Whether a path looks like a model in files; so does what :func:`~systolic.formats.source.open_source` refuses with advice."""
    refused = (path / ADAPTERS).is_file() or (path.suffix == ONNX and path.is_file())
    return refused or model_format(path) is not None


def in_files(path: Path) -> bool:
    """Whether a path is a model in files and no run."""
    return path.exists() and not (path / JOB).is_file() and known_source(path)


# Writing


class ModelWriter(NamedTuple):
    """A format that holds a model's weights."""

    write: str
    """Function of (:class:`~systolic.formats.export.ExportSource`, path, options of the format, say) to a record of what was written."""


class ProgramWriter(NamedTuple):
    """A format that holds programs."""

    write: str
    """Function of (model, example inputs, path, settings, say) to a record of what was written."""
    check: str = ""
    """Function of the settings that refuses an environment without its packages, before a model is opened."""
    suffix: str = ""
    """Suffix of the single file that it writes; "" for a folder."""
    codes: bool = False
    """Whether quantized matrices stay in codes of 8 bits."""
    labels: str = ""
    """Place of the names of classes, in words."""
    one_function: bool = False
    """Whether its file has one function of a model."""
    settings: tuple[str, ...] = ()
    """Settings that only this format has."""


MODEL_WRITERS = {
    "hf": ModelWriter(f"{_HERE}hugging_face.writer:export_folder"),
    "peft": ModelWriter(f"{_HERE}peft:export_peft"),
    "bundle": ModelWriter(f"{_HERE}bundle:export_bundle"),
    "gguf": ModelWriter(f"{_HERE}gguf.writer:export_gguf"),
}
"""Formats of models: ``hf`` is a folder of Hugging Face transformers, ``peft`` a run's adapters alone, ``bundle`` a Bundle, ``gguf`` a file of llama.cpp."""
PROGRAM_WRITERS = {
    "litert": ProgramWriter(
        f"{_HERE}litert.writer:export_litert",
        check=f"{_HERE}litert.writer:check_litert",
        suffix=".tflite",
        labels="labels.txt inside, which unzip -p shows",
        one_function=True,
        settings=("quantization", "data", "edge_tpu"),
    ),
    "onnx": ProgramWriter(
        f"{_HERE}onnx:export_onnx",
        check=f"{_HERE}onnx:check_onnx",
        suffix=".onnx",
        labels="labels of its metadata, a JSON list",
        one_function=True,
    ),
    "savedmodel": ProgramWriter(
        f"{_HERE}tensorflow.writer:export_saved_model",
        check=f"{_HERE}tensorflow.writer:check_tensorflow",
        codes=True,
        labels="1/assets.extra/labels.txt",
    ),
    "stablehlo": ProgramWriter(
        f"{_HERE}stablehlo:export_stablehlo", codes=True, labels="labels of manifest.json"
    ),
}
"""Formats of programs."""


class LiteQuantization(enum.Enum):
    """How a format for small devices stores and computes numbers."""

    none = "none"
    dynamic = "dynamic"
    """Weights in int8; activations are rounded while the model runs."""
    int8 = "int8"
    """Weights, activations, inputs and outputs in int8, by representative data."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """How a model is exported as programs.

    Raises:
        OptionError: a negative size, no examples, or a precision that not every format has.
    """

    precision: Precision = Precision.f32
    """Precision of the computation: f32 or bf16."""
    batch: Annotated[int, NOT_NEGATIVE] = 0
    """Examples of a call; 0 leaves them free."""
    sequence: Annotated[int, NOT_NEGATIVE] = 0
    """Tokens of a text; 0 leaves them free."""
    inputs: tuple[Path, ...] = ()
    """Files to compare on, as ``predict`` takes them; by default rows of the recipe's own evaluation data."""
    examples: Annotated[int, COUNT] = ROWS
    """Examples of the recipe's own data to compare on."""
    function: str = ""
    """Function of the model that a file of one function has; the first one by default."""
    python: Path | None = None
    """Python of an environment that has the format's framework; by default this one."""
    quantization: LiteQuantization = LiteQuantization.none
    """Quantization of LiteRT."""
    data: Path | None = None
    """Files, or folders of classes, that stand for what the model will see: for LiteRT's quantization and its measurement."""
    edge_tpu: bool = False
    """Whether to say what the Edge TPU takes of a LiteRT file."""

    def __post_init__(self) -> None:
        check(self)
        if self.precision not in (Precision.f32, Precision.bf16):
            raise OptionError(
                f"precision is {self.precision.value}; programs are exported in f32 or bf16"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dims that are not free, by their names."""
        return {name: size for name in ("batch", "sequence") if (size := vars(self)[name])}

    def given(self) -> dict[str, Any]:
        """Settings that are not the default ones."""
        plain = vars(ExportSettings())
        return {name: value for name, value in vars(self).items() if value != plain[name]}

    def check_format(self, to: str) -> None:
        """Refuses settings that a format does not have.

        Raises:
            OptionError: one is given.
        """
        if self.function and not PROGRAM_WRITERS[to].one_function:
            raise OptionError(
                f"--function is {self.function}, and --to {to} has all functions of a model; leave it out"
            )
        owners = {name: owner for owner, form in PROGRAM_WRITERS.items() for name in form.settings}
        for name, value in self.given().items():
            if (owner := owners.get(name, to)) != to:
                shown = value.value if isinstance(value, enum.Enum) else value
                option = "precision" if name == "quantization" else name.replace("_", "-")
                raise OptionError(
                    f"--{option} is {shown}, which only --to {owner} has; leave it out"
                )
