"""The job of an imported encoder: vectors of texts, pooled as the folder of sentence-transformers says."""

import json
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, OptionError
from systolic.data.text.sentences import Sentences
from systolic.interop.source import LENGTHS, POOLING, PROMPTS, Source, dtypes_of
from systolic.interop.tokens import tokenizer_of
from systolic.job import Batch, Job
from systolic.models.encoder.config import Encoder
from systolic.models.families import read_config
from systolic.steps.tasks.embedding import Embedding, TextPooling

MODULES, TOKENIZER = "modules.json", "tokenizer_config.json"
MODES = {
    "pooling_mode_mean_tokens": TextPooling.mean,
    "pooling_mode_cls_token": TextPooling.first,
    "pooling_mode_max_tokens": TextPooling.maximum,
}
"""Fields of 1_Pooling/config.json that are followed."""
NAMES = {"mean": TextPooling.mean, "cls": TextPooling.first, "max": TextPooling.maximum}
"""Values of its newer field ``pooling_mode``."""


def embedder(source: Source, texts: bool) -> Job:
    """A model of embeddings with its tokenizer; mean over tokens, of length 1, where the folder says nothing else.

    Args:
        source: The model in files.
        texts: Whether it needs its tokenizer.

    Raises:
        OptionError: it has no tokenizer.json, or a module that is not known.
    """
    model = source.model
    assert isinstance(model, Encoder)
    tokenizer = tokenizer_of(source, model.vocab, texts=texts)
    files = source.files()
    return Job(
        name=source.path.name,
        model=model,
        task=_task(files),
        data=Sentences(
            tokenizer=tokenizer,
            sequence=_longest(files, model),
            lower=LENGTHS in files and bool(read_config(files[LENGTHS]).get("do_lower_case")),
            before=_before(files),
        ),
        steps=1,
        batch=Batch(per_device=1),
        dtypes=dtypes_of(source),
    )


def _longest(files: dict[str, Path], model: Encoder) -> int:
    """Most tokens of a text."""
    given = read_config(files[LENGTHS]).get("max_seq_length") if LENGTHS in files else None
    if given is None and TOKENIZER in files:
        given = read_config(files[TOKENIZER]).get("model_max_length")
    return min(int(given or model.positions), model.positions)


def _before(files: dict[str, Path]) -> str:
    """The prompt that sentence-transformers writes before each text where it is given none.

    Raises:
        OptionError: there is none of the default's name.
    """
    fields = read_config(files[PROMPTS]) if PROMPTS in files else {}
    name, known = fields.get("default_prompt_name"), fields.get("prompts") or {}
    if name is not None and name not in known:
        raise OptionError(
            f"{files[PROMPTS]} has default_prompt_name {name!r} and prompts {', '.join(known) or 'of no name'}; correct it"
        )
    return "" if name is None else str(known[name])


def _task(files: dict[str, Path]) -> Embedding:
    """Pooling and length of vectors by modules.json.

    Raises:
        OptionError: a module or a pooling that is not known.
        DataError: modules.json is damaged.
    """
    if MODULES not in files:
        return Embedding()
    try:
        steps = [
            str(step["type"]).rpartition(".")[2] for step in json.loads(files[MODULES].read_bytes())
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{files[MODULES]} is damaged ({error}); copy it again") from error
    unknown = [step for step in steps if step not in ("Transformer", "Pooling", "Normalize")]
    if unknown or "Pooling" not in steps:
        raise OptionError(
            f"{files[MODULES]} has the modules {', '.join(steps)}; known are Transformer, Pooling and Normalize"
        )
    if POOLING not in files:
        raise OptionError(
            f"{files[MODULES]} names a pooling and {POOLING} is not there; copy the whole folder"
        )
    return Embedding(pooling=_pooling(files[POOLING]), normalise="Normalize" in steps)


def _pooling(file: Path) -> TextPooling:
    fields: dict[str, Any] = read_config(file)
    asked = [
        name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True
    ]
    known = [MODES[name] for name in asked if name in MODES]
    if fields.get("pooling_mode") in NAMES:
        return NAMES[fields["pooling_mode"]]
    if len(asked) != 1 or not known:
        raise OptionError(
            f"{file} asks for {', '.join(asked) or fields.get('pooling_mode') or 'no pooling'}; one of {', '.join(MODES)} is known"
        )
    return known[0]
