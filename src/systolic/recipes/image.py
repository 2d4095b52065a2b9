"""A residual network, a MobileNetV2 or a vision transformer on any folder of pictures."""

import enum
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from systolic.core.arguments import explained_by, with_types
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.data.image.images import Images
from systolic.data.image.pictures import Augmentation
from systolic.job import (
    Batch,
    ChangedOptimizer,
    Checkpoints,
    Dtypes,
    Evaluation,
    FileReading,
    Guard,
    Job,
    Layout,
    Mode,
    Model,
    Optimizer,
    OptimizerChange,
    OptimizerKind,
    Precision,
    Schedule,
)
from systolic.models.vision.config import Depth, MobileNetV2, Pixels, Preset, ResNet, Stem, ViT
from systolic.recipes.digits import digits
from systolic.steps.tasks import Classification

SGD = Optimizer(kind=OptimizerKind.sgd, learning_rate=0.1, b1=0.9, weight_decay=1e-4, clip=0.0)
"""Defaults of residual networks at REFERENCE_BATCH (He et al. 2016; Goyal et al. 2017)."""
MOBILE = replace(SGD, learning_rate=0.045, weight_decay=4e-5)
"""Defaults of MobileNetV2 at REFERENCE_BATCH (torchvision's reference training)."""
ADAMW = Optimizer(learning_rate=2.5e-4, b2=0.999, weight_decay=0.1, clip=1.0)
"""Defaults of vision transformers at REFERENCE_BATCH (Beyer, Zhai, Kolesnikov 2022: 1e-3 at 1024)."""
LARS = Optimizer(kind=OptimizerKind.lars, learning_rate=0.8, b1=0.9, weight_decay=2e-4, clip=0.0)
"""Defaults for large batches of residual networks at REFERENCE_BATCH (Google's MLPerf v0.7 submission on v3-32: 13 at 4096)."""
REFERENCE_BATCH = 256
"""Batch of the default learning rates, which are scaled in proportion to the batch."""
SCHEDULE = Schedule(warmup=500, final=0.0)
CLASSES = 1000
"""Classes of ImageNet, which a forecast without pictures is made with."""
PATCH = 16
"""Default pixels on a side of a vision transformer's patch."""
SMALL_SIZE = 64
"""Largest image size at which a residual network uses the small stem by default."""


class ImageModel(enum.Enum):
    """A published network."""

    resnet18 = "resnet18"
    resnet34 = "resnet34"
    resnet50 = "resnet50"
    resnet101 = "resnet101"
    mobilenet_v2 = "mobilenet-v2"
    vit_ti = "vit-ti"
    vit_s = "vit-s"
    vit_b = "vit-b"
    vit_l = "vit-l"


DEPTHS = {
    ImageModel.resnet18: Depth.d18,
    ImageModel.resnet34: Depth.d34,
    ImageModel.resnet50: Depth.d50,
    ImageModel.resnet101: Depth.d101,
}
PRESETS = {
    ImageModel.vit_ti: Preset.tiny,
    ImageModel.vit_s: Preset.small,
    ImageModel.vit_b: Preset.base,
    ImageModel.vit_l: Preset.large,
}


@with_types
@explained_by(digits)
def image(
    path: Path | None = None,
    model: ImageModel = ImageModel.resnet50,
    size: int = 224,
    patch: Annotated[int, COUNT] = PATCH,
    stem: Stem | None = None,
    norm_examples: Annotated[int, NOT_NEGATIVE] = 0,
    classes: Annotated[int | None, COUNT] = None,
    steps: int = 10_000,
    batch: int | None = None,
    batch_per_device: float | None = None,
    optimizer: ChangedOptimizer = OptimizerChange(),
    schedule: Schedule = SCHEDULE,
    label_smoothing: float = 0.1,
    augmentation: Augmentation = Augmentation(),
    data: FileReading = FileReading(),
    precision: Precision = Precision.auto,
    dtypes: Dtypes = Dtypes(),
    layout: Layout = Layout(),
    evaluation: Evaluation = Evaluation(every=1000, metric="accuracy", mode=Mode.max),
    checkpoints: Checkpoints = Checkpoints(every=1000),
    guard: Guard = Guard(),
    seed: int = 0,
) -> Job:
    """Trains a ResNet, a MobileNetV2 or a ViT on a folder of pictures with one folder a class.

    Args:
        path: Folder of class folders, of train/, val/ and test/ with class folders, or a folder from systolic data pack --images. A forecast does without.
        model: The network.
        size: Height and width of the crops that the network sees.
        patch: Pixels on a side of a patch (vit only).
        stem: Layers before the stages (resnet only); by default imagenet, and small for sizes up to 64.
        norm_examples: Examples that share batch norm statistics (not vit), a divisor of the batch of a pass: 32 with 32 examples a device keeps them on each device; 0 shares them over all.
        classes: Number of classes; by default the number of class folders, and 1000 without a path.
        steps: Optimizer steps.
        batch: Images per optimizer step; by default 256.
        optimizer: The update rule; by default SGD at 0.1 for resnets and 0.045 for mobilenet-v2, and AdamW at 0.00025 for vits, per 256 images of batch.
        schedule: The learning rate over the steps; the default warm-up is at most a tenth of them.
        augmentation: Augmentation of training examples.
        data: Reading of pictures.
        evaluation: When to evaluate, and early stopping.
        checkpoints: When to save, and which to keep.
        seed: Seed of the initial weights, the order and the crops.
    """
    images = Images(path=path, side=size, augmentation=augmentation, on_error=data.on_error)
    if classes is None:
        classes = CLASSES if path is None else len(images.labels())
    size_of_batch = Batch.given(batch, batch_per_device, Batch(total=REFERENCE_BATCH))
    return Job(
        name="image",
        model=network(model, size, patch, classes, stem, norm_examples),
        task=Classification(label_smoothing=label_smoothing),
        data=images,
        steps=steps,
        batch=size_of_batch,
        optimizer=update_rule(model, optimizer, size_of_batch),
        schedule=schedule.shortened(SCHEDULE, steps),
        precision=precision,
        dtypes=dtypes,
        layout=layout,
        evaluation=evaluation,
        checkpoints=checkpoints,
        guard=guard,
        seed=seed,
    )


def update_rule(model: ImageModel, change: OptimizerChange, batch: Batch) -> Optimizer:
    """The optimizer of a network, its learning rate in proportion to the batch unless one is given.

    Raises:
        OptionError: no learning rate is given, and the batch depends on the devices.
    """
    rules = (SGD, ADAMW, LARS) if model in DEPTHS else (ADAMW, SGD, LARS)
    if model is ImageModel.mobilenet_v2:
        rules = (MOBILE, ADAMW, LARS)
    chosen = change.of(*rules)
    if change.learning_rate is not None:
        return chosen
    if batch.total is None:
        raise OptionError(
            f"--batch-per-device {batch.per_device:g} makes the batch depend on the devices, and the default learning rate is proportional to it; add --optimizer.learning-rate, or give --batch"
        )
    return replace(chosen, learning_rate=chosen.learning_rate * batch.total / REFERENCE_BATCH)


def network(
    model: ImageModel,
    size: int,
    patch: int,
    num_classes: int,
    stem: Stem | None = None,
    norm_examples: int = 0,
) -> Model:
    """The network for crops of ``size`` pixels.

    Raises:
        OptionError: no class, a patch that does not divide the size, or an option of the other kind of network.
    """
    pixels = Pixels(size=size)
    if model not in PRESETS and patch != PATCH:
        raise OptionError(
            f"--patch is for vision transformers only, and the model is {model.value}; leave it out"
        )
    if model not in DEPTHS and stem is not None:
        raise OptionError(
            f"--stem is for residual networks only, and the model is {model.value}; leave it out"
        )
    if model is ImageModel.mobilenet_v2:
        return MobileNetV2(norm_examples=norm_examples, num_classes=num_classes, pixels=pixels)
    if model in DEPTHS:
        usual = Stem.small if size <= SMALL_SIZE else Stem.imagenet
        return ResNet(
            depth=DEPTHS[model],
            stem=stem or usual,
            norm_examples=norm_examples,
            num_classes=num_classes,
            pixels=pixels,
        )
    if norm_examples:
        raise OptionError(
            f"--norm-examples is for networks with batch norm, and the model is {model.value}; leave it out"
        )
    if size % patch:
        raise OptionError(f"--patch {patch} does not divide --size {size}; change one")
    return ViT.preset(PRESETS[model], patch=patch, num_classes=num_classes, pixels=pixels)
