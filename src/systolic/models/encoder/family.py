"""BERT of transformers: a bare encoder, or one with the head for masked tokens."""

from typing import Any

from systolic.core.errors import OptionError
from systolic.job import Model
from systolic.models.encoder.config import Encoder, FeedForward
from systolic.models.families import Config, Family
from systolic.models.mapping import Conversion, Rule, Tensors, layer_norm, matrix, plain

BODY, HEAD = "bert.", "cls.predictions."
MASKED = frozenset(("BertForMaskedLM", "BertForPreTraining"))
"""Architectures with the head for masked tokens; they keep the encoder under ``bert.``."""
POOLER = "add_pooling_layer"
"""Field of ours in a config.json: whether a bare encoder has the dense layer on the first token; it is BertModel's argument."""
UNUSED = (
    r".*embeddings\.position_ids",
    r"cls\.predictions\.decoder\..*",
    r"cls\.seq_relationship\..*",
    r"bert\.pooler\..*",
)
"""Indices, copies of tied weights, and what a model for masked tokens does not use."""
ACTIVATIONS = {
    "gelu": FeedForward.gelu,
    "gelu_new": FeedForward.gelu_tanh,
    "gelu_pytorch_tanh": FeedForward.gelu_tanh,
    "relu": FeedForward.relu,
}


def canonical(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """The parts that the file has, under today's names.

    Older files name a norm's parameters gamma and beta; a bare encoder is found with the prefix
    ``bert.`` and without, with the dense layer on the first token and without.
    """
    names = {name.removeprefix(BODY): name for name in tensors}
    head = any(name.startswith(f"{HEAD}transform.") for name in names)
    architectures = set(config.get("architectures") or ())
    masked = head and (not architectures or bool(architectures & MASKED))
    settled: dict[str, Any] = {}
    for name, stored in names.items():
        if head and not masked and name.startswith("cls."):
            continue
        now = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        now = now.replace("LayerNorm.beta", "LayerNorm.bias")
        if masked and not name.startswith("cls."):
            now = BODY + now
        settled[now] = tensors[stored]
    parts = {
        "architectures": ["BertForMaskedLM" if masked else "BertModel"],
        POOLER: not masked and "pooler.dense.weight" in names,
    }
    return {**config, **parts}, settled


def model(config: Config) -> Encoder:
    """The sizes of a BERT's config.json.

    Raises:
        OptionError: a field has a value that this encoder does not follow.
    """
    for name, known in (
        ("position_embedding_type", "absolute"),
        ("is_decoder", False),
        ("tie_word_embeddings", True),
    ):
        if config.get(name, known) != known:
            raise OptionError(f"{name} is {config[name]!r} and only {known!r} is known")
    activation = config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise OptionError(
            f"hidden_act is {activation!r} and only {', '.join(ACTIVATIONS)} are known"
        )
    masked = bool(set(config.get("architectures") or ()) & MASKED)
    return Encoder(
        layers=config.get("num_hidden_layers", 12),
        d_model=config.get("hidden_size", 768),
        d_ff=config.get("intermediate_size", 3072),
        mlp=ACTIVATIONS[activation],
        heads=config.get("num_attention_heads", 12),
        vocab=config.get("vocab_size", 30522),
        positions=config.get("max_position_embeddings", 512),
        token_types=config.get("type_vocab_size", 2),
        norm_eps=config.get("layer_norm_eps", 1e-12),
        pooler=not masked and config.get(POOLER, True),
        head=masked,
    )


def rules(model: Encoder) -> list[Rule]:
    """Rules for embeddings, blocks, the pooler and the head for masked tokens."""
    d, f, h, e = model.d_model, model.d_ff, model.heads, model.head_dim
    layers = {"layer": range(model.layers)}
    body = BODY if model.head else ""
    layer = f"{body}encoder.layer.{{layer}}."
    layer_rules = [
        plain("embedding", f"{body}embeddings.word_embeddings.weight"),
        plain("positions", f"{body}embeddings.position_embeddings.weight"),
        plain("token_types", f"{body}embeddings.token_type_embeddings.weight"),
        *layer_norm("embedding_norm", f"{body}embeddings.LayerNorm"),
    ]
    for part in ("query", "key", "value"):
        theirs = f"{layer}attention.self.{part}"
        layer_rules.append(matrix(f"blocks/{part}", f"{theirs}.weight", (d, h, e), stack=layers))
        layer_rules.append(plain(f"blocks/{part}_bias", f"{theirs}.bias", layers))
    out = f"{layer}attention.output.dense"
    layer_rules += [
        matrix("blocks/out", f"{out}.weight", (h, e, d), inputs=2, stack=layers),
        plain("blocks/out_bias", f"{out}.bias", layers),
        *layer_norm("blocks/attention_norm", f"{layer}attention.output.LayerNorm", layers),
        matrix("blocks/up", f"{layer}intermediate.dense.weight", (d, f), stack=layers),
        plain("blocks/up_bias", f"{layer}intermediate.dense.bias", layers),
        matrix("blocks/down", f"{layer}output.dense.weight", (f, d), stack=layers),
        plain("blocks/down_bias", f"{layer}output.dense.bias", layers),
        *layer_norm("blocks/mlp_norm", f"{layer}output.LayerNorm", layers),
    ]
    if model.pooler:
        layer_rules.append(matrix("pooler", f"{body}pooler.dense.weight", (d, d)))
        layer_rules.append(plain("pooler_bias", f"{body}pooler.dense.bias"))
    if model.head:
        layer_rules += [
            matrix("transform", f"{HEAD}transform.dense.weight", (d, d)),
            plain("transform_bias", f"{HEAD}transform.dense.bias"),
            *layer_norm("transform_norm", f"{HEAD}transform.LayerNorm"),
            plain("logits_bias", f"{HEAD}bias"),
        ]
    return layer_rules


def conversion(config: Config) -> Conversion:
    """Rules of a BERT's config.json."""
    return Conversion(rules=rules(model(config)), unused=UNUSED)


def config(model: Model) -> dict[str, Any]:
    """A BERT's config.json.

    Raises:
        OptionError: a gated MLP, or a pooler beside a head for masked tokens.
    """
    assert isinstance(model, Encoder)
    names = {known: name for name, known in reversed(ACTIVATIONS.items())}
    if model.mlp not in names:
        raise OptionError(
            f"model.mlp is {model.mlp.value}, which a BERT of transformers does not have; only {', '.join(kind.value for kind in names)} can be exported to it"
        )
    if model.pooler and model.head:
        raise OptionError(
            "the model has a pooler beside the head for masked tokens, and BertForMaskedLM has none; train without --model.pooler to export it"
        )
    return {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM" if model.head else "BertModel"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "hidden_act": names[model.mlp],
        "num_attention_heads": model.heads,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.positions,
        "type_vocab_size": model.token_types,
        "layer_norm_eps": model.norm_eps,
        "position_embedding_type": "absolute",
        POOLER: model.pooler,
    }


FAMILIES = {"bert": Family(model=model, conversion=conversion, config=config, canonical=canonical)}
