"""Model families of Hugging Face's transformers that are models of ours, by the ``model_type`` of a config.json."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.errors import DataError, NotFoundError, OptionError, misspelt
from systolic.core.files import refuse_pointer
from systolic.job import Model

if TYPE_CHECKING:
    from systolic.models.mapping import Conversion, Tensors

CONFIG = "config.json"
"""File of a model's configuration in its folder."""

GENERATION = "generation_config.json"
"""File of sampling defaults and of the tokens that end a text."""

Config = Mapping[str, Any]
"""Fields of a config.json."""


def as_given(config: Config, tensors: "Tensors") -> "tuple[Config, Tensors]":
    """Both unchanged: files of the family have one form."""
    return config, tensors


class UnsaidError(OptionError):
    """A model that a family's config.json can't describe.

    Attributes:
        fields: Fields in which the nearest model that it describes differs, as ``model.mlp is relu, not swiglu``.
        whole: Whether these are all.
    """

    def __init__(self, kind: str, fields: Sequence[str], *, whole: bool = True) -> None:
        self.fields, self.whole = tuple(fields), whole
        super().__init__(
            f"{'; '.join(fields)}, as far as a config.json of {kind} can say; export it as another family"
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family: its configuration and its weights, in both directions."""

    model: Callable[[Config], Model]
    """The model of a config.json; raises OptionError for a field that it does not follow."""
    conversion: "Callable[[Config], Conversion]"
    """Rules between the weights of a config.json's model and ours."""
    config: Callable[[Model], dict[str, Any]]
    """A config.json for a model of ours, that transformers reads; raises OptionError for one that it can't say."""
    canonical: "Callable[[Config, Tensors], tuple[Config, Tensors]]" = as_given
    """A folder's config.json and tensors as the other three take them, where files differ in names or parts.

    To be applied to what a folder holds, before anything else.
    """


HOMES = {
    "bert": "systolic.models.encoder.family",
    "deepseek_v2": "systolic.models.decoder.families.deepseek",
    "deepseek_v3": "systolic.models.decoder.families.deepseek",
    "gemma2": "systolic.models.decoder.families.gemma",
    "gemma3": "systolic.models.decoder.families.gemma",
    "gemma3_text": "systolic.models.decoder.families.gemma",
    "gpt2": "systolic.models.decoder.families.gpt2",
    "gpt_oss": "systolic.models.decoder.families.gpt_oss",
    "llama": "systolic.models.decoder.families.llama",
    "mistral": "systolic.models.decoder.families.llama",
    "mixtral": "systolic.models.decoder.families.mixtral",
    "mobilenet_v2": "systolic.models.vision.mobilenet.family",
    "qwen2": "systolic.models.decoder.families.qwen",
    "qwen3": "systolic.models.decoder.families.qwen",
    "qwen3_moe": "systolic.models.decoder.families.qwen_moe",
    "resnet": "systolic.models.vision.resnet.family",
    "vit": "systolic.models.vision.vit.family",
    "whisper": "systolic.models.whisper.families",
}
"""Module of each ``model_type``, with a dict ``FAMILIES``; imported when asked for."""


def family(config: Config, source: str) -> Family:
    """The family of a config.json's content.

    Args:
        config: Its fields.
        source: Its name in messages.

    Raises:
        DataError: it has no model_type.
        OptionError: its model_type is none of those known.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise DataError(f"{source} has no model_type; give a config.json of transformers")
    if kind not in HOMES:
        raise OptionError(
            f"{source} is of the kind {kind!r}{misspelt(kind, HOMES)}; known are {', '.join(sorted(HOMES))}, others can be imported as a PyTorch module"
        )
    return import_module(HOMES[kind]).FAMILIES[kind]


def read_config(path: Path) -> dict[str, Any]:
    """Fields of a config.json, or of the one in a folder.

    Raises:
        NotFoundError: there is none.
        DataError: it is no JSON object.
    """
    file = path / CONFIG if path.is_dir() else path
    refuse_pointer(file)
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise NotFoundError(f"{file} can't be read ({error.strerror}); check the path") from error
    except ValueError as error:
        raise DataError(f"{file} is not JSON ({error}); write it again") from error
    if not isinstance(config, dict):
        raise DataError(f"{file} is no JSON object; give a config.json of transformers")
    return config
