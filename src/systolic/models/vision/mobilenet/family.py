"""MobileNetV2 of transformers."""

from typing import Any

from systolic.job import Model
from systolic.models.families import Config, Family
from systolic.models.mapping import Conversion, Rule
from systolic.models.vision.mobilenet.config import MobileNetV2, Padding
from systolic.models.vision.pixels import HALF, Pixels
from systolic.models.vision.rules import BUFFERS, conv_norm, head, num_classes, require, side

BODY = "mobilenet_v2"


def model(config: Config) -> MobileNetV2:
    """The sizes of a MobileNetV2's config.json.

    Raises:
        OptionError: a field has a value that this model does not follow.
    """
    require(config, hidden_act="relu6", output_stride=32, first_layer_is_expansion=True)
    return MobileNetV2(
        multiplier=config.get("depth_multiplier", 1.0),
        divisor=config.get("depth_divisible_by", 8),
        least=config.get("min_depth", 8),
        expansion=config.get("expand_ratio", 6.0),
        scaled_features=not config.get("finegrained_output", True),
        padding=Padding.tf if config.get("tf_padding", True) else Padding.torch,
        norm_eps=config.get("layer_norm_eps", 0.001),
        num_classes=num_classes(config),
        pixels=Pixels(
            size=side(config, "image_size", 224),
            channels=config.get("num_channels", 3),
            mean=HALF,
            std=HALF,
        ),
    )


def rules(model: MobileNetV2) -> list[Rule]:
    """Rules for all layers and statistics."""

    def pair(ours: str, theirs: str) -> list[Rule]:
        return conv_norm(ours, f"{BODY}.{theirs}.convolution", f"{BODY}.{theirs}.normalization")

    layer_rules = [
        *pair("stem", "conv_stem.first_conv"),
        *pair("blocks/0/depthwise", "conv_stem.conv_3x3"),
        *pair("blocks/0/project", "conv_stem.reduce_1x1"),
    ]
    for index in range(1, len(model.blocks)):
        for ours, theirs in (
            ("expand", "expand_1x1"),
            ("depthwise", "conv_3x3"),
            ("project", "reduce_1x1"),
        ):
            layer_rules += pair(f"blocks/{index}/{ours}", f"layer.{index - 1}.{theirs}")
    return [
        *layer_rules,
        *pair("last", "conv_1x1"),
        *head("classifier", model.features, model.num_classes),
    ]


def conversion(config: Config) -> Conversion:
    """Rules of a MobileNetV2's config.json."""
    return Conversion(rules=rules(model(config)), unused=BUFFERS)


def config(model: Model) -> dict[str, Any]:
    """A MobileNetV2's config.json."""
    assert isinstance(model, MobileNetV2)
    return {
        "model_type": "mobilenet_v2",
        "architectures": ["MobileNetV2ForImageClassification"],
        "num_channels": model.pixels.channels,
        "image_size": model.pixels.size,
        "depth_multiplier": model.multiplier,
        "depth_divisible_by": model.divisor,
        "min_depth": model.least,
        "expand_ratio": model.expansion,
        "output_stride": 32,
        "first_layer_is_expansion": True,
        "finegrained_output": not model.scaled_features,
        "hidden_act": "relu6",
        "tf_padding": model.padding is Padding.tf,
        "layer_norm_eps": model.norm_eps,
        "num_labels": model.num_classes,
    }


FAMILIES = {"mobilenet_v2": Family(model=model, conversion=conversion, config=config)}
