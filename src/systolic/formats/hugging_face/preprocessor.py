"""Job of an imported image model: its preprocessor_config.json, its classes, and picture files in the place of its training pictures."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from systolic.core.errors import OptionError
from systolic.core.ranges import Range, check
from systolic.data.image.images import Images
from systolic.data.image.pictures import EVALUATION_SHARE, Preparation, Resample
from systolic.formats.source import Source, dtypes_of
from systolic.job import Batch, Data, Field, Job, Read, Split
from systolic.job.data import Batches
from systolic.models.families import read_config
from systolic.models.vision.config import (
    HALF,
    IMAGENET_MEAN,
    IMAGENET_STD,
    MobileNetV2,
    Pixels,
    ResNet,
    ViT,
    image_size,
)
from systolic.models.vision.families import labels
from systolic.steps.tasks import Classification

PICTURED = (ResNet, ViT, MobileNetV2)
"""Image models that transformers has."""
PREPROCESSOR = "preprocessor_config.json"
FILTERS = (
    Resample.nearest,
    Resample.lanczos,
    Resample.bilinear,
    Resample.bicubic,
    Resample.box,
    Resample.hamming,
)
"""Filters by Pillow's numbers, as the file gives them."""
CONVNEXT_WHOLE = 384
"""Side from which ConvNeXT's processor, which ResNet uses, shows all of a picture instead of its centre."""
SHARE = "crop_pct"
"""Field of ConvNeXT's processor: side of the centre over the shorter edge."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ConvNext": {
        "size": {"shortest_edge": 384},
        "resample": 3,
        SHARE: 224 / 256,
        "image_mean": HALF * 3,
        "image_std": HALF * 3,
    },
    "MobileNetV2": {
        "size": {"shortest_edge": 256},
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "image_mean": HALF * 3,
        "image_std": HALF * 3,
    },
    "ViT": {"size": {"height": 224, "width": 224}, "image_mean": HALF * 3, "image_std": HALF * 3},
}
"""Values of fields that a file leaves out, by the processor's name (transformers 5.23, image_processing_pil_*.py)."""
PLAIN = ("Bit", "CLIP", "DeiT", "Siglip")
"""Processors that resize, crop from the centre, rescale and normalise as their fields say."""
SIZED = ("do_resize", "size", "resample", "do_center_crop", "crop_size")
"""Fields that change a picture's size; the others are in a model."""
STEPS = ("do_resize", "size", "resample", "image_mean", "image_std")
"""Fields that must be in the file of one of these."""
KNOWN = frozenset(
    (
        *STEPS,
        *("do_center_crop", "crop_size", SHARE, "do_rescale", "rescale_factor", "do_normalize"),
        *("do_convert_rgb", "do_pad", "default_to_square", "image_processor_type"),
        *("feature_extractor_type", "processor_class", "data_format", "input_data_format"),
        *("return_tensors", "device", "disable_grouping", "use_fast"),
    )
)
"""Fields that are followed, or change no pixel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsidePictures(Data):
    """Pictures given one by one; all splits are empty."""

    preparation: Preparation
    channels: Annotated[int, Range(least=1, most=3)] = 3
    classes: tuple[str, ...] = ()
    """Names of the classes in label order; () where none are known."""

    def __post_init__(self) -> None:
        check(self)

    def fields(self) -> Mapping[str, Field]:
        """image uint8[side, side, channels] and label int32[]."""
        side = self.preparation.side
        return {
            "image": Field(shape=(side, side, self.channels), dtype="uint8"),
            "label": Field(shape=(), dtype="int32"),
        }

    def size(self, split: Split) -> int:
        """0: there are no pictures."""
        del split
        return 0

    def labels(self) -> tuple[str, ...]:
        """See :class:`Data`."""
        return self.classes

    def notes(self) -> tuple[str, ...]:
        """That labels are numbers, where names are not known."""
        if self.classes:
            return ()
        return ("the model does not say the names of its classes; labels are their numbers",)

    def open(self, read: Read) -> Batches:
        """Refuses.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            f"an imported model brings no {read.split.value} pictures; give a folder of pictures with --path"
        )

    def load(self, path: Path) -> dict[str, Any]:
        """A picture, or a .npy array, as image uint8[side, side, channels]; see :meth:`Images.load`."""
        return self._images(path.parent).load(path)

    def read(self, content: bytes, name: str) -> dict[str, Any]:
        """A picture's content; see :meth:`Images.read`."""
        return self._images(Path()).read(content, name)

    def at(self, path: Path) -> Images:
        """Class folders at a path, named by the classes.

        Raises:
            OptionError: the names of the classes are not known.
            DataError: a class folder that the model does not know, or folders of splits.
        """
        if not self.classes:
            raise OptionError(
                f"--path is {path}, but the model does not say the names of its classes; add id2label to its config.json"
            )
        return self._images(path).at(path)

    def _images(self, path: Path) -> Images:
        side = self.preparation.side
        return Images(
            path=path,
            side=side,
            channels=self.channels,
            classes=self.classes,
            preparation=self.preparation,
        )

    def with_labels(self, labels: tuple[str, ...]) -> "OutsidePictures":
        """See :class:`Data`."""
        return replace(self, classes=labels)


@dataclass(frozen=True, kw_only=True)
class Preprocessor:
    """Steps of a preprocessor_config.json."""

    preparation: Preparation
    mean: tuple[float, ...]
    std: tuple[float, ...]


def preprocessor(fields: Mapping[str, Any], file: str) -> Preprocessor:
    """The steps of a preprocessor_config.json.

    Args:
        fields: Its content.
        file: Its name in messages.

    Raises:
        OptionError: a step that is not known, or a result that is no square.
    """
    named = str(fields.get("image_processor_type") or fields.get("feature_extractor_type") or "")
    kind = next((name for name in DEFAULTS if named.startswith(name)), None)
    fields = {name: value for name, value in fields.items() if value is not None}
    settings = {**DEFAULTS["ViT" if kind is None else kind], **fields}
    if named and kind is None:
        _check_other(fields, named, file)
    unknown = [n for n, v in fields.items() if v and n not in KNOWN and not n.startswith("_")]
    if unknown:
        raise OptionError(
            f"{file} has {', '.join(unknown)}, which this import does not follow; remove what is not needed, or prepare the pictures yourself and leave the file out"
        )
    if settings.get("do_pad"):
        raise OptionError(f"{file} has do_pad, which is not known; images of one size need none")
    mean, std = tuple(settings["image_mean"]), tuple(settings["image_std"])
    if not settings.get("do_normalize", True):
        mean, std = (0.0,), (1.0,)
    # Pixels are byte / 255 here and byte * factor there.
    factor = (
        255.0 * settings.get("rescale_factor", 1 / 255)
        if settings.get("do_rescale", True)
        else 255.0
    )
    if abs(factor - 1.0) > 1e-6:
        mean, std = (tuple(channel / factor for channel in values) for values in (mean, std))
    return Preprocessor(preparation=_preparation(settings, kind, file), mean=mean, std=std)


def _check_other(fields: Mapping[str, Any], named: str, file: str) -> None:
    """Refuses a processor without defaults here, unless its steps are plain and its file gives all of them.

    Raises:
        OptionError: so.
    """
    if not named.startswith(PLAIN):
        raise OptionError(
            f"{file} is of a {named}, whose steps are not known; known are {', '.join((*DEFAULTS, *PLAIN))}: write it as one of these"
        )
    missing = [name for name in STEPS if name not in fields]
    if fields.get("do_center_crop") and "crop_size" not in fields:
        missing.append("crop_size")
    if missing:
        raise OptionError(
            f"{file} is of a {named} and leaves fields to its defaults, which are known of {', '.join(DEFAULTS)} only; write {', '.join(missing)} into it"
        )
    if isinstance(fields["size"], int):
        raise OptionError(
            f"{file} has size {fields['size']}, which each processor reads in its own way; write height and width, or shortest_edge"
        )


def _preparation(settings: Mapping[str, Any], kind: str | None, file: str) -> Preparation:
    size, cut = settings["size"], settings.get("crop_size")
    number = settings.get("resample", 2)
    if number not in range(len(FILTERS)):
        raise OptionError(f"{file} has resample {number!r}; it takes 0 to {len(FILTERS) - 1}")
    resample = FILTERS[number]
    side = None
    if settings.get("do_center_crop", False) and cut is not None:
        side = _square(cut, "crop_size", file)
    if not settings.get("do_resize", True):
        if side is None:
            raise OptionError(
                f"{file} neither resizes nor crops, and a model needs images of one size"
            )
        return Preparation(side=side, resize=False)
    if isinstance(size, int):
        size = {"height": size, "width": size} if kind in ("ViT", None) else {"shortest_edge": size}
    if "shortest_edge" not in size:
        whole = _square(size, "size", file)
        return Preparation(side=side or whole, both=whole, resample=resample)
    if "longest_edge" in size:
        raise OptionError(f"{file} has longest_edge, which is not known; give shortest_edge alone")
    shorter = int(size["shortest_edge"])
    if kind == "ConvNext":
        if shorter >= CONVNEXT_WHOLE:
            return Preparation(side=shorter, resample=resample)
        return Preparation(
            side=shorter, shorter=int(shorter / settings.get(SHARE, 224 / 256)), resample=resample
        )
    if side is None:
        raise OptionError(
            f"{file} resizes the shorter edge and does not crop, so that images have many shapes; give do_center_crop and crop_size"
        )
    return Preparation(side=side, shorter=shorter, resample=resample)


def _square(size: Any, name: str, file: str) -> int:
    sides = {size} if isinstance(size, int) else {int(value) for value in size.values()}
    if len(sides) != 1:
        raise OptionError(f"{file} has {name} {size}, and only squares are known")
    return sides.pop()


def classifier(source: Source) -> Job:
    """An image model: it labels pictures, prepared as its preprocessor_config.json says.

    Without that file the shorter edge is resized and the centre cut out, as for models of our own.

    Raises:
        OptionError: the file has a step that is not known, or images of another size than the model's.
    """
    model = _pictured(source.model)
    pixels = model.pixels
    file = source.files().get(PREPROCESSOR)
    if file is None:
        shorter = round(pixels.size / EVALUATION_SHARE)
        preparation = Preparation(side=pixels.size, shorter=shorter)
    else:
        steps = preprocessor(read_config(file), str(file))
        preparation = steps.preparation
        if isinstance(model, ViT) and preparation.side != pixels.size:
            raise OptionError(
                f"{file} makes images of {preparation.side} pixels, and the model takes {pixels.size}; correct one of them"
            )
        pixels = replace(pixels, size=preparation.side, mean=steps.mean, std=steps.std)
    return Job(
        name=source.path.name,
        model=replace(model, pixels=pixels),
        task=Classification(),
        data=OutsidePictures(
            preparation=preparation, channels=pixels.channels, classes=labels(source.config)
        ),
        steps=1,
        batch=Batch(per_device=1),
        dtypes=dtypes_of(source),
    )


def picture_notes(source: Source) -> tuple[str, ...]:
    """Settings that a folder leaves open, with the values taken."""
    if PREPROCESSOR in source.files():
        return ()
    job = classifier(source)
    assert isinstance(job.data, OutsidePictures)
    side, shorter = job.data.preparation.side, job.data.preparation.shorter
    pixels = _pictured(job.model).pixels
    numbers = [", ".join(f"{value:g}" for value in values) for values in (pixels.mean, pixels.std)]
    return (
        f"{source.path} has no {PREPROCESSOR}, so how it wants its pictures is a guess: the shorter edge at {shorter} pixels, {side} x {side} from the centre, mean {numbers[0]} and deviation {numbers[1]}; copy that file from where the model came from",
    )


def fields_of(preparation: Preparation, pixels: Pixels) -> dict[str, Any]:
    """A preprocessor_config.json for pictures of a model, that transformers reads."""
    filter_ = FILTERS.index(preparation.resample)
    channels, shorter = pixels.channels, preparation.shorter
    both = preparation.both or preparation.side
    side = {"height": preparation.side, "width": preparation.side}
    fields: dict[str, Any] = {
        "image_processor_type": "MobileNetV2ImageProcessor",
        "do_resize": preparation.resize,
        "size": {"height": both, "width": both} if shorter is None else {"shortest_edge": shorter},
        "resample": filter_,
        "do_center_crop": True,
        "crop_size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
    }
    for name, values in (("image_mean", pixels.mean), ("image_std", pixels.std)):
        fields[name] = list(values if len(values) == channels else values * channels)
    return fields


def fields_of_job(job: Job) -> dict[str, Any]:
    """A preprocessor_config.json for the pictures of a job, as its model is used on files.

    Pictures that are cut and resized at once are resized and then cut there, to whole pixels each.

    Raises:
        OptionError: pictures are no squares.
    """
    data, pixels = job.data, _pictured(job.model).pixels
    height, width = image_size(data.fields(), pixels)
    if height != width:
        raise OptionError(
            f"pictures are {height} x {width}, and {PREPROCESSOR} is known for squares only; keep it as a Bundle"
        )
    preparation = data.preparation if isinstance(data, Images | OutsidePictures) else None
    share = EVALUATION_SHARE if isinstance(data, Images) else 1.0
    return fields_of(preparation or Preparation(side=height, shorter=round(height / share)), pixels)


def with_pictures(
    config: Mapping[str, Any], files: Mapping[str, bytes], job: Job
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A config.json and the files beside it, with the names of classes and the preparation of pictures of a trained job.

    Raises: as :func:`fields_of_job`.
    """
    said, names = dict(config), job.data.labels()
    if names:
        more = range(len(names), _pictured(job.model).num_classes)
        numbered = dict(enumerate((*names, *map(str, more))))
        said["id2label"] = {str(number): name for number, name in numbered.items()}
        said["label2id"] = {name: number for number, name in numbered.items()}
    content = json.dumps(fields_of_job(job), indent=2).encode()
    return said, {**files, PREPROCESSOR: content}


def _pictured(model: Any) -> ResNet | ViT | MobileNetV2:
    assert isinstance(model, PICTURED)
    return model


TORCHVISION = fields_of(
    Preparation(side=224, shorter=256), Pixels(mean=IMAGENET_MEAN, std=IMAGENET_STD)
)
"""Preprocessing of torchvision's first ImageNet weights (IMAGENET1K_V1)."""
