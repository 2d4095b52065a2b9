"""Model families of Hugging Face's transformers that are models of ours, by the ``model_type`` of a config.json, and the published models of ``published.toml`` by name."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.errors import DataError, NotFoundError, OptionError, misspelt, nearest
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
HOMES = {
    "bert": "systolic.models.encoder.family",
    "deepseek_v2": "systolic.models.decoder.families.deepseek",
    "deepseek_v3": "systolic.models.decoder.families.deepseek",
    "gemma2": "systolic.models.decoder.families.gemma",
    "gemma3": "systolic.models.decoder.families.gemma",
    "gemma3_text": "systolic.models.decoder.families.gemma",
    "gpt2": "systolic.models.decoder.families.gpt",
    "gpt_oss": "systolic.models.decoder.families.gpt",
    "llama": "systolic.models.decoder.families.llama",
    "mistral": "systolic.models.decoder.families.llama",
    "mixtral": "systolic.models.decoder.families.llama",
    "mobilenet_v2": "systolic.models.vision.families",
    "qwen2": "systolic.models.decoder.families.llama",
    "qwen3": "systolic.models.decoder.families.llama",
    "qwen3_moe": "systolic.models.decoder.families.llama",
    "resnet": "systolic.models.vision.families",
    "vit": "systolic.models.vision.families",
    "whisper": "systolic.models.whisper.families",
}
"""Module of each ``model_type``, with a dict ``FAMILIES``; imported when asked for."""
WITHOUT_EFFECT = (
    r"_.*|architectures|model_type|torch_dtype|dtype|transformers(\.js|_)?.*version|unsloth_.*",
    r".*_token_ids?|.*_token_index|forced_.*|(begin_)?suppress_tokens|max_length|decoder_start.*",
    r"use_cache|return_dict.*|output_.*|use_return_dict|torchscript|gradient_checkpointing|cache_implementation",
    r".*dropout.*|.*_pdrop|.*drop_?path.*|.*layerdrop|init(ializer)?_.*|router_jitter_noise|rescale_prenorm_residual",
    r".*aux_loss.*|ep_size|seq_aux|pretraining_tp|num_nextn_predict_layers|chunk_size_feed_forward",
    r"id2label|label2id|num_labels|problem_type|task_specific_params|finetuning_task|summary_.*|classifier_.*",
    r"apply_spec_augment|mask_(time|feature)_.*|median_filter_width|use_weighted_layer_sum|encoder_stride",
    r"use_sliding_window|add_cross_attention|reorder_and_upcast_attn|stage_names|pooler_(act|output_size)|out_(features|indices)|semantic_loss_.*",
    r"is_encoder_decoder|tie_encoder_decoder|use_bfloat16|max_position_embeddings|quantization_config",
    r"vision_config|image_size|mm_.*|n_ctx|initial_context_length|original_max_position_embeddings",
)


"""Patterns (full matches) of names that change no output: tokens, dropout, losses, first weights, other heads, other parts of a model."""
WINDOWS = ("sliding_window", "max_window_layers")


"""Fields that ``use_sliding_window`` switches off."""
LATENT = {"head_dim", "intermediate_size", "num_key_value_heads", "qk_head_dim"}
ELSEWHERE = {
    "deepseek_v2": LATENT | {"n_group", "scoring_func", "topk_group"},
    "deepseek_v3": LATENT | {"rope_interleave"},
    "gemma3": {"tie_word_embeddings"},
    "qwen3_moe": {"intermediate_size"},
}


"""Fields of a family that follow from others, that only some values of others give an effect, or that its conversion reads."""
FULL = "full_attention"


"""Kind of layer that ``layer_types`` changes nothing with."""
NESTED = "text_config"


"""Field with the fields of a language model that is a part of another."""
FAMILY = 6
"""Models of a family that a message names."""


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


@cache
def _known() -> re.Pattern[str]:
    """Compiled when it is first asked for, which takes a tenth of a second."""
    return re.compile("|".join(WITHOUT_EFFECT))


class _Nothing:
    """A value that is false, equal to nothing and of no type that anything takes."""

    def __bool__(self) -> bool:
        return False


def notes_of(config: Config, file: str) -> tuple[str, ...]:
    """One line about the fields of a config.json that are not read, if there are any.

    Args:
        config: Its fields.
        file: Its name in the line.

    Raises: as :func:`unread`.
    """
    names = unread(config, family(config, file).model)
    if not names:
        return ()
    return (
        f"{file} has fields that are not read: {', '.join(names)}; a model that needs them computes something else here",
    )


def unread(config: Config, model: Callable[[Config], Any]) -> list[str]:
    """Fields that a family does not read and that may change what a model computes, sorted.

    A field is read if another value of it makes another model, or is refused. Fields that are null
    and those of :data:`WITHOUT_EFFECT` are left out.

    Args:
        config: Fields of a config.json.
        model: Makes the family's model of them.

    Raises:
        OptionError: a field of ``config`` has a value that is not followed.
    """
    built = model(config)
    inner = config.get(NESTED)
    fields = inner if isinstance(inner, dict) else config
    off = {NESTED, *ELSEWHERE.get(str(config.get("model_type")), ())}
    names = [] if fields is config else _candidates(config, off)
    if not fields.get("use_sliding_window", True):
        off.update(WINDOWS)
    if set(fields.get("layer_types") or ()) == {FULL}:
        off.add("layer_types")

    def ignored(name: str) -> bool:
        for value in (object(), _Nothing()):
            changed = {**fields, name: value}
            try:
                if model(changed if fields is config else {**config, NESTED: changed}) != built:
                    return False
            except Exception:  # whatever the family does with it, it looked
                return False
        return True

    return sorted({*names, *(name for name in _candidates(fields, off) if ignored(name))})


def _candidates(fields: Config, skipped: set[str]) -> list[str]:
    return [
        name
        for name, value in fields.items()
        if value is not None and name not in skipped and not _known().fullmatch(name)
    ]


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published model: its configuration and its parameters, each with its source."""

    name: str
    """``llama-3.1-70b``."""
    hub: str
    """Its name on Hugging Face."""
    config: Config
    """Fields of its config.json that say what it computes."""
    config_source: str
    parameters: int
    """Parameters as published, embeddings included; of the text model."""
    counted_by: str
    """Source of the number of parameters."""
    exact: bool
    """Whether it is published to the digit; else ``parameters`` is what transformers 5.23 counts."""

    def model(self) -> Model:
        """The model of its configuration."""
        return family(self.config, self.name).model(self.config)


@cache
def published() -> Mapping[str, PublishedModel]:
    """All published models, by name."""
    text = files("systolic.models").joinpath("published.toml").read_text(encoding="utf-8")
    models: dict[str, PublishedModel] = {}
    for kin in tomllib.loads(text)["family"]:
        for name, fields in kin["models"].items():
            models[name] = PublishedModel(
                name=name,
                hub=fields["hub"],
                config={**kin["config"], **fields["config"]},
                config_source=kin["config_source"],
                parameters=fields["parameters"],
                counted_by=fields.get("counted_by", kin["counted_by"]),
                exact=kin.get("exact", True),
            )
    return models


def find_published(target: str) -> PublishedModel | None:
    """The published model of a name here or on Hugging Face, in any case; ``None`` if there is none."""
    known = published()
    lowered = target.lower()
    if lowered in known:
        return known[lowered]
    return next((model for model in known.values() if model.hub.lower() == lowered), None)


def near_published(target: str, others: Sequence[str] = ()) -> str:
    """Models, and other names, that may be meant: one that is misspelt, else those of the same family."""
    models = list(published())
    alike, typed = _of_family(target, models), target.lower()
    for model in alike:
        if len(model) == len(typed) and sum(a != b for a, b in zip(model, typed, strict=True)) == 1:
            return f"; did you mean {model}?"
    if typo := misspelt(target, [*others, *models]):
        return typo
    if not alike:
        return nearest(target, [*others, *models])
    shown = ", ".join(alike[:FAMILY]) + (" …" if len(alike) > FAMILY else "")
    return f"; of that family it knows {shown}, and takes the config.json of any other"


def _of_family(name: str, models: Sequence[str]) -> list[str]:
    """Models that begin with the same word: the sizes of llama-3.1 for ``llama`` or ``Llama-2-7b``."""
    word = re.match(r"[a-z]*", name.lower().rpartition("/")[2])
    first = word[0] if word else ""
    return [model for model in models if len(first) > 2 and re.split(r"[^a-z]", model)[0] == first]
