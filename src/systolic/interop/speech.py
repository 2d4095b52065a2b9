"""The job of an imported Whisper: its tokens come from its tokenizer and its generation_config.json."""

import json
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError
from systolic.data.audio.recordings import Recordings, Writing, checked_prompt
from systolic.interop.source import Source
from systolic.interop.tokens import tokenizer_of
from systolic.job import Batch, Job
from systolic.models.families import GENERATION, read_config
from systolic.models.whisper.config import MULTILINGUAL_VOCAB, Whisper
from systolic.steps.tasks.transcription import Transcription

START, END, NO_TIMES = "<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>"
LANGUAGE, TASK = "<|en|>", "<|transcribe|>"
"""Language and task of a model that knows several, where its generation_config.json forces no others."""


def speech_job(source: Source, texts: bool) -> Job:
    """The job that writes down speech with a source's weights.

    Args:
        source: The model in files.
        texts: Whether it needs its tokenizer.

    Raises:
        OptionError: it has no tokenizer.json, or one of another model.
        DataError: a file is damaged.
    """
    model = source.model
    assert isinstance(model, Whisper)
    tokenizer = tokenizer_of(source, model.vocab, texts=texts)
    writing = Writing()
    if tokenizer is not None:
        writing = writing_of(source, tokenizer, model)
        checked_prompt(writing, model.vocab)
    return Job(
        name=source.path.name,
        model=model,
        task=Transcription(),
        data=Recordings(
            tokenizer=tokenizer,
            writing=writing,
            sequence=model.positions,
            frames=model.frames,
            mels=model.mels,
        ),
        steps=1,
        batch=Batch(per_device=1),
    )


def writing_of(source: Source, tokenizer: Path, model: Whisper) -> Writing:
    """Prompt, end and suppressed tokens; a model of several languages writes English unless its files force another.

    Raises:
        DataError: the tokenizer lacks a token, or a file is damaged.
    """
    fields: dict[str, Any] = dict(source.config)
    if (file := source.files().get(GENERATION)) is not None:
        fields |= {name: value for name, value in read_config(file).items() if value is not None}
    try:
        added = json.loads(tokenizer.read_bytes())["added_tokens"]
        ids = {token["content"]: int(token["id"]) for token in added}
        prompt = [ids[START]]
        if model.vocab >= MULTILINGUAL_VOCAB:
            forced = dict(fields.get("forced_decoder_ids") or ())
            prompt += [forced.get(1) or ids[LANGUAGE], forced.get(2) or ids[TASK]]
        prompt.append(ids[NO_TIMES])
        return Writing(
            prompt=tuple(prompt),
            end=ids[END],
            suppressed=tuple(fields.get("suppress_tokens") or ()),
            suppressed_first=tuple(fields.get("begin_suppress_tokens") or ()),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{tokenizer} is not the tokenizer of a Whisper ({error}); copy it from where the model came from"
        ) from error
