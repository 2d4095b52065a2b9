"""Models from elsewhere as recipes, other than decoders: encoders, image models, Whisper, and a Bundle's program of another framework, whose step can be priced before it has a loss."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, POSITIVE
from systolic.data.audio import Recordings
from systolic.formats.bundle import open_bundled
from systolic.formats.jobs import job_of
from systolic.job import Batch, Job, Layout, Model, Optimizer, Precision
from systolic.models.encoder.config import Encoder
from systolic.models.vision.config import MobileNetV2, ResNet, ViT
from systolic.models.whisper.config import Whisper
from systolic.recipes.image import ImageModel, image
from systolic.recipes.mlm import mlm
from systolic.steps.tasks import Transcription

ROW = 512
"""Tokens of an encoder's row, or fewer where it takes fewer."""
SPEECH_BATCH = Batch(per_device=8)
OF_ANOTHER = ("size", "patch", "stem", "norm_examples", "classes")
"""Options of the recipe ``image`` that the model itself decides."""


def recipe_of_other(own: Model, name: str) -> Callable[..., Job]:
    """The function of a model's recipe, that is an encoder, an image model or a Whisper.

    Raises:
        OptionError: it is of another class.
    """
    if isinstance(own, Encoder):
        # The recipe ``mlm``; a model of embeddings gets the head for masked tokens, and loses a pooler, which they do not train.
        defaults: dict[str, Any] = {
            "model": replace(own, head=True, pooler=False),
            "sequence": min(ROW, own.positions),
        }

        def job(**options: Any) -> Job:
            return replace(mlm(**{**defaults, **options}), name=name)

        return _described(job, mlm, defaults)
    if isinstance(own, Whisper):
        return _speech(own, name)
    if not isinstance(own, MobileNetV2 | ResNet | ViT):
        raise OptionError(
            f"{name} is a model of the class {type(own).__name__}, which is not forecast by its configuration; forecast a recipe with such a model"
        )
    return _pictures(own, name)


def _pictures(own: MobileNetV2 | ResNet | ViT, name: str) -> Callable[..., Job]:
    """The recipe ``image`` for the model's own picture size and classes."""
    kind = {MobileNetV2: ImageModel.mobilenet_v2, ResNet: ImageModel.resnet50}
    defaults: dict[str, Any] = {"model": own}

    def job(**options: Any) -> Job:
        arguments = {**defaults, **options}
        model = arguments.pop("model")
        patch = {"patch": model.patch} if isinstance(model, ViT) else {}
        pixels, classes = model.pixels, model.num_classes
        named = kind.get(type(model), ImageModel.vit_b)
        image_job = image(model=named, size=pixels.size, classes=classes, **patch, **arguments)
        data: Any = image_job.data
        return replace(
            image_job, name=name, model=model, data=replace(data, channels=pixels.channels)
        )

    return _described(job, image, defaults, OF_ANOTHER)


def _speech(own: Whisper, name: str) -> Callable[..., Job]:
    """Next tokens of a recording's text, the tokens before given."""

    def job(
        path: Path | None = None,
        validation: Path | None = None,
        tokenizer: Path | None = None,
        model: Whisper = own,
        batch_per_device: float | None = None,
        batch: int | None = None,
        steps: int = 1000,
        optimizer: Optimizer = Optimizer(learning_rate=1e-5, weight_decay=0.0),
        precision: Precision = Precision.auto,
        layout: Layout = Layout(),
    ) -> Job:
        """Whisper.

        Args:
            path: Manifest of recordings with their texts.
            validation: Manifest of the validation split; by default a share of the lines.
            tokenizer: A tokenizer.json or its folder; by default bytes.
            model: The model's sizes.
            batch_per_device: Recordings per device and pass, by default 8.
            batch: Recordings per optimizer step, instead of batch-per-device.
            steps: Optimizer steps.
            optimizer: The update rule.
            precision: Compute dtype; auto is bf16 where the chip has it, f32 on a CPU.
            layout: Parallelism and memory settings.
        """
        return Job(
            name=name,
            model=model,
            task=Transcription(),
            data=Recordings(
                path=path,
                validation=validation,
                tokenizer=tokenizer,
                sequence=model.positions,
                frames=model.frames,
                mels=model.mels,
            ),
            steps=steps,
            batch=Batch.given(batch, batch_per_device, SPEECH_BATCH),
            optimizer=optimizer,
            precision=precision,
            layout=layout,
        )

    return job


def _described(
    job: Callable[..., Job],
    like: Callable[..., Job],
    defaults: dict[str, Any],
    without: tuple[str, ...] = (),
) -> Callable[..., Job]:
    """Gives a function the options of a recipe, with other defaults."""
    parameters = []
    for name, parameter in inspect.signature(like).parameters.items():
        if name in without:
            continue
        changed = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        if name in defaults:
            changed = changed.replace(default=defaults[name])
        if name == "model":
            changed = changed.replace(annotation=type(defaults[name]))
        parameters.append(changed)
    job.__signature__ = inspect.Signature(parameters, return_annotation=Job)  # ty: ignore[missing-attribute]
    lines = (like.__doc__ or "").splitlines(keepends=True)
    unused = tuple(f"{name}:" for name in without)
    job.__doc__ = "".join(line for line in lines if not line.lstrip().startswith(unused or ("\0",)))
    return job


def recipe_of_program(folder: Path) -> Callable[..., Job]:
    """The function of a program's recipe.

    Args:
        folder: Of the Bundle.

    Raises:
        NotFoundError: a file of the Bundle is missing.
        DataError: it is damaged.
    """
    source = open_bundled(folder.absolute())
    own = job_of(source)

    def job(
        batch: Annotated[int | None, COUNT] = None,
        batch_per_device: Annotated[float | None, POSITIVE] = None,
        steps: Annotated[int, COUNT] = 1000,
        layout: Layout = Layout(),
    ) -> Job:
        examples = Batch.given(batch, batch_per_device, own.batch)
        return replace(own, batch=examples, steps=steps, layout=layout)

    job.__doc__ = f"""A program from {source.bundle.record.source.kind}, in float32. The loss of its train step is a stand-in, the mean square of the outputs.

    Args:
        batch: Examples per step.
        batch_per_device: Examples per step and device; by default {own.batch.per_device:g}.
        steps: Steps to train for.
        layout: How to spread the work.
    """
    return job
