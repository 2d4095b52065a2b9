"""The tokenizer of a GGUF file as a tokenizer.json, with its chat template and the tokens that end a text.

Kinds of llama.cpp (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): ``gpt2`` is byte-level BPE, whose
file holds vocabulary and merges and names the pattern that splits words; ``llama`` is SentencePiece's BPE, whose
merges follow from the scores of its pieces.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.errors import DataError, OptionError, extra, misspelt
from systolic.core.files import cache_home, digest, write_atomically
from systolic.data.text.chat import find_template
from systolic.data.text.tokenizer import Tokenizer as Known
from systolic.data.text.tokenizer import token_config, token_text
from systolic.formats.comparison import PASSAGE
from systolic.formats.outline import ends_of
from systolic.models.families import GENERATION, Config

if TYPE_CHECKING:
    import tokenizers


VERSION = 2
"""Version of the files in a folder of the cache."""

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
"""Patterns that split numbers into digits."""

BEGIN = ("llama-bpe",)
"""Byte-level kinds that begin a text with bos where the file does not say."""

Fields = Mapping[str, Any]


NO_TOKEN = 2**32 - 1
"""-1 in 32 bits, which some converters write where there is no such token."""
NORMAL, UNKNOWN, UNUSED, BYTE = 1, 2, 5, 6
"""Types of tokens beside those that are found before a text is split."""
SAMPLES = (
    *PASSAGE.splitlines(),
    PASSAGE,
    " \n \n\n\t\t x  y   z    \r\n    end ",
    "It's he'll WE'RE they'd I'M you've 1 22 333 4444 55555 3.14 1,000,000",
    "camelCase snake_case --flag=x; if (a<=b) { return a*b; } // ...!!! ??? #1 @me",
    "naïve façade, Grüße, Привет мир, γειά σου, 東京都は日本, 안녕하세요, שלום, สวัสดี",
    "🙂🙃 👩‍🚀 ✅ ½ ² → ∑ \u00a0 \u200b “quoted” — dash…",
    "",
)
"""Texts that both tokenizers must agree on; all are in Unicode's composed form, which llama.cpp does not make."""
MARKED = 4
"""Special tokens that are tried within a text."""
UNREACHED = -1e9
"""Score of a piece that no merge makes."""
ENDS = ("eos", "eot", "eom")
"""Names of the ids that end a text."""


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
    with extra("the tokenizer of a GGUF file", "gguf"):
        import tokenizers
    makers = {"gpt2": _byte_level, "llama": _sentence_piece}
    kind, tokens = fields.get(f"{KEY}model"), fields.get(f"{KEY}tokens")
    if kind not in makers:
        raise OptionError(
            f"{path} has a tokenizer of the kind {kind!r}; read are {', '.join(makers)}: import the Hugging Face folder of this model"
        )
    if not tokens:
        raise DataError(f"{path} has no {KEY}tokens; convert the model again")
    if not isinstance(tokens, list) or not all(isinstance(text, str) for text in tokens):
        raise DataError(f"{path} has {KEY}tokens that are no texts; convert the model again")
    tokenizer = makers[kind](path, fields, {token: i for i, token in enumerate(tokens)})
    types = fields.get(f"{KEY}token_type") or [1] * len(tokens)
    added = [
        tokenizers.AddedToken(token, special=sort == CONTROL, normalized=False)
        for token, sort in zip(tokens, types, strict=True)
        if sort in (CONTROL, USER)
    ]
    tokenizer.add_tokens(added)
    if (begin := _begin(fields)) is not None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, tokens.index(begin))]
        )
    return tokenizer


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
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(path: Path, fields: Fields, vocab: dict[str, int]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = fields.get(f"{KEY}scores")
    if not scores or len(scores) != len(vocab):
        raise DataError(f"{path} has no score for each token; convert the model again")
    types = fields.get(f"{KEY}token_type") or [1] * len(vocab)
    plain = {t: s for t, s, sort in zip(vocab, scores, types, strict=True) if sort == 1}
    unknown = token_id(fields, "unknown")
    tokenizer = Tokenizer(
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
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replaced]) if spaces else replaced
    )
    if not spaces:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if spaces else back)
    return tokenizer


def merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges of SentencePiece's BPE: into each piece from any two, the best score first."""
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        if len(piece) <= LONGEST_PIECE
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    merges.sort(key=lambda merge: (-merge[0], len(merge[1])))
    return [(left, right) for _, left, right in merges]


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
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for ours, theirs in names.items():
        number = token_id(fields, theirs)
        if number is not None:
            config[f"{ours}_token"] = tokens[number]
    named = {"default": fields.get(TEMPLATE)} | {
        name.removeprefix(f"{TEMPLATE}."): text
        for name, text in fields.items()
        if name.startswith(f"{TEMPLATE}.")
    }
    known = [{"name": k, "template": v} for k, v in named.items() if isinstance(v, str)]
    if known:
        alone = [template["template"] for template in known if template["name"] == "default"]
        config["chat_template"] = alone[0] if len(known) == len(alone) else known
    return config


@dataclass(frozen=True, kw_only=True)
class Words:
    """A tokenizer in GGUF."""

    fields: Mapping[str, Any]
    """Metadata by name."""
    notes: tuple[str, ...] = ()
    """Properties that GGUF can't express."""


def words_of(
    folder: Path, config: Config, vocab: int, *, starts: bool | None, source: str
) -> Words:
    """The tokenizer of a folder.

    Args:
        folder: Holds tokenizer.json and the files beside it.
        config: Fields of the model's config.json.
        vocab: Rows of the model's embedding.
        starts: Whether a prompt begins with the token that begins a text; ``None`` leaves it to the post-processor.
        source: The model's name in messages.

    Raises:
        OptionError: there is none, or GGUF has none of its kind.
        MissingExtraError: the package ``tokenizers`` is not installed.
    """
    with extra("the tokenizer of a GGUF file", "gguf"):
        from tokenizers import Tokenizer
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise OptionError(
            f"{source} has no tokenizer.json, and a GGUF file holds its tokenizer; train with --tokenizer, or copy the file from where the model came from"
        )
    raw = Known(path=file).described()
    kind = raw["model"].get("type", "BPE")
    if kind != "BPE":
        raise OptionError(
            f"the tokenizer of {source} is of the kind {kind}, and only BPE is written as GGUF; give --to hf"
        )
    theirs = Tokenizer.from_str(json.dumps(raw))
    begin = _first_token(theirs, source)
    ids, notes = _ids(folder, config, theirs, begin)
    fields: dict[str, Any] = {f"{KEY}{name}_token_id": number for name, number in ids.items()}
    fields[f"{KEY}add_bos_token"] = "bos" in ids and (
        begin is not None if starts is None else starts
    )
    if (template := find_template(folder)) is not None:
        fields[TEMPLATE] = template.text
    texts = [*SAMPLES, *_marked(raw)]
    for candidate in _candidates(raw, theirs, vocab, ids.get("unknown")):
        if _agree(build(folder, {**candidate, **fields}), theirs, texts):
            return Words(fields={**candidate, **fields}, notes=notes)
    raise OptionError(
        f"the tokenizer of {source} splits or joins words in a way that no kind of GGUF known here does (tried {', '.join(PATTERNS)} and SentencePiece); give --to hf, and llama.cpp's own converter that folder"
    )


def _first_token(theirs: "tokenizers.Tokenizer", source: str) -> int | None:
    """The token that the post-processor puts before a text.

    Raises:
        OptionError: it puts more around it.
    """
    plain, whole = theirs.encode("a", add_special_tokens=False).ids, theirs.encode("a").ids
    if whole == plain:
        return None
    if whole[1:] != plain:
        raise OptionError(
            f"the tokenizer of {source} puts {len(whole) - len(plain)} tokens around a text, and GGUF has one before it; give --to hf"
        )
    return whole[0]


def _ids(
    folder: Path, config: Config, theirs: "tokenizers.Tokenizer", begin: int | None
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Ids of special tokens by llama.cpp's names, and what is left out."""
    said = token_config(folder)

    def own(name: str) -> int | None:
        text = token_text(said.get(f"{name}_token"))
        number = None if text is None else theirs.token_to_id(text)
        stated = config.get(f"{name}_token_id")
        return stated if number is None and isinstance(stated, int) else number

    generation = folder / GENERATION
    ends = list(ends_of(config, generation if generation.is_file() else None))
    if (end := own("eos")) is not None:
        ends = [end, *(token for token in ends if token != end)]
    ids = {"bos": own("bos") if begin is None else begin, "unknown": own("unk")}
    ids |= {"padding": own("pad"), **dict(zip(ENDS, ends, strict=False))}
    notes = ()
    if more := ends[len(ENDS) :]:
        texts = ", ".join(repr(theirs.id_to_token(token)) for token in more)
        notes = (f"GGUF names {len(ENDS)} tokens that end a text; left out: {texts}",)
    return {name: number for name, number in ids.items() if number is not None}, notes


def _marked(raw: Mapping[str, Any]) -> list[str]:
    """Texts with special tokens in them."""
    added = [added_token["content"] for added_token in raw.get("added_tokens", ())]
    return [f"a {token} b{token}c" for token in added[:MARKED]]


def _candidates(
    raw: Mapping[str, Any], theirs: "tokenizers.Tokenizer", vocab: int, unknown: int | None
) -> Iterator[dict[str, Any]]:
    """Metadata to try, the likeliest first."""
    model = raw["model"]
    fallback = bool(model.get("byte_fallback"))
    tokens, types = _tokens(raw, vocab, fallback)
    shared: dict[str, Any] = {f"{KEY}tokens": tokens, f"{KEY}token_type": types}
    merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    if not fallback:
        joined = [" ".join(merge) for merge in merges]
        for pattern in PATTERNS:
            kind = {f"{KEY}model": "gpt2", f"{KEY}pre": pattern, f"{KEY}merges": joined}
            yield {**shared, **kind}
        return
    if unknown is not None and types[unknown] == NORMAL:
        types[unknown] = UNKNOWN
    first = theirs.encode("a", add_special_tokens=False).tokens[:1]
    shared |= {
        f"{KEY}model": "llama",
        f"{KEY}pre": "default",
        f"{KEY}scores": _scores(tokens, merges),
        f"{KEY}add_space_prefix": bool(first) and first[0].startswith(SPACE),
    }
    yield shared
    # User tokens of spaces are found in a text before its spaces are replaced.
    yield shared | {
        f"{KEY}tokens": [
            token.replace(SPACE, " ") if sort == USER else token
            for token, sort in zip(tokens, types, strict=True)
        ]
    }


def _tokens(raw: Mapping[str, Any], vocab: int, fallback: bool) -> tuple[list[str], list[int]]:
    """Texts and types of all rows of the embedding; ids beyond them are left out, rows without a token are unused."""
    tokens, types = [f"[PAD{number}]" for number in range(vocab)], [UNUSED] * vocab
    for token, number in raw["model"]["vocab"].items():
        if number < vocab:
            byte = fallback and len(token) == 6 and token.startswith("<0x")
            tokens[number], types[number] = token, BYTE if byte else NORMAL
    for added in raw.get("added_tokens", ()):
        if added["id"] < vocab:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = CONTROL if added["special"] else USER
    return tokens, types


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> list[float]:
    """Scores by which SentencePiece's BPE joins pieces in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return [-float(ranks[token]) if token in ranks else UNREACHED for token in tokens]


def _agree(
    ours: "tokenizers.Tokenizer", theirs: "tokenizers.Tokenizer", texts: Sequence[str]
) -> bool:
    """Whether both encode and decode all texts alike."""
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False).ids
        if ours.encode(text, add_special_tokens=False).ids != ids or any(
            ours.decode(ids, skip_special_tokens=skip)
            != theirs.decode(ids, skip_special_tokens=skip)
            for skip in (True, False)
        ):
            return False
    return True
