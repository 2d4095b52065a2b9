"""The tokenizer of a GGUF file as a tokenizer.json, with its chat template and the tokens that end a text.

Kinds of llama.cpp (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): ``gpt2`` is byte-level BPE, whose
file holds vocabulary and merges and names the pattern that splits words; ``llama`` is SentencePiece's BPE, whose
merges follow from the scores of its pieces.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.digest import digest
from systolic.core.errors import DataError, MissingExtraError, OptionError, misspelt
from systolic.core.files import write_atomically
from systolic.core.store import cache_home

if TYPE_CHECKING:
    import tokenizers

VERSION = 2
"""Of what is written here; a folder in the cache is of one version."""
KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
CONTROL, USER = 3, 4
"""Types of tokens that are found in a text before it is split: control tokens, and others."""
SPACE = "\u2581"
"""SentencePiece's space."""

LONGEST_PIECE = 1024
"""Characters of a piece that is joined from others; SentencePiece makes none above 16 unless it is told to."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERNS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Splitting patterns by llama.cpp's name (``llama-vocab.cpp``); None is GPT-2's."""
SINGLE_DIGITS = ("smollm",)
"""Of these each digit is a word."""
BEGIN = ("llama-bpe",)
"""Byte-level kinds that begin a text with bos where the file does not say."""

Fields = Mapping[str, Any]


NO_TOKEN = 2**32 - 1
"""-1 in 32 bits, which some converters write where there is no such token."""


def token_id(fields: Fields, name: str) -> int | None:
    """The id of a special token; ``None`` where there is none, or none of that number, as of the 4294967295 of files without one."""
    tokens, number = fields.get(f"{KEY}tokens"), fields.get(f"{KEY}{name}_token_id")
    if isinstance(number, bool) or not isinstance(number, int) or not isinstance(tokens, list):
        return None
    return number if 0 <= number < len(tokens) else None


def unknown_ids(path: Path, fields: Fields) -> tuple[str, ...]:
    """Notes of special tokens whose number is beyond the vocabulary, and no -1."""
    tokens, notes = fields.get(f"{KEY}tokens"), []
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        number = fields.get(f"{KEY}{name}_token_id")
        if not isinstance(number, int) or not isinstance(tokens, list):
            continue
        if number not in (-1, NO_TOKEN) and token_id(fields, name) is None:
            notes.append(
                f"{path} has {KEY}{name}_token_id {number} and {len(tokens)} tokens; it is read as a file without that token"
            )
    return tuple(notes)


def tokenizer_folder(path: Path, fields: Fields) -> Path:
    """Folder of tokenizer.json, tokenizer_config.json and generation_config.json, made once.

    Args:
        path: The GGUF file, for messages.
        fields: Its metadata.

    Raises:
        MissingExtraError: the package ``tokenizers`` is not installed.
        OptionError: a kind of tokenizer that is not known.
        DataError: metadata is missing or contradicts itself.
    """
    own = {name: value for name, value in fields.items() if name.startswith("tokenizer.")}
    folder = cache_home() / "gguf" / digest([VERSION, own])
    last = folder / "tokenizer_config.json"
    if not last.is_file():
        write_atomically(folder / "tokenizer.json", build(path, own).to_str())
        write_atomically(
            folder / "generation_config.json", json.dumps({"eos_token_id": _ends(own)})
        )
        write_atomically(last, json.dumps(_config(own), indent=2, ensure_ascii=False))
    return folder


def build(path: Path, fields: Fields) -> "tokenizers.Tokenizer":
    """The tokenizer of a file's metadata; raises as :func:`tokenizer_folder`.

    Args:
        path: The GGUF file, for messages.
        fields: Its metadata.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("the tokenizer of a GGUF file", "gguf") from error
    makers = {"gpt2": _byte_level, "llama": _sentence_piece}
    kind, tokens = fields.get(f"{KEY}model"), fields.get(f"{KEY}tokens")
    if kind not in makers:
        raise OptionError(
            f"{path} has a tokenizer of the kind {kind!r}; read are {', '.join(makers)}: import the Hugging Face folder of this model"
        )
    if not tokens:
        raise DataError(f"{path} has no {KEY}tokens; convert the model again")
    if not isinstance(tokens, list) or not all(isinstance(one, str) for one in tokens):
        raise DataError(f"{path} has {KEY}tokens that are no texts; convert the model again")
    made = makers[kind](path, fields, {token: i for i, token in enumerate(tokens)})
    types = fields.get(f"{KEY}token_type") or [1] * len(tokens)
    added = [
        tokenizers.AddedToken(token, special=sort == CONTROL, normalized=False)
        for token, sort in zip(tokens, types, strict=True)
        if sort in (CONTROL, USER)
    ]
    made.add_tokens(added)
    if (begin := _begin(fields)) is not None:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, tokens.index(begin))]
        )
    return made


def _byte_level(path: Path, fields: Fields, vocab: dict[str, int]) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    kind = fields.get(f"{KEY}pre", "gpt-2")
    if kind not in PATTERNS:
        raise OptionError(
            f"{path} splits words in a way that is not known, {kind!r}{misspelt(str(kind), PATTERNS)}; known are {', '.join(PATTERNS)}: import the Hugging Face folder of this model"
        )
    pattern = PATTERNS[kind]
    parts: list[Any] = []
    if kind in SINGLE_DIGITS:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        parts.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    merges = [tuple(pair.split(" ", 1)) for pair in fields.get(f"{KEY}merges") or []]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind == "llama-bpe"))
    made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_piece(path: Path, fields: Fields, vocab: dict[str, int]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = fields.get(f"{KEY}scores")
    if not scores or len(scores) != len(vocab):
        raise DataError(f"{path} has no score for each token; convert the model again")
    types = fields.get(f"{KEY}token_type") or [1] * len(vocab)
    plain = {t: s for t, s, sort in zip(vocab, scores, types, strict=True) if sort == 1}
    unknown = token_id(fields, "unknown")
    made = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_of(plain),
            unk_token=None if unknown is None else fields[f"{KEY}tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = fields.get(f"{KEY}add_space_prefix", True)
    replaced = normalizers.Replace(" ", SPACE)
    made.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replaced]) if spaces else replaced
    )
    if not spaces:
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if spaces else back)
    return made


def merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges of SentencePiece's BPE: into each piece from any two, the best score first."""
    found = [
        (score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        if len(piece) <= LONGEST_PIECE
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    found.sort(key=lambda merge: (-merge[0], len(merge[1])))
    return [(left, right) for _, left, right in found]


def _begin(fields: Fields) -> str | None:
    """The token that begins a text; ``None`` if none does."""
    default = fields.get(f"{KEY}model") == "llama" or fields.get(f"{KEY}pre") in BEGIN
    number = token_id(fields, "bos")
    if number is None or not fields.get(f"{KEY}add_bos_token", default):
        return None
    return fields[f"{KEY}tokens"][number]


def _ends(fields: Fields) -> list[int]:
    numbers = (token_id(fields, name) for name in ("eos", "eot", "eom"))
    return sorted({number for number in numbers if number is not None})


def _config(fields: Fields) -> dict[str, Any]:
    tokens = fields[f"{KEY}tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    made: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for ours, theirs in names.items():
        number = token_id(fields, theirs)
        if number is not None:
            made[f"{ours}_token"] = tokens[number]
    named = {"default": fields.get(TEMPLATE)} | {
        name.removeprefix(f"{TEMPLATE}."): text
        for name, text in fields.items()
        if name.startswith(f"{TEMPLATE}.")
    }
    known = [{"name": k, "template": v} for k, v in named.items() if isinstance(v, str)]
    if known:
        alone = [one["template"] for one in known if one["name"] == "default"]
        made["chat_template"] = alone[0] if len(known) == len(alone) else known
    return made
