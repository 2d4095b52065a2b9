"""MobileNetV2, ResNet (with the stride of a bottleneck on its 3x3: v1.5) and ViT of transformers, for the classification of images."""

from typing import Any

import numpy as np

from systolic.core.errors import OptionError
from systolic.job import Model
from systolic.models.families import Config, Family
from systolic.models.mapping import (
    Conversion,
    Pieces,
    Rule,
    kernel,
    layer_norm,
    matrix,
    plain,
    shaped,
)
from systolic.models.vision.config import (
    HALF,
    Depth,
    Gelu,
    MobileNetV2,
    Padding,
    Pixels,
    Pooling,
    Positions,
    ResNet,
    Stem,
    ViT,
)

BUFFERS = (r".*num_batches_tracked",)
"""Counters of PyTorch's batch norms, which nothing reads."""
MOBILENET = "mobilenet_v2"
RESNET = "resnet"
EXPANSIONS = {"basic": 1, "bottleneck": 4}
"""Kind of layer to its last channels over its first."""
LAYER = "vit.encoder.layer.{layer}."
PARTS = ("query", "key", "value")
UNUSED = (r"vit\.pooler\..*", r"vit\.embeddings\.mask_token")
"""Parts of other heads that a file may keep, which logits don't use."""
GELUS = {"gelu": Gelu.erf, "gelu_new": Gelu.tanh, "gelu_pytorch_tanh": Gelu.tanh}


def conv_norm(ours: str, convolution: str, norm: str) -> list[Rule]:
    """Rules of a convolution without bias and its batch norm, statistics included.

    Args:
        ours: Path of the pair.
        convolution: Name of the convolution's module in the file.
        norm: Name of the batch norm's.
    """
    return [
        kernel(f"{ours}/kernel", f"{convolution}.weight"),
        plain(f"{ours}/norm/scale", f"{norm}.weight"),
        plain(f"{ours}/norm/bias", f"{norm}.bias"),
        plain(f"{ours}/norm/mean", f"{norm}.running_mean"),
        plain(f"{ours}/norm/var", f"{norm}.running_var"),
    ]


def head(theirs: str, features: int, num_classes: int) -> list[Rule]:
    """Rules of the linear layer from features to logits."""
    return [
        matrix("head/kernel", f"{theirs}.weight", (features, num_classes)),
        plain("head/bias", f"{theirs}.bias"),
    ]


def num_classes(config: Config) -> int:
    """Classes of an image model's config.json; transformers takes 2 where it says nothing."""
    return len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)


def labels(config: Config) -> tuple[str, ...]:
    """Names of the classes in their order; () where the file has only transformers' LABEL_0, LABEL_1, ...

    Of equal names, such as ImageNet's two cranes, the later have their number behind them.
    """
    by_number = config.get("id2label") or {}
    names = {int(number): str(name) for number, name in by_number.items()}
    if all(name == f"LABEL_{number}" for number, name in names.items()):
        return ()
    class_names: list[str] = []
    for number in range(len(names)):
        name = names.get(number, str(number))
        class_names.append(f"{name} ({number})" if name in class_names else name)
    return tuple(class_names)


def side(config: Config, name: str, default: int) -> int:
    """Pixels on a side of a square that a config.json gives as one number or two.

    Raises:
        OptionError: it is not square.
    """
    size: Any = config.get(name, default)
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) > 1:
        raise OptionError(f"{name} is {size} and only squares are known")
    return sides.pop()


def require(config: Config, **known: Any) -> None:
    """Refuses a config.json whose fields have other values than those known.

    Raises:
        OptionError: a field has another value.
    """
    for name, value in known.items():
        if config.get(name, value) != value:
            raise OptionError(f"{name} is {config[name]!r} and only {value!r} is known")


def mobilenet(config: Config) -> MobileNetV2:
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


def mobilenet_rules(model: MobileNetV2) -> list[Rule]:
    """Rules for all layers and statistics."""

    def pair(ours: str, theirs: str) -> list[Rule]:
        return conv_norm(
            ours, f"{MOBILENET}.{theirs}.convolution", f"{MOBILENET}.{theirs}.normalization"
        )

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


def mobilenet_conversion(config: Config) -> Conversion:
    """Rules of a MobileNetV2's config.json."""
    return Conversion(rules=mobilenet_rules(mobilenet(config)), unused=BUFFERS)


def mobilenet_config(model: Model) -> dict[str, Any]:
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


def resnet(config: Config) -> ResNet:
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


def resnet_rules(model: ResNet) -> list[Rule]:
    """Rules for all layers and statistics."""

    def pair(ours: str, theirs: str) -> list[Rule]:
        return conv_norm(ours, f"{RESNET}.{theirs}.convolution", f"{RESNET}.{theirs}.normalization")

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


def resnet_conversion(config: Config) -> Conversion:
    """Rules of a ResNet's config.json."""
    return Conversion(rules=resnet_rules(resnet(config)), unused=BUFFERS)


def resnet_config(model: Model) -> dict[str, Any]:
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


def vit(config: Config) -> ViT:
    """The sizes of a ViT's config.json.

    Raises:
        OptionError: a field has a value that this model does not follow.
    """
    activation = config.get("hidden_act", "gelu")
    if activation not in GELUS:
        raise OptionError(f"hidden_act is {activation!r} and only {', '.join(GELUS)} are known")
    return ViT(
        layers=config.get("num_hidden_layers", 12),
        d_model=config.get("hidden_size", 768),
        d_ff=config.get("intermediate_size", 3072),
        heads=config.get("num_attention_heads", 12),
        patch=side(config, "patch_size", 16),
        pooling=Pooling.token,
        positions=Positions.learned,
        token_position=True,
        gelu=GELUS[activation],
        projection_bias=config.get("qkv_bias", True),
        norm_eps=config.get("layer_norm_eps", 1e-12),
        num_classes=num_classes(config),
        pixels=Pixels(
            size=side(config, "image_size", 224),
            channels=config.get("num_channels", 3),
            mean=HALF,
            std=HALF,
        ),
    )


def embeddings(model: ViT) -> list[Rule]:
    """Rules for the extra token, positions and patches."""
    d = model.d_model

    def patches(pieces: Pieces) -> Pieces:
        return [pieces[0].transpose(2, 3, 1, 0).reshape(-1, d)]

    def kernel(pieces: Pieces) -> Pieces:
        shape = (model.patch, model.patch, model.pixels.channels, d)
        return [pieces[0].reshape(shape).transpose(3, 2, 0, 1)]

    return [
        shaped("token", "vit.embeddings.cls_token", (d,), (1, 1, d)),
        Rule(
            ours=("token_position", "positions"),
            theirs=("vit.embeddings.position_embeddings",),
            read=lambda pieces: [pieces[0][0, 0], pieces[0][0, 1:]],
            write=lambda pieces: [np.concatenate([pieces[0][None], pieces[1]])[None]],
        ),
        Rule(
            ours=("embedding",),
            theirs=("vit.embeddings.patch_embeddings.projection.weight",),
            read=patches,
            write=kernel,
        ),
        plain("embedding_bias", "vit.embeddings.patch_embeddings.projection.bias"),
    ]


def vit_rules(model: ViT) -> list[Rule]:
    """Rules for embeddings, blocks, the last norm and the head."""
    d, f, h, e = model.d_model, model.d_ff, model.heads, model.head_dim
    layers = {"layer": range(model.layers)}
    attention = f"{LAYER}attention."

    def merged(pieces: Pieces) -> Pieces:
        return [np.stack([piece.T.reshape(d, h, e) for piece in pieces], axis=1)]

    def parted(pieces: Pieces) -> Pieces:
        return [pieces[0][:, part].reshape(d, d).T for part in range(3)]

    layer_rules = [
        *embeddings(model),
        Rule(
            ours=("blocks/project",),
            theirs=tuple(f"{attention}attention.{part}.weight" for part in PARTS),
            stack=layers,
            read=merged,
            write=parted,
        ),
        matrix("blocks/out", f"{attention}output.dense.weight", (h, e, d), inputs=2, stack=layers),
        plain("blocks/out_bias", f"{attention}output.dense.bias", layers),
        matrix("blocks/up", f"{LAYER}intermediate.dense.weight", (d, f), stack=layers),
        plain("blocks/up_bias", f"{LAYER}intermediate.dense.bias", layers),
        matrix("blocks/down", f"{LAYER}output.dense.weight", (f, d), stack=layers),
        plain("blocks/down_bias", f"{LAYER}output.dense.bias", layers),
        *layer_norm("blocks/attention_norm", f"{LAYER}layernorm_before", layers),
        *layer_norm("blocks/mlp_norm", f"{LAYER}layernorm_after", layers),
        *layer_norm("norm", "vit.layernorm"),
        *head("classifier", d, model.num_classes),
    ]
    if model.projection_bias:
        bias = Rule(
            ours=("blocks/project_bias",),
            theirs=tuple(f"{attention}attention.{part}.bias" for part in PARTS),
            stack=layers,
            read=lambda pieces: [np.concatenate(pieces)],
            write=lambda pieces: np.split(pieces[0], 3),
        )
        layer_rules.append(bias)
    return layer_rules


def vit_conversion(config: Config) -> Conversion:
    """Rules of a ViT's config.json."""
    return Conversion(rules=vit_rules(vit(config)), unused=UNUSED)


def vit_config(model: Model) -> dict[str, Any]:
    """A ViT's config.json.

    Raises:
        OptionError: a mean over patches, or fixed positions, which transformers' ViT does not have.
    """
    assert isinstance(model, ViT)
    if not model.token_position:
        raise OptionError(
            f"the model has pooling {model.pooling.value} and positions {model.positions.value}, and a ViT of transformers takes the logits from an extra token that has a learned position, as the patches have; only a model with token-position can be exported to it"
        )
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_attention_heads": model.heads,
        "patch_size": model.patch,
        "image_size": model.pixels.size,
        "num_channels": model.pixels.channels,
        "hidden_act": "gelu" if model.gelu is Gelu.erf else "gelu_pytorch_tanh",
        "qkv_bias": model.projection_bias,
        "layer_norm_eps": model.norm_eps,
        "num_labels": model.num_classes,
    }


FAMILIES = {
    "mobilenet_v2": Family(
        model=mobilenet, conversion=mobilenet_conversion, config=mobilenet_config
    ),
    "resnet": Family(model=resnet, conversion=resnet_conversion, config=resnet_config),
    "vit": Family(model=vit, conversion=vit_conversion, config=vit_config),
}
