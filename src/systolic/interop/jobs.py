"""The job that a model from elsewhere is used under, by the class of its model."""

from collections.abc import Callable, Mapping

from systolic.core.errors import OptionError
from systolic.data.input_files import InputFiles
from systolic.data.text.prompts import Prompts
from systolic.interop.outline import ends_of
from systolic.interop.pictures import classifier
from systolic.interop.program.model import ExportedProgram
from systolic.interop.sentences import embedder
from systolic.interop.source import Source, dtypes_of
from systolic.interop.speech import speech_job
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
POSITIONS = ("max_position_embeddings", "n_positions")
"""Fields of a config.json with the tokens that a model takes at once."""


def job_of(source: Source) -> Job:
    """The job that evaluates, generates and predicts with a source's weights; it has no training data.

    Raises:
        OptionError: nothing here uses such a model.
    """
    kind = type(source.model)
    if kind not in MAKERS:
        raise OptionError(
            f"{source.path} is a {kind.__name__}, which is imported and can't be used on its own; used are {', '.join(one.__name__ for one in MAKERS)}"
        )
    return MAKERS[kind](source)


def _decoder(source: Source) -> Job:
    """A language model with its tokenizer.

    Raises:
        OptionError: it has no tokenizer.json.
    """
    tokenizer = source.tokenizer
    if tokenizer is None:
        raise OptionError(
            f"{source.path} has no tokenizer.json; copy it from where the model came from, beside config.json"
        )
    positions = next((source.config[name] for name in POSITIONS if source.config.get(name)), ROW)
    return Job(
        name=source.path.name,
        model=source.model,
        task=LanguageModel(),
        data=Prompts(
            tokenizer=tokenizer,
            sequence=min(ROW, positions),
            positions=positions,
            stops=ends_of(source.config, source.files().get(GENERATION)),
        ),
        steps=1,
        batch=Batch(per_device=1),
        dtypes=dtypes_of(source),
    )


def _program(source: Source) -> Job:
    """An exported program, whose loss is a stand-in until a recipe of one's own has another."""
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
        ),
        steps=1,
        batch=Batch(per_device=about.batch or 1),
        precision=Precision.f32,
    )


MAKERS: Mapping[type[Model], Callable[[Source], Job]] = {
    Decoder: _decoder,
    Encoder: embedder,
    ExportedProgram: _program,
    MobileNetV2: classifier,
    ResNet: classifier,
    ViT: classifier,
    Whisper: speech_job,
}
"""Class of a model to what makes its job."""
