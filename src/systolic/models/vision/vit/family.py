"""ViT of transformers, for the classification of images."""

from typing import Any

import numpy as np

from systolic.core.errors import OptionError
from systolic.job import Model
from systolic.models.families import Config, Family
from systolic.models.mapping import Conversion, Pieces, Rule, layer_norm, matrix, plain, shaped
from systolic.models.vision.pixels import HALF, Pixels
from systolic.models.vision.rules import head, num_classes, side
from systolic.models.vision.vit.config import Gelu, Pooling, Positions, ViT

LAYER = "vit.encoder.layer.{layer}."
PARTS = ("query", "key", "value")
UNUSED = (r"vit\.pooler\..*", r"vit\.embeddings\.mask_token")
"""Parts of other heads that a file may keep, which logits don't use."""
GELUS = {"gelu": Gelu.erf, "gelu_new": Gelu.tanh, "gelu_pytorch_tanh": Gelu.tanh}


def model(config: Config) -> ViT:
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


def rules(model: ViT) -> list[Rule]:
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


def conversion(config: Config) -> Conversion:
    """Rules of a ViT's config.json."""
    return Conversion(rules=rules(model(config)), unused=UNUSED)


def config(model: Model) -> dict[str, Any]:
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


FAMILIES = {"vit": Family(model=model, conversion=conversion, config=config)}
