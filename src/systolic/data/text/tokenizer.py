"""Tokenizers, text to ids and back: any ``tokenizer.json`` with the files beside it, or plain bytes without one."""

import codecs
import enum
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.errors import DataError, NotFoundError, extra, nearest
from systolic.core.files import as_paths, refuse_pointer
from systolic.core.ranges import check

if TYPE_CHECKING:
    import numpy as np
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
BYTES_START = 256
"""The byte vocabulary's document token, after the 256 byte values."""
SMALLEST_VOCAB = 258
"""Tokens of a byte-level vocabulary without a merge: the bytes, the start and the end of a document."""
SEED = 6
"""Ids before a stream that are decoded together with its first ones."""
_BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|bos|>", "[BOS]", "[CLS]")
_EOS_NAMES = (
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eos|>",
    "[EOS]",
    "<|im_end|>",
    "[SEP]",
)
_MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")
"""Names of these in published tokenizers, for a ``tokenizer.json`` without a config."""


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


class Around(enum.Enum):
    """Tokens around a text."""

    document = "document"
    """The tokens that start and end a document, as far as the tokenizer has them."""
    own = "own"
    """Tokens that the tokenizer's own post-processor adds, as transformers does: often a start and no end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """A tokenizer; its file is read at first use and cached, and is then another tokenizer once the file has changed.

    Raises (from any method that needs the file):
        NotFoundError: no such file.
        DataError: the file is not a ``tokenizer.json``, has no such special token, or has changed since this was made.
        MissingExtraError: the ``tokenizers`` package is not installed.
    """

    path: Path | None = None
    """A ``tokenizer.json`` or a folder that holds one; None reads bytes (257 tokens)."""
    bos: str | None = None
    """The token before each document; None asks ``tokenizer_config.json`` and the usual names."""
    eos: str | None = None
    """The token after each document; None as for ``bos``."""
    around: Around = Around.document
    """Tokens around a text."""
    stamp: tuple[Any, ...] = field(init=False, repr=False, default=())
    """When its files were written, and their sizes: a model that was loaded anew must not get what another one read."""

    def __post_init__(self) -> None:
        check(self)
        as_paths(self, "path")
        if self.path is not None:
            object.__setattr__(self, "stamp", _stamp(self.path))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; reads the tokenizer's file only."""
        return 257 if self.path is None else _load(self).vocab_size

    @property
    def start(self) -> int | None:
        """The id before each document, if the tokenizer has one."""
        return BYTES_START if self.path is None else _load(self).start

    @property
    def end(self) -> int | None:
        """The id after each document, if the tokenizer has one."""
        return BYTES_START if self.path is None else _load(self).end

    @property
    def mask(self) -> int | None:
        """The id of the mask, if the tokenizer has one."""
        return None if self.path is None else _load(self).mask

    def digest(self) -> str:
        """16 hex digits of the digest of the tokenizer's file; ``bytes`` for bytes."""
        return "bytes" if self.path is None else _load(self).digest

    def about(self) -> tuple[str, ...]:
        """The digest and the special tokens of rows: equal ones make the same rows of a text."""
        ids = {"start": self.start, "end": self.end, "mask": self.mask}
        marks = (f"{name} {number}" for name, number in ids.items() if number is not None)
        return (self.digest(), *marks)

    def file(self) -> Path | None:
        """The ``tokenizer.json`` itself, None for bytes."""
        return None if self.path is None else _file(self.path)

    def described(self) -> dict[str, Any]:
        """Fields of its tokenizer.json, with what the files beside it change.

        Raises:
            DataError: reading bytes, which have none.
        """
        if self.path is None:
            raise DataError("bytes have no tokenizer.json; give one")
        return json.loads(_load(self).backend.to_str())

    def files(self) -> dict[str, bytes]:
        """Name to content of the files that make up the tokenizer; empty for bytes.

        Raises:
            DataError: the file has changed since it was read.
        """
        if self.path is None:
            return {}
        file = _file(self.path)
        raw = file.read_bytes()
        loaded = _load(self)
        if _digest(raw) != loaded.raw:
            raise DataError(f"{file} has changed since it was read; start again with the new one")
        # The start and end tokens are written out, since they may have been chosen by name.
        ids = {"bos_token": self.start, "eos_token": self.end}
        texts = {name: None if i is None else self.token(i) for name, i in ids.items()}
        config = token_config(file.parent)
        named: dict[str, Any] = {
            name: text for name, text in texts.items() if token_text(config.get(name)) != text
        } | {name: None for name, text in texts.items() if text is None}
        if LISTED not in config and (file.parent / ADDED).is_file():
            # One file for both, with the ids that they have here.
            more = added_tokens(file.parent, config)
            named[LISTED] = {
                str(self.find(token["content"])): {k: v for k, v in token.items() if k != "id"}
                for token in more
            }
        return {"tokenizer.json": raw, CONFIG: json.dumps(config | named, indent=2).encode()}

    def encode(self, text: str | bytes) -> list[int]:
        """The ids of a text, without special tokens around it."""
        return self.encode_all([text])[0].tolist()

    def encode_all(self, texts: Sequence[str | bytes]) -> "list[np.ndarray]":
        """int32[tokens] for each text; invalid UTF-8 becomes U+FFFD, except when reading bytes."""
        import numpy as np

        if self.path is None:
            raw = [text.encode() if isinstance(text, str) else text for text in texts]
            return [np.frombuffer(content, np.uint8).astype(np.int32) for content in raw]
        return self._encoded(texts, special=False)

    def prompt(self, text: str) -> list[int]:
        """Ids of a text to continue: after the token that starts a document, or what the post-processor puts there."""
        ids = self.encode(text)
        if self.path is None or self.around is Around.document:
            return ids if self.start is None else [self.start, *ids]
        # A post-processor puts the same before every text; after it, such as an end, nothing can follow.
        mark = self.encode("a")
        around = self._encoded(["a"], special=True)[0].tolist()
        first = next(i for i in range(len(around)) if around[i : i + len(mark)] == mark)
        return around[:first] + ids

    def opening(self, text: str) -> list[int]:
        """Tokens as of :meth:`prompt`; an empty text begins with the token that starts one, else with the one that ends the text before it, and is [] where the tokenizer has neither."""
        if ids := self.prompt(text):
            return ids
        first = self.end if self.start is None else self.start
        return [] if first is None else [first]

    def _encoded(self, texts: Sequence[str | bytes], *, special: bool) -> "list[np.ndarray]":
        import numpy as np

        strings = [
            text if isinstance(text, str) else text.decode("utf-8", "replace") for text in texts
        ]
        encoded = _load(self).backend.encode_batch_fast(strings, add_special_tokens=special)
        return [np.array(encoding.ids, np.int32) for encoding in encoded]

    def spans(self, texts: Sequence[str]) -> "list[tuple[np.ndarray, np.ndarray, np.ndarray]]":
        """For each text the ids int32[tokens], without special tokens around them; the character where each token starts, int64[tokens]; and whether it is a special token, bool[tokens].

        Raises:
            DataError: reading bytes, which have no special tokens.
        """
        import numpy as np

        if self.path is None:
            raise DataError("conversations need a tokenizer; give a tokenizer.json")
        backend = _load(self).backend
        added = [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
        spans = []
        for encoding in backend.encode_batch(list(texts), add_special_tokens=False):
            ids = np.array(encoding.ids, np.int32)
            starts = np.array([start for start, _ in encoding.offsets], np.int64)
            spans.append((ids, starts, np.isin(ids, added)))
        return spans

    def documents(self, texts: Sequence[str | bytes]) -> "list[np.ndarray]":
        """int32[tokens] for each text, with the tokens around it."""
        import numpy as np

        if self.path is not None and self.around is Around.own:
            return self._encoded(texts, special=True)
        start = [] if self.start is None else [self.start]
        end = [] if self.end is None else [self.end]
        return [
            np.concatenate([np.array(start, np.int32), ids, np.array(end, np.int32)])
            for ids in self.encode_all(texts)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, special tokens left out, invalid UTF-8 as U+FFFD."""
        if self.path is None:
            return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", "replace")
        return _load(self).backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def decode_all(self, texts: Sequence[list[int]]) -> list[str]:
        """The text of each list of ids, as :meth:`decode`."""
        if self.path is None:
            return [self.decode(ids) for ids in texts]
        return _load(self).backend.decode_batch(texts, skip_special_tokens=True)

    def shown(self, ids: Iterable[int]) -> str:
        """The text of some ids with the special tokens among them, for display."""
        if self.path is None:
            return self.decode(ids)
        return _load(self).backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def stream(self, before: Sequence[int] = ()) -> "TextStream":
        """A decoder for a stream of ids.

        Args:
            before: Ids that the stream continues, whose text is not returned: without them many decoders drop a
                space before the first word.
        """
        if self.path is None:
            return _ByteStream()
        seed = [int(i) for i in before[-SEED:]]
        if self.decode(seed).endswith("\ufffd"):
            seed = []  # The stream begins within a character.
        return _TokenStream(tokenizer=self, ids=seed, returned=len(seed))

    def find(self, token: str) -> int | None:
        """The id of a token as :meth:`token` writes it; None where there is none."""
        return None if self.path is None else _load(self).backend.token_to_id(token)

    def token(self, index: int) -> str:
        """One id in readable form, for display."""
        if self.path is None:
            return "<document>" if index == BYTES_START else chr(index)
        return _load(self).backend.id_to_token(index) or f"<{index}>"


class TextStream:
    """Decodes a stream of ids; never returns half a character."""

    def push(self, index: int) -> str:
        """Text completed by this id; "" while a character is incomplete."""
        raise NotImplementedError

    def flush(self) -> str:
        """The remaining text, incomplete characters as U+FFFD."""
        raise NotImplementedError


class _ByteStream(TextStream):
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, index: int) -> str:
        return self._decoder.decode(bytes([index])) if index < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@dataclass(kw_only=True, slots=True)
class _TokenStream(TextStream):
    """Decodes ids together with those before them, since spaces depend on neighbours."""

    tokenizer: Tokenizer
    ids: list[int] = field(default_factory=list)
    context: int = 0
    """First id that is decoded together with the next ones."""
    returned: int = 0
    """Number of ids already returned as text."""

    def push(self, index: int) -> str:
        self.ids.append(int(index))
        return self._rest(final=False)

    def flush(self) -> str:
        return self._rest(final=True)

    def _rest(self, final: bool) -> str:
        before = self.tokenizer.decode(self.ids[self.context : self.returned])
        text = self.tokenizer.decode(self.ids[self.context :])
        if not final and text.endswith("\ufffd"):
            return ""
        if len(text) > len(before):
            self.context, self.returned = self.returned, len(self.ids)
            return text[len(before) :]
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _LoadedTokenizer:
    backend: "tokenizers.Tokenizer"
    vocab_size: int
    start: int | None
    end: int | None
    mask: int | None
    digest: str
    """Digest of the file, and of what the files beside it change."""
    raw: str
    """Digest of the file alone."""


def _file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise NotFoundError(
            f"tokenizer {path} does not exist{'' if file == path else ' (it has no tokenizer.json)'}; give a tokenizer.json, or none to read bytes"
        )
    return file


def _stamp(path: Path) -> tuple[Any, ...]:
    """Stamp that distinguishes a tokenizer's files from others under their names."""
    folder = path if path.is_dir() else path.parent
    stamps = []
    for file in (
        folder / "tokenizer.json" if path.is_dir() else path,
        folder / CONFIG,
        folder / TOKENS_MAP,
        folder / ADDED,
    ):
        try:
            about = file.stat()
        except OSError:
            continue
        stamps.append((file.name, about.st_mtime_ns, about.st_size, about.st_ino))
    return tuple(stamps)


@lru_cache(maxsize=32)
def _load(tokenizer: Tokenizer) -> _LoadedTokenizer:
    assert tokenizer.path is not None
    file = _file(tokenizer.path)
    if tokenizer.stamp != _stamp(tokenizer.path):
        raise DataError(f"{file} has changed since it was opened; open the model again")
    refuse_pointer(file)
    raw = file.read_bytes()
    try:
        described = json.loads(raw)
        added = {str(t["content"]): int(t["id"]) for t in described.get("added_tokens", [])}
        described["model"]["vocab"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file} is not a tokenizer.json of the tokenizers library (no model.vocab); give the file that tokenizer.save() writes"
        ) from error
    config = token_config(file.parent)
    changed = with_spaces(described, config)
    backend = _backend(file, raw if changed == described else json.dumps(changed).encode())
    more = add_lacking(backend, added_tokens(file.parent, config))
    added |= {token: number for token in more if (number := backend.token_to_id(token)) is not None}
    vocab = backend.get_vocab(with_added_tokens=True)
    apart = changed != described or more
    return _LoadedTokenizer(
        backend=backend,
        vocab_size=max(vocab.values(), default=-1) + 1,
        start=_special(tokenizer.bos, config, "bos", _BOS_NAMES, added, vocab, file),
        end=_special(tokenizer.eos, config, "eos", _EOS_NAMES, added, vocab, file),
        mask=_special(None, config, "mask", _MASK_NAMES, added, vocab, file),
        digest=_digest(backend.to_str().encode() if apart else raw),
        raw=_digest(raw),
    )


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _backend(file: Path, raw: bytes) -> "tokenizers.Tokenizer":
    with extra("reading a tokenizer.json", "text"):
        import tokenizers
    try:
        backend = tokenizers.Tokenizer.from_str(raw.decode())
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise DataError(
            f"{file} cannot be read as a tokenizer.json ({reason}); save it again with a newer tokenizers"
        ) from error
    # Rows are packed here; a tokenizer that pads or cuts would alter documents.
    backend.no_padding()
    backend.no_truncation()
    return backend


def _special(
    wanted: str | None,
    config: dict[str, Any],
    kind: str,
    names: tuple[str, ...],
    added: dict[str, int],
    vocab: dict[str, int],
    file: Path,
) -> int | None:
    """Id of a special token: the requested one, the configured one, or one of a usual name."""
    if wanted is not None:
        if wanted not in vocab:
            raise DataError(f"{file} has no token {wanted!r} for {kind}{nearest(wanted, added)}")
        return vocab[wanted]
    if f"{kind}_token" in config:
        content = token_text(config[f"{kind}_token"])
        return None if content is None else vocab.get(content)
    return next((added[name] for name in names if name in added), None)
