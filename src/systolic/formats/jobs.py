"""The job that a model from elsewhere is used under, by the class of its model."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from systolic.core.errors import OptionError
from systolic.data.input_files import InputFiles
from systolic.data.text.prompts import Prompts
from systolic.formats import sentences
from systolic.formats.hugging_face import preprocessor as pictures
from systolic.formats.hugging_face.preprocessor import classifier
from systolic.formats.outline import ends_of, positions_of
from systolic.formats.program.model import ExportedProgram
from systolic.formats.sentences import embedder
from systolic.formats.source import Source, dtypes_of
from systolic.formats.speech import speech_job
from systolic.formats.tokens import tokenizer_of
from systolic.job import Batch, Field, Job, Model, Precision
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.families import GENERATION
from systolic.models.vision.mobilenet.config import MobileNetV2
from systolic.models.vision.resnet.config import ResNet
from systolic.models.vision.vit.config import ViT
from systolic.models.whisper.config import Whisper
from systolic.steps.tasks.arrays import ArrayOutputs
from systolic.steps.tasks.language import LanguageModel

ROW = 1024
"""Tokens of a row of text to score, or fewer where the model takes fewer."""


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
            f"{source.path} is a {kind.__name__}, which is imported and can't be used on its own; used are {', '.join(one.__name__ for one in MAKERS)}"
        )
    made = MAKERS[kind](source, texts)
    return replace(made, quantization=source.quantization) if source.quantization else made


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
    if beyond := [one for one in ids if one >= vocab]:
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
        name: Field(shape=tuple(one.shape), dtype=one.dtype) for name, one in about.inputs.items()
    }
    return Job(
        name=source.path.name,
        model=model,
        task=ArrayOutputs(),
        data=InputFiles(
            inputs=fields,
            repeated=tuple(name for name, one in about.inputs.items() if not one.batched),
            together=about.together,
        ),
        steps=1,
        batch=Batch(per_device=about.batch or 1),
        precision=Precision.f32,
    )


GUESSES: Mapping[type[Model], Callable[[Source], tuple[str, ...]]] = {
    Encoder: sentences.notes_of,
    MobileNetV2: pictures.notes_of,
    ResNet: pictures.notes_of,
    ViT: pictures.notes_of,
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
