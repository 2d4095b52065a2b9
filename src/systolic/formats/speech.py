"""The job of an imported Whisper: its tokens come from its tokenizer and its generation_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, OptionError
from systolic.data.audio.languages import token_of
from systolic.data.audio.recordings import Recordings, Writing, checked_prompt
from systolic.formats.source import Source
from systolic.formats.tokens import tokenizer_of
from systolic.job import Batch, Job
from systolic.models.families import GENERATION, Config, read_config
from systolic.models.whisper.config import MULTILINGUAL_VOCAB, Whisper
from systolic.steps.tasks.transcription import Transcription

START, END, NO_TIMES = "<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>"
LANGUAGE, TASK = "<|en|>", "<|transcribe|>"
"""Language and task of a model that knows several, where its generation_config.json names no others."""
SILENCE = ("<|nospeech|>", "<|nocaptions|>")
"""Names of the token of no speech."""


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
    """Prompt, end and suppressed tokens; a model of several languages writes English unless its files name another.

    Raises:
        OptionError: the files name a language or a task that the tokenizer does not have.
        DataError: the tokenizer lacks a token, or a file is damaged.
    """
    fields: dict[str, Any] = dict(source.config)
    if (file := source.files().get(GENERATION)) is not None:
        fields |= {name: value for name, value in read_config(file).items() if value is not None}
    try:
        added = json.loads(tokenizer.read_bytes())["added_tokens"]
        ids = {token["content"]: int(token["id"]) for token in added}
        prompt, assumed = [ids[START]], ""
        if model.vocab >= MULTILINGUAL_VOCAB:
            language, task, assumed = _spoken(fields, ids, source.path)
            prompt += [language, task]
        prompt.append(ids[NO_TIMES])
        return Writing(
            prompt=tuple(map(int, prompt)),
            end=ids[END],
            suppressed=tuple(fields.get("suppress_tokens") or ()),
            suppressed_first=tuple(fields.get("begin_suppress_tokens") or ()),
            silence=next((ids[name] for name in SILENCE if name in ids), None),
            no_speech=float(fields.get("no_speech_threshold", Writing().no_speech)),
            likely=float(fields.get("logprob_threshold", Writing().likely)),
            assumed=assumed,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{tokenizer} is not the tokenizer of a Whisper ({error}); copy it from where the model came from"
        ) from error


def _spoken(fields: Config, ids: Mapping[str, int], path: Path) -> tuple[int, int, str]:
    """Tokens of the language and the task, and the language's name where the files name none.

    Raises:
        OptionError: the tokenizer has no such token.
    """
    forced = dict(fields.get("forced_decoder_ids") or ())
    found = []
    for name, place, default in (("language", 1, LANGUAGE), ("task", 2, TASK)):
        given = fields.get(name)
        if given is None:
            found.append(forced.get(place) or ids[default])
            continue
        token = token_of(str(given))
        if token not in ids:
            raise OptionError(
                f"{GENERATION} of {path} has the {name} {given!r}, for which the tokenizer has no token {token}; correct it"
            )
        found.append(ids[token])
    language, task = found
    known = fields.get("language") or forced.get(1)
    return language, task, "" if known else "English"
