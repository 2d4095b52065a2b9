"""The job of an imported encoder: vectors of texts, pooled as the folder of sentence-transformers says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, OptionError
from systolic.data.text.sentences import Sentences
from systolic.formats.source import LENGTHS, POOLING, PROMPTS, Source, dtypes_of
from systolic.formats.tokens import tokenizer_of
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
    data = Sentences(
        tokenizer=tokenizer,
        sequence=_longest(files, model),
        lower=LENGTHS in files and bool(read_config(files[LENGTHS]).get("do_lower_case")),
        before=_before(files),
    )
    return Job(
        name=source.path.name,
        model=model,
        task=_task(files, data),
        data=data,
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


def notes_of(source: Source) -> tuple[str, ...]:
    """What a folder leaves open, and what is done."""
    files = source.files()
    found = []
    if MODULES not in files:
        found.append(
            f"{source.path} has no {MODULES} of sentence-transformers, which says how vectors are made; they are means over tokens, of length 1"
        )
    fields = read_config(files[PROMPTS]) if PROMPTS in files else {}
    known = [name for name, text in (fields.get("prompts") or {}).items() if text]
    if known and fields.get("default_prompt_name") is None:
        found.append(
            f"{files[PROMPTS]} has the prompts {', '.join(known)} and no default_prompt_name, so that none is written before a text; write it there yourself, or name one in the file"
        )
    if fields.get("truncate_dim"):
        found.append(
            f"{files[PROMPTS]} has truncate_dim {fields['truncate_dim']}, which is not followed; vectors have all their numbers"
        )
    return tuple(found)


def _unpooled(file: Path, data: Sentences) -> int:
    """Tokens before a text that are not pooled: the prompt and what the tokenizer puts before it, where include_prompt is false."""
    if read_config(file).get("include_prompt", True) or not data.before or not data.tokenizer:
        return 0
    tokenizer = data.get_tokenizer()
    (prompt,) = replace(data, before="").encode([data.before], tokenizer)
    # The prompt alone has the end of a text behind it, which is not before one.
    after = len(tokenizer.documents([""])[0]) - len(tokenizer.prompt(""))
    return max(len(prompt) - after, 0)


def _task(files: dict[str, Path], data: Sentences) -> Embedding:
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
    return Embedding(
        pooling=_pooling(files[POOLING]),
        normalise="Normalize" in steps,
        unpooled=_unpooled(files[POOLING], data),
    )


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
