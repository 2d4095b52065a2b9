"""ResNet of transformers, with the stride of a bottleneck on its 3x3 (v1.5)."""

from typing import Any

from systolic.core.errors import OptionError
from systolic.job import Model
from systolic.models.families import Config, Family
from systolic.models.mapping import Conversion, Rule
from systolic.models.vision.pixels import HALF, Pixels
from systolic.models.vision.resnet.config import Depth, ResNet, Stem
from systolic.models.vision.rules import BUFFERS, conv_norm, head, num_classes, require

BODY = "resnet"
EXPANSIONS = {"basic": 1, "bottleneck": 4}
"""Kind of layer to its last channels over its first."""


def model(config: Config) -> ResNet:
    """The sizes of a ResNet's config.json; it has no image size, which is 224.

    Raises:
        OptionError: a field has a value that this model does not follow.
    """
    require(
        config, hidden_act="relu", downsample_in_first_stage=False, downsample_in_bottleneck=False
    )
    kind = config.get("layer_type", "bottleneck")
    if kind not in EXPANSIONS:
        raise OptionError(f"layer_type is {kind!r} and only {', '.join(EXPANSIONS)} are known")
    blocks = tuple(config.get("depths", (3, 4, 6, 3)))
    expansion = EXPANSIONS[kind]
    known = {(depth.blocks, depth.expansion): depth for depth in Depth}
    if (blocks, expansion) not in known:
        choices = ", ".join(str(list(depths)) for depths, by in known if by == expansion)
        raise OptionError(
            f"depths is {list(blocks)} and for layer_type {kind} only {choices} are known"
        )
    width = config.get("embedding_size", 64)
    hidden = tuple(config.get("hidden_sizes", (256, 512, 1024, 2048)))
    wanted = tuple(width * expansion * 2**stage for stage in range(4))
    if hidden != wanted:
        raise OptionError(
            f"hidden_sizes is {list(hidden)} and with embedding_size {width} only {list(wanted)} is known"
        )
    channels = config.get("num_channels", 3)
    return ResNet(
        depth=known[blocks, expansion],
        width=width,
        stem=Stem.imagenet,
        num_classes=num_classes(config),
        pixels=Pixels() if channels == 3 else Pixels(channels=channels, mean=HALF, std=HALF),
    )


def rules(model: ResNet) -> list[Rule]:
    """Rules for all layers and statistics."""

    def pair(ours: str, theirs: str) -> list[Rule]:
        return conv_norm(ours, f"{BODY}.{theirs}.convolution", f"{BODY}.{theirs}.normalization")

    layer_rules, index = pair("stem", "embedder.embedder"), 0
    expansion, conv_in = model.depth.expansion, model.width
    for stage, count in enumerate(model.depth.blocks):
        conv_out = model.width * 2**stage * expansion
        for layer in range(count):
            there, here = f"encoder.stages.{stage}.layers.{layer}", f"blocks/{index}"
            for conv in range(3 if expansion > 1 else 2):
                layer_rules += pair(f"{here}/convs/{conv}", f"{there}.layer.{conv}")
            if conv_in != conv_out:
                layer_rules += pair(f"{here}/shortcut", f"{there}.shortcut")
            conv_in, index = conv_out, index + 1
    return [*layer_rules, *head("classifier.1", conv_in, model.num_classes)]


def conversion(config: Config) -> Conversion:
    """Rules of a ResNet's config.json."""
    return Conversion(rules=rules(model(config)), unused=BUFFERS)


def config(model: Model) -> dict[str, Any]:
    """A ResNet's config.json.

    Raises:
        OptionError: a stem that transformers does not have.
    """
    assert isinstance(model, ResNet)
    if model.stem not in (Stem.imagenet, Stem.paired):
        raise OptionError(
            f"model.stem is {model.stem.value} and a ResNet of transformers has only the stem {Stem.imagenet.value}; train with --stem imagenet to export it"
        )
    expansion = model.depth.expansion
    return {
        "model_type": "resnet",
        "architectures": ["ResNetForImageClassification"],
        "num_channels": model.pixels.channels,
        "embedding_size": model.width,
        "hidden_sizes": [model.width * expansion * 2**stage for stage in range(4)],
        "depths": list(model.depth.blocks),
        "layer_type": "bottleneck" if expansion > 1 else "basic",
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
        "num_labels": model.num_classes,
    }


FAMILIES = {"resnet": Family(model=model, conversion=conversion, config=config)}
