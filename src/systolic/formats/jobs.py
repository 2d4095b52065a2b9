"""The job that a model from elsewhere is used under, by the class of its model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, OptionError
from systolic.core.units import with_article
from systolic.data.audio import Recordings, Writing, checked_prompt
from systolic.data.input_files import InputFiles
from systolic.data.text.documents import Prompts
from systolic.data.text.text_data import Sentences
from systolic.formats.hugging_face.preprocessor import classifier, picture_notes
from systolic.formats.outline import ends_of, positions_of, tokenizer_of
from systolic.formats.program.model import ExportedProgram
from systolic.formats.source import LENGTHS, POOLING, PROMPTS, Source, dtypes_of
from systolic.job import Batch, Field, Job, Model, Precision
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.families import GENERATION, Config, read_config
from systolic.models.vision.config import MobileNetV2, ResNet, ViT
from systolic.models.whisper.config import MULTILINGUAL_VOCAB, Whisper, token_of
from systolic.steps.tasks import ArrayOutputs, Embedding, LanguageModel, TextPooling, Transcription

MODULES, TOKENIZER = "modules.json", "tokenizer_config.json"

MODES = {
    "pooling_mode_mean_tokens": TextPooling.mean,
    "pooling_mode_cls_token": TextPooling.first,
    "pooling_mode_max_tokens": TextPooling.maximum,
}
"""Fields of 1_Pooling/config.json that are followed."""

NAMES = {"mean": TextPooling.mean, "cls": TextPooling.first, "max": TextPooling.maximum}
"""Values of its newer field ``pooling_mode``."""
START, END, NO_TIMES = "<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>"
LANGUAGE, TASK = "<|en|>", "<|transcribe|>"
"""Language and task of a model that knows several, where its generation_config.json names no others."""
SILENCE = ("<|nospeech|>", "<|nocaptions|>")
"""Names of the token of no speech."""
ROW = 1024
"""Tokens of a row of text to score, or fewer where the model takes fewer."""


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
    longest = read_config(files[LENGTHS]).get("max_seq_length") if LENGTHS in files else None
    if longest is None and TOKENIZER in files:
        longest = read_config(files[TOKENIZER]).get("model_max_length")
    return min(int(longest or model.positions), model.positions)


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


def sentence_notes(source: Source) -> tuple[str, ...]:
    """Settings that a folder leaves open, with the values taken."""
    files = source.files()
    notes = []
    if MODULES not in files:
        notes.append(
            f"{source.path} has no {MODULES} of sentence-transformers, which says how vectors are made; they are means over tokens, of length 1"
        )
    fields = read_config(files[PROMPTS]) if PROMPTS in files else {}
    known = [name for name, text in (fields.get("prompts") or {}).items() if text]
    if known and fields.get("default_prompt_name") is None:
        notes.append(
            f"{files[PROMPTS]} has the prompts {', '.join(known)} and no default_prompt_name, so that none is written before a text; write it there yourself, or name one in the file"
        )
    if fields.get("truncate_dim"):
        notes.append(
            f"{files[PROMPTS]} has truncate_dim {fields['truncate_dim']}, which is not followed; vectors have all their numbers"
        )
    return tuple(notes)


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
    modes = [
        name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True
    ]
    known = [MODES[name] for name in modes if name in MODES]
    if fields.get("pooling_mode") in NAMES:
        return NAMES[fields["pooling_mode"]]
    if len(modes) != 1 or not known:
        raise OptionError(
            f"{file} asks for {', '.join(modes) or fields.get('pooling_mode') or 'no pooling'}; one of {', '.join(MODES)} is known"
        )
    return known[0]


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
    tokens = []
    for name, place, default in (("language", 1, LANGUAGE), ("task", 2, TASK)):
        choice = fields.get(name)
        if choice is None:
            tokens.append(forced.get(place) or ids[default])
            continue
        token = token_of(str(choice))
        if token not in ids:
            raise OptionError(
                f"{GENERATION} of {path} has the {name} {choice!r}, for which the tokenizer has no token {token}; correct it"
            )
        tokens.append(ids[token])
    language, task = tokens
    known = fields.get("language") or forced.get(1)
    return language, task, "" if known else "English"


def job_of(source: Source, *, texts: bool = True) -> Job:
    """The job that evaluates, generates and predicts with a source's weights: that of the run which it was, else one without training data.

    Args:
        source: The model in files.
        texts: Whether it reads and writes texts; without, a source that lacks its tokenizer has a job too.

    Raises:
        OptionError: nothing here uses such a model, its tokenizer is missing, or one of its files is of another model.
        DataError: a file is damaged.
    """
    kind = type(source.model)
    if (trained := source.trained_job()) is not None:
        return replace(trained, dtypes=dtypes_of(source), quantization=source.quantization)
    if kind not in MAKERS:
        raise OptionError(
            f"{source.path} is {with_article(kind.__name__)}, which is imported and can't be used on its own; used are {', '.join(known.__name__ for known in MAKERS)}"
        )
    job = MAKERS[kind](source, texts)
    return replace(job, quantization=source.quantization) if source.quantization else job


def notes_of(source: Source, job: Job) -> tuple[str, ...]:
    """Warnings about a model in files and its job; the data of a run may be gone, and was warned of in training."""
    if source.trained_job():
        return source.notes
    open_questions = GUESSES.get(type(source.model), lambda _: ())
    return (*source.notes, *job.data.notes(), *open_questions(source))


def _decoder(source: Source, texts: bool) -> Job:
    """A language model with its tokenizer.

    Raises:
        OptionError: it has no tokenizer.json, or a number of a file that the model can't have.
    """
    model = source.model
    assert isinstance(model, Decoder)
    tokenizer = tokenizer_of(source, model.vocab, texts=texts)
    positions = positions_of(source.config, model, str(source.path)) or ROW
    return Job(
        name=source.path.name,
        model=model,
        task=LanguageModel(),
        data=Prompts(
            tokenizer=tokenizer,
            sequence=min(ROW, positions),
            positions=positions,
            stops=_stops(source, model.vocab),
        ),
        steps=1,
        batch=Batch(per_device=1),
        dtypes=dtypes_of(source),
    )


def _stops(source: Source, vocab: int) -> tuple[int, ...]:
    """Ids that end a text, by generation_config.json, else by config.json.

    Raises:
        OptionError: one is beyond the model's vocabulary.
    """
    ids = ends_of(source.config, source.files().get(GENERATION))
    if beyond := [token for token in ids if token >= vocab]:
        raise OptionError(
            f"eos_token_id of {source.path} is {beyond[0]} and the model has {vocab} tokens; correct it in {GENERATION} or config.json"
        )
    return ids


def _classifier(source: Source, texts: bool) -> Job:
    del texts
    return classifier(source)


def _program(source: Source, texts: bool) -> Job:
    """An exported program, whose loss is a stand-in until a recipe of one's own has another."""
    del texts
    model = source.model
    assert isinstance(model, ExportedProgram)
    about = model.about
    fields = {
        name: Field(shape=tuple(input_.shape), dtype=input_.dtype)
        for name, input_ in about.inputs.items()
    }
    return Job(
        name=source.path.name,
        model=model,
        task=ArrayOutputs(),
        data=InputFiles(
            inputs=fields,
            repeated=tuple(name for name, input_ in about.inputs.items() if not input_.batched),
            together=about.together,
        ),
        steps=1,
        batch=Batch(per_device=about.batch or 1),
        precision=Precision.f32,
    )


GUESSES: Mapping[type[Model], Callable[[Source], tuple[str, ...]]] = {
    Encoder: sentence_notes,
    MobileNetV2: picture_notes,
    ResNet: picture_notes,
    ViT: picture_notes,
}
"""Class of a model to what says which of its job's settings its files leave open."""

MAKERS: Mapping[type[Model], Callable[[Source, bool], Job]] = {
    Decoder: _decoder,
    Encoder: embedder,
    ExportedProgram: _program,
    MobileNetV2: _classifier,
    ResNet: _classifier,
    ViT: _classifier,
    Whisper: speech_job,
}
"""Class of a model to what makes its job; whether it reads texts is the second argument."""
