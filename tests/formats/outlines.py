"""Folders that say what a model is and have no weights; imports no other framework."""

import json
from pathlib import Path

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "vocab_size": 300,
}
WORD = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


def outline(folder: Path) -> Path:
    """A Llama's config.json, and a tokenizer of one word."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_text(json.dumps(WORD))
    return folder
