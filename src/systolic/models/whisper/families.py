"""Whisper's sizes and weights as transformers keeps them (WhisperForConditionalGeneration)."""

from typing import Any

from systolic.core.errors import OptionError
from systolic.job import Model
from systolic.models.families import Config, Family
from systolic.models.mapping import Conversion, Rule, kernel, matrix, plain
from systolic.models.whisper.config import MULTILINGUAL_VOCAB, Whisper

KNOWN = {
    "activation_function": "gelu",
    "scale_embedding": False,
    "tie_word_embeddings": True,
}
"""Fields with one known value."""
SIZE_PAIRS = (
    ("encoder_attention_heads", "decoder_attention_heads"),
    ("encoder_ffn_dim", "decoder_ffn_dim"),
)
"""Fields of the encoder and the decoder that must be equal."""
ENGLISH_END, END = 50_256, 50_257
"""Token that ends a text, in a model of English and in one of many languages; the one after it starts a transcript."""


def whisper(config: Config) -> Whisper:
    """The sizes of a Whisper's config.json.

    Raises:
        OptionError: a field has a value that this model does not follow.
    """
    for name, known in KNOWN.items():
        if config.get(name, known) != known:
            raise OptionError(f"{name} is {config[name]!r} and only {known!r} is known")
    for size, other in SIZE_PAIRS:
        if config[size] != config[other]:
            raise OptionError(
                f"{size} is {config[size]} and {other} {config[other]}; only equal ones are known"
            )
    return Whisper(
        encoder_layers=config["encoder_layers"],
        decoder_layers=config["decoder_layers"],
        d_model=config["d_model"],
        d_ff=config["encoder_ffn_dim"],
        heads=config["encoder_attention_heads"],
        vocab=config["vocab_size"],
        mels=config.get("num_mel_bins", 80),
        frames=config.get("max_source_positions", 1500),
        positions=config.get("max_target_positions", 448),
    )


def attention(model: Whisper, ours: str, theirs: str, layers: dict[str, range]) -> list[Rule]:
    """Rules of the projections below ``ours`` and ``theirs``."""
    d, h, e = model.d_model, model.heads, model.head_dim
    into, out = (d, h, e), (h, e, d)
    return [
        matrix(f"{ours}/query", f"{theirs}.q_proj.weight", into, stack=layers),
        plain(f"{ours}/query_bias", f"{theirs}.q_proj.bias", layers),
        matrix(f"{ours}/key", f"{theirs}.k_proj.weight", into, stack=layers),
        matrix(f"{ours}/value", f"{theirs}.v_proj.weight", into, stack=layers),
        plain(f"{ours}/value_bias", f"{theirs}.v_proj.bias", layers),
        matrix(f"{ours}/out", f"{theirs}.out_proj.weight", out, inputs=2, stack=layers),
        plain(f"{ours}/out_bias", f"{theirs}.out_proj.bias", layers),
    ]


def norm(ours: str, theirs: str, layers: dict[str, range] | None = None) -> list[Rule]:
    """Rules of a layer norm."""
    return [
        plain(f"{ours}/scale", f"{theirs}.weight", layers),
        plain(f"{ours}/bias", f"{theirs}.bias", layers),
    ]


def layer(model: Whisper, side: str, number: int) -> list[Rule]:
    """Rules of what the layers of the encoder and the decoder (``side``) share."""
    layers, theirs = {"layer": range(number)}, f"model.{side}.layers.{{layer}}."
    wide, narrow = (model.d_model, model.d_ff), (model.d_ff, model.d_model)
    return [
        *norm(f"{side}/attention_norm", f"{theirs}self_attn_layer_norm", layers),
        *attention(model, f"{side}/attention", f"{theirs}self_attn", layers),
        *norm(f"{side}/mlp_norm", f"{theirs}final_layer_norm", layers),
        matrix(f"{side}/mlp/up", f"{theirs}fc1.weight", wide, stack=layers),
        plain(f"{side}/mlp/up_bias", f"{theirs}fc1.bias", layers),
        matrix(f"{side}/mlp/down", f"{theirs}fc2.weight", narrow, stack=layers),
        plain(f"{side}/mlp/down_bias", f"{theirs}fc2.bias", layers),
    ]


def conversion(config: Config) -> Conversion:
    """Rules of a Whisper's config.json."""
    model = whisper(config)
    layers, decoder = {"layer": range(model.decoder_layers)}, "model.decoder.layers.{layer}."
    return Conversion(
        rules=[
            kernel("conv1", "model.encoder.conv1.weight"),
            plain("conv1_bias", "model.encoder.conv1.bias"),
            kernel("conv2", "model.encoder.conv2.weight"),
            plain("conv2_bias", "model.encoder.conv2.bias"),
            plain("frames", "model.encoder.embed_positions.weight"),
            *layer(model, "encoder", model.encoder_layers),
            *norm("encoder_norm", "model.encoder.layer_norm"),
            plain("embedding", "model.decoder.embed_tokens.weight"),
            plain("positions", "model.decoder.embed_positions.weight"),
            *layer(model, "decoder", model.decoder_layers),
            *norm("decoder/cross_norm", f"{decoder}encoder_attn_layer_norm", layers),
            *attention(model, "decoder/cross", f"{decoder}encoder_attn", layers),
            *norm("norm", "model.decoder.layer_norm"),
        ],
        unused=("proj_out.weight",),
    )


def config(model: Model) -> dict[str, Any]:
    """A Whisper's config.json."""
    assert isinstance(model, Whisper)
    end = END if model.vocab >= MULTILINGUAL_VOCAB else min(ENGLISH_END, model.vocab - 2)
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        **KNOWN,
        "vocab_size": model.vocab,
        "d_model": model.d_model,
        "encoder_layers": model.encoder_layers,
        "decoder_layers": model.decoder_layers,
        "encoder_attention_heads": model.heads,
        "decoder_attention_heads": model.heads,
        "encoder_ffn_dim": model.d_ff,
        "decoder_ffn_dim": model.d_ff,
        "num_mel_bins": model.mels,
        "max_source_positions": model.frames,
        "max_target_positions": model.positions,
        "is_encoder_decoder": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": end + 1,
    }


FAMILIES = {"whisper": Family(model=whisper, conversion=conversion, config=config)}
