"""Files beside a tokenizer.json: tokens and settings of tokenizer_config.json and older files, as transformers puts them together."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.errors import DataError
from systolic.core.files import refuse_pointer

if TYPE_CHECKING:
    import tokenizers

CONFIG = "tokenizer_config.json"
"""File beside a ``tokenizer.json`` with the tokens that start and end a document."""
TOKENS_MAP = "special_tokens_map.json"
"""File of older tokenizers with the same, which goes before the other as long as that one lists no added tokens."""
ADDED = "added_tokens.json"
"""File of older tokenizers with the ids of added tokens, read as long as the config lists none."""
LISTED = "added_tokens_decoder"
"""Field of the config with added tokens by their ids."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Settings of an added token."""
EXTRA = ("extra_special_tokens", "additional_special_tokens")
"""Fields with special tokens that have no name; the newer one goes first."""
BYTE_LEVEL = frozenset(
    ("GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer", "BartTokenizer", "LongformerTokenizer")
)
"""Classes that split words into bytes, with or without a space before a text."""
PIECES = frozenset(("LlamaTokenizer", "CodeLlamaTokenizer"))
"""Classes of SentencePiece's pieces, with or without a space before a text."""
SPACE = "\u2581"
"""SentencePiece's space."""


def token_config(folder: Path) -> dict[str, Any]:
    """Fields of tokenizer_config.json and special_tokens_map.json in a folder, as transformers puts them together; {} without both.

    Raises:
        DataError: one is no JSON.
    """
    config = read_fields(folder / CONFIG)
    return config if "added_tokens_decoder" in config else config | read_fields(folder / TOKENS_MAP)


def token_text(token: Any) -> str | None:
    """The text of a special token as these files have it: itself, or its ``content``; ``None`` for none."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def read_fields(file: Path) -> dict[str, Any]:
    """The object of a JSON file; {} where there is no such file, or no object in it.

    Raises:
        DataError: it is no JSON.
    """
    if not file.is_file():
        return {}
    refuse_pointer(file)
    try:
        fields = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file} is not JSON ({error}); copy it again") from error
    return fields if isinstance(fields, dict) else {}


def added_tokens(folder: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens that the files beside a tokenizer.json add to it, in the order of their ids: ``content`` and :data:`FLAGS`.

    Listed tokens, then named ones (``eos_token``) and others that are special; transformers adds them in this order to
    those that tokenizer.json lacks (tokenization_utils_tokenizers.py).

    Args:
        folder: Where the files are.
        config: Of :func:`token_config`.

    Raises:
        DataError: one has no text, or a file is no JSON.
    """
    named = [
        value
        for name, value in config.items()
        if name.endswith("_token") and token_text(value) is not None
    ]
    extra = next((config[name] for name in EXTRA if config.get(name)), None) or []
    special = [*named, *(extra.values() if isinstance(extra, Mapping) else extra)]
    special = [token for token in special if token_text(token) is not None]
    names = {token_text(token) for token in special}
    tokens: list[dict[str, Any]] = []
    if LISTED in config:
        try:
            listed = sorted(config[LISTED].items(), key=lambda pair: int(pair[0]))
            tokens = [{"special": False, **token, "id": int(number)} for number, token in listed]
            contents = [token["content"] for token in tokens]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{folder / CONFIG} has an {LISTED} of another form ({error!r}); copy it again"
            ) from error
        if not all(isinstance(content, str) and content for content in contents):
            raise DataError(
                f"{folder / CONFIG} has a token without a text in {LISTED}; copy it again"
            )
    else:
        ids = {k: v for k, v in read_fields(folder / ADDED).items() if isinstance(v, int)}
        for content, number in sorted(ids.items(), key=lambda pair: pair[1]):
            known = content in names
            tokens.append(
                {"content": content, "id": number, "special": known, "normalized": not known}
            )
    have = {token["content"] for token in tokens}
    for token in special:
        content = token_text(token)
        if content and content not in have:
            have.add(content)
            flags = {k: token[k] for k in FLAGS if k in token} if isinstance(token, Mapping) else {}
            tokens.append({"normalized": False, **flags, "content": content, "special": True})
    return tokens


def add_lacking(backend: "tokenizers.Tokenizer", tokens: list[dict[str, Any]]) -> list[str]:
    """Adds tokens that a tokenizer lacks, or has with other settings than the list says; returns their texts."""
    import tokenizers

    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    wanted = []
    for token in tokens:
        flags = {name: bool(token[name]) for name in FLAGS if name in token}
        added = tokenizers.AddedToken(token["content"], **flags)
        have = known.get(added.content)
        if have is None or ("id" in token and _flags(have) != _flags(added)):
            wanted.append(added)
    backend.add_tokens(wanted)
    return [token.content for token in wanted]


def _flags(token: "tokenizers.AddedToken") -> tuple[bool, ...]:
    return (token.single_word, token.lstrip, token.rstrip, token.normalized, token.special)


def with_spaces(described: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a tokenizer.json with ``add_prefix_space`` of the config, for the classes of transformers that follow it.

    Args:
        described: Fields of tokenizer.json; not changed.
        config: Of :func:`token_config`.
    """
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    prefix_space = config.get("add_prefix_space")
    if kind in BYTE_LEVEL:
        pre = _each(
            described.get("pre_tokenizer"), "ByteLevel", {"add_prefix_space": bool(prefix_space)}
        )
        return {**described, "pre_tokenizer": pre}
    if kind not in PIECES or prefix_space is None or not _has_pieces(described):
        return described
    # As transformers makes these anew: a mark for the space, of the text's first piece or of each between added tokens.
    first = "always" if config.get("legacy", False) else "first"
    pre = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": first if prefix_space else "never",
        "split": False,
    }
    back = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix_space else []),
    ]
    decoder = {"type": "Sequence", "decoders": back}
    return {**described, "normalizer": None, "pre_tokenizer": pre, "decoder": decoder}


def _has_pieces(described: Mapping[str, Any]) -> bool:
    vocab = described["model"]["vocab"]
    return any(SPACE in token for token in vocab) if isinstance(vocab, dict) else True


def _each(part: Any, kind: str, fields: Mapping[str, Any]) -> Any:
    """A part with some fields in those of its kind, alone or in a sequence."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == kind:
        return {**part, **fields}
    steps = part.get("pretokenizers")
    if not isinstance(steps, list):
        return part
    return {**part, "pretokenizers": [_each(step, kind, fields) for step in steps]}
