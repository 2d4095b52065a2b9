"""Fields of a config.json that a family does not read."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from systolic.models.families import Config, family

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
