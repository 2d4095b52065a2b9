"""A tokenizer.json as metadata of GGUF: vocabulary, merges or scores, splitting pattern, special tokens, chat template.

The inverse of :mod:`systolic.formats.gguf.tokenizer`, which rebuilds each result: only one that encodes and decodes
sample texts as the tokenizer.json does is written.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.errors import MissingExtraError, OptionError
from systolic.data.text.chat import find_template
from systolic.data.text.tokenizer import Tokenizer as Known
from systolic.data.text.tokenizer_config import token_config, token_text
from systolic.formats.gguf.tokenizer import (
    CONTROL,
    KEY,
    PATTERNS,
    SPACE,
    TEMPLATE,
    USER,
    build,
)
from systolic.formats.outline import ends_of
from systolic.formats.probe import PASSAGE
from systolic.models.families import GENERATION, Config

if TYPE_CHECKING:
    import tokenizers

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


@dataclass(frozen=True, kw_only=True)
class Words:
    """A tokenizer in GGUF."""

    fields: Mapping[str, Any]
    """Metadata by name."""
    notes: tuple[str, ...] = ()
    """What GGUF can't say of it."""


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
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError("the tokenizer of a GGUF file", "gguf") from error
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
    begin = _begin(theirs, source)
    ids, notes = _ids(folder, config, theirs, begin)
    fields: dict[str, Any] = {f"{KEY}{name}_token_id": number for name, number in ids.items()}
    fields[f"{KEY}add_bos_token"] = "bos" in ids and (
        begin is not None if starts is None else starts
    )
    if (template := find_template(folder)) is not None:
        fields[TEMPLATE] = template.text
    texts = [*SAMPLES, *_marked(raw)]
    for made in _candidates(raw, theirs, vocab, ids.get("unknown")):
        if _agree(build(folder, {**made, **fields}), theirs, texts):
            return Words(fields={**made, **fields}, notes=notes)
    raise OptionError(
        f"the tokenizer of {source} splits or joins words in a way that no kind of GGUF known here does (tried {', '.join(PATTERNS)} and SentencePiece); give --to hf, and llama.cpp's own converter that folder"
    )


def _begin(theirs: "tokenizers.Tokenizer", source: str) -> int | None:
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
        given = config.get(f"{name}_token_id")
        return given if number is None and isinstance(given, int) else number

    generation = folder / GENERATION
    ends = list(ends_of(config, generation if generation.is_file() else None))
    if (end := own("eos")) is not None:
        ends = [end, *(one for one in ends if one != end)]
    found = {"bos": own("bos") if begin is None else begin, "unknown": own("unk")}
    found |= {"padding": own("pad"), **dict(zip(ENDS, ends, strict=False))}
    notes = ()
    if more := ends[len(ENDS) :]:
        texts = ", ".join(repr(theirs.id_to_token(one)) for one in more)
        notes = (f"GGUF names {len(ENDS)} tokens that end a text; left out: {texts}",)
    return {name: number for name, number in found.items() if number is not None}, notes


def _marked(raw: Mapping[str, Any]) -> list[str]:
    """Texts with special tokens in them."""
    added = [one["content"] for one in raw.get("added_tokens", ())]
    return [f"a {token} b{token}c" for token in added[:MARKED]]


def _candidates(
    raw: Mapping[str, Any], theirs: "tokenizers.Tokenizer", vocab: int, unknown: int | None
) -> Iterator[dict[str, Any]]:
    """Metadata to try, the likeliest first."""
    model = raw["model"]
    fallback = bool(model.get("byte_fallback"))
    tokens, types = _tokens(raw, vocab, fallback)
    made: dict[str, Any] = {f"{KEY}tokens": tokens, f"{KEY}token_type": types}
    merges = [one.split(" ", 1) if isinstance(one, str) else one for one in model["merges"]]
    if not fallback:
        joined = [" ".join(one) for one in merges]
        for pattern in PATTERNS:
            kind = {f"{KEY}model": "gpt2", f"{KEY}pre": pattern, f"{KEY}merges": joined}
            yield {**made, **kind}
        return
    if unknown is not None and types[unknown] == NORMAL:
        types[unknown] = UNKNOWN
    first = theirs.encode("a", add_special_tokens=False).tokens[:1]
    made |= {
        f"{KEY}model": "llama",
        f"{KEY}pre": "default",
        f"{KEY}scores": _scores(tokens, merges),
        f"{KEY}add_space_prefix": bool(first) and first[0].startswith(SPACE),
    }
    yield made
    # User tokens of spaces are found in a text before its spaces are replaced.
    yield made | {
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
    for one in raw.get("added_tokens", ()):
        if one["id"] < vocab:
            tokens[one["id"]] = one["content"]
            types[one["id"]] = CONTROL if one["special"] else USER
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
