"""Grammars that a generated text follows (JSON by a schema, regular expressions, choices, calls of tools), and the tokens that can come next under them, by llguidance."""

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from systolic.core.errors import OptionError, RunError, extra
from systolic.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance
    import numpy as np

Rule = Mapping[str, Any]
"""A grammar in one of llguidance's forms: ``{"json_schema": ...}`` or ``{"lark_grammar": ...}``."""
SPACES = r"\n?[ \t]{0,24}"
"""White space between tokens of JSON: a model that is unsure may write nothing else where there is no bound."""
KEPT = 64
"""Grammars of a model that stay compiled."""
MANY = 8
"""Texts, and cores, from which masks are computed in parallel: on fewer cores, which others use too, threads wait longer for each other than a mask takes."""
LONGEST_REASON = 200
"""Characters of llguidance's reason for a refusal."""
ARGUMENTS = "arguments_"
"""Rule of a call's arguments, before its number."""
_CALLS = r'\s*(\[\s*)?\{\s*"((name|arguments|parameters|type|id)"|[^"\\]*\\)'
"""Regular expression of how JSON begins that could be a call, in Rust's syntax."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_POINTER = re.compile(r"\n\s*\d+ \| |<state>")
_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def json_rule(schema: Any, *, lenient: bool = False) -> Rule:
    """JSON that a schema describes.

    Args:
        schema: JSON Schema.
        lenient: Whether keywords that cannot be followed are left out, in place of a refusal.

    Raises:
        OptionError: it is no schema, or one that no JSON fulfils.
    """
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping):
        raise OptionError("the schema is no JSON object; give a JSON Schema")
    if not lenient:
        _check_counts(schema)
    settings = {"whitespace_pattern": SPACES, "lenient": lenient}
    return {"json_schema": {**schema, "x-guidance": settings}}


def _check_counts(schema: Any) -> None:
    """Refuses a count of properties that names without a schema of their own could fulfil by repetition."""
    if isinstance(schema, list):
        for part in schema:
            _check_counts(part)
    if not isinstance(schema, Mapping):
        return
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(named, 1):
        raise OptionError(
            "the schema has minProperties above the number of required properties, which cannot be followed; name them in required"
        )
    for part in schema.values():
        _check_counts(part)


def regex_rule(pattern: str) -> Rule:
    """Texts that a regular expression of Rust's syntax matches as a whole."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
    # Nothing between the slashes would be a comment.
    return {"lark_grammar": "start: /" + (escaped.replace("\n", r"\n") or "(?:)") + "/"}


def choice_rule(choices: Sequence[str]) -> Rule:
    """One of some texts.

    Raises:
        OptionError: there is none.
    """
    if not choices:
        raise OptionError("there is no text to choose; give one or more")
    return {"lark_grammar": "start: " + " | ".join(map(json.dumps, choices))}


def written_rule(grammar: str) -> Rule:
    """A grammar in Lark's or llama.cpp's notation.

    Raises:
        OptionError: it is none.
    """
    with extra("a grammar for the answer", "serve"):
        from llguidance.gbnf_to_lark import any_to_lark
    try:
        return {"lark_grammar": any_to_lark(grammar)}
    except Exception as error:  # the library raises bare Exception
        raise OptionError(f"the grammar cannot be read ({_short(error)}); give Lark's") from error


def grammar_text(start: str, rules: Mapping[str, Rule]) -> str:
    """A grammar as :meth:`Grammars.compiled` takes it.

    Args:
        start: Rules in Lark's notation, which name others as ``@name``.
        rules: These by name.
    """
    # Else a text that is certain has the tokens of a tokenizer alone, not those of its neighbours.
    free = '%llguidance {"no_forcing": true}\n'
    grammars = [{"lark_grammar": free + start}]
    return json.dumps({"grammars": grammars + [{"name": n, **rule} for n, rule in rules.items()]})


def call_rules(
    heads: Sequence[str], *, marks: tuple[str, str] | None, several: bool, begin: str = ""
) -> list[str]:
    """Lark's rules ``calls``, and ``free`` for a text with or without calls; they name a rule :data:`ARGUMENTS` 0, 1, ... for each call.

    Args:
        heads: The begin of each call, up to its arguments.
        marks: Around a call, a line each; None where JSON alone is a call.
        several: Whether there may be more than one.
        begin: How the prompt begins the first call.
    """
    opening, close = (f"{marks[0]}\n", json.dumps(f"\n{marks[1]}")) if marks else ("", "")
    whole, first = [], []
    for number, head in enumerate(heads):
        end = f'@{ARGUMENTS}{number} "}}"'
        whole.append(f"{json.dumps(head)} {end}")
        if (opening + head).startswith(begin):
            first.append(f"{json.dumps((opening + head)[len(begin) :])} {end}")
    more = f"({json.dumps(chr(10) if marks else '; ')} call)*" if several else ""
    rules = [
        f"calls: first {more}",
        f"first: ({' | '.join(first)}) {close}",
        f"call: {json.dumps(opening)} body" if marks else "call: body",
        f"body: ({' | '.join(whole)}) {close}",
    ]
    if marks is None:
        return [*rules, f"TEXT: /(?s:.*)/ & ~/{_CALLS}(?s:.*)/", "free: calls | TEXT"]
    # A mark within a text ends it, since the lexer takes the shortest.
    later = f"mark {json.dumps(chr(10))} body"
    free = f"free: ({later})* TEXT" if several else f"free: {later} | TEXT"
    return [*rules, "TEXT: /(?s:.*)/", f"mark[lazy]: TEXT {json.dumps(marks[0])}", free]


def thought_rules(opening: str, end: str, *, begun: bool | None) -> list[str]:
    """Lark's rule ``thought`` for what a model thinks before its answer.

    Args:
        opening: Mark before it.
        end: Mark after it.
        begun: Whether the prompt begins it; None where there is none.
    """
    section = {True: "section gap", False: f"({json.dumps(opening)} section gap)?", None: ""}[begun]
    lines = f"section[suffix={json.dumps(end)}]: /(?s:.*)/", r"gap: /\s{0,8}/"
    return [f"thought: {section}", *lines]


class Matcher:
    """Position of a text in its grammar.

    Args:
        state: Its parser.
    """

    def __init__(self, state: "llguidance.LLMatcher") -> None:
        self.state = state

    def copy(self) -> "Matcher":
        """The same position, of a text of its own."""
        return Matcher(self.state.deep_copy())

    def after(self, tokens: Sequence[int]) -> "Matcher":
        """The position after some tokens that can follow: itself where there are none, else a copy."""
        if not tokens:
            return self
        later = self.copy()
        for token in tokens:
            later.accept(token)
        return later

    def allowed(self, tokens: list[int]) -> list[int]:
        """The first of some tokens, as many as can follow each other."""
        return tokens[: self.state.validate_tokens(tokens)]

    @property
    def complete(self) -> bool:
        """Whether the text is whole and cannot go on."""
        return self.state.is_stopped()

    def accept(self, token: int) -> None:
        """Moves on by a token.

        Raises:
            RunError: it cannot follow, or the grammar is too complex for its parser.
        """
        self.state.consume_token(token)
        self.check()

    def check(self) -> None:
        """Raises where the parser has failed; errors as :meth:`accept`."""
        if self.state.is_error():
            raise RunError(f"the answer's grammar failed: {_short(self.state.get_error())}")


class Grammars:
    """Grammars over the tokens of a model, compiled when they are first needed.

    Args:
        tokenizer: Of the model.
        vocab: Tokens that it has logits for.
        ends: Ids that end a text, which they do only where it is whole.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Collection[int]) -> None:
        self._tokenizer, self.vocab, self._ends = tokenizer, vocab, sorted(ends)
        self._lock = threading.Lock()
        self._tokens: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()

    def compiled(self, grammar: str) -> Matcher:
        """The beginning of a text that follows a grammar, to be copied; from any thread, and slow for a new one.

        Args:
            grammar: Of :func:`grammar_text`.

        Raises:
            OptionError: it cannot be followed, with the keyword or the place.
        """
        with extra("a schema for the answer", "serve"):
            import llguidance
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
            if self._tokens is None:
                self._tokens = self._read_tokens()
        try:
            state = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
        except ValueError as error:
            raise OptionError(_refusal(str(error))) from error
        if state.is_error():
            raise OptionError(_refusal(state.get_error()))
        with self._lock:
            matcher = self._compiled[grammar] = Matcher(state)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _read_tokens(self) -> "llguidance.LLTokenizer":
        import llguidance

        words, known = vocabulary_of(self._tokenizer), min(self._tokenizer.vocab_size, self.vocab)
        contents = words.contents(range(known)) + [b""] * (self.vocab - known)
        ends = [end for end in self._ends if end < self.vocab]
        if (
            not ends
        ):  # One that the model has no logit for, so that a text ends by its grammar alone.
            ends = [len(contents)]
            contents.append(b"")
        for end in ends:
            contents[end] = b""
        silent = [index for index, content in enumerate(contents) if not content]
        # llguidance keeps tokens without a text apart by their names.
        listed = [content or b"\xff<[%d]>" % index for index, content in enumerate(contents)]
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_ListedTokens(listed, silent, ends[0], self._tokenizer)),
            eos_token=ends,
        )


class _ListedTokens:
    """Tokens as llguidance reads them."""

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], end: int, tokenizer: Tokenizer
    ) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = end, None
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text)


@lru_cache(maxsize=1)
def _executor() -> "llguidance.LLExecutor":
    import llguidance

    return llguidance.LLExecutor()


def fill_masks(matchers: Sequence[tuple[Matcher, int]], masks: "np.ndarray") -> None:
    """Writes which tokens can follow, one bit a token and the first in the lowest.

    Args:
        matchers: Texts, each with its row.
        masks: uint32[rows, words], contiguous.
    """
    rows, words = masks.shape
    if min(len(matchers), len(os.sched_getaffinity(0))) >= MANY:
        states = [(matcher.state, row) for matcher, row in matchers]
        _executor().unsafe_compute_mask_ptr(states, masks.ctypes.data, words * 4, rows)
        return
    for matcher, row in matchers:
        matcher.state.unsafe_compute_mask_ptr(masks[row].ctypes.data, words * 4)


def _refusal(reason: str) -> str:
    """One line on why a grammar cannot be followed."""
    if keys := _UNIMPLEMENTED.search(reason):
        names = ", ".join(key.strip().strip('"') for key in keys[1].split(","))
        return f"the schema has {names}, which cannot be followed; leave it out"
    if reason.startswith("oneOf"):
        return "the schema has oneOf with alternatives that may hold at once, which cannot be followed; use anyOf"
    return f"it cannot be followed: {_short(reason)}"


def _short(reason: object) -> str:
    # After what is wrong come lines that point at it.
    whole = str(reason).rpartition("error: ")[2]
    text = " ".join(_POINTER.split(whole)[0].split())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """Sign to byte of byte-level vocabularies (openai/gpt-2, encoder.py: bytes_to_unicode)."""
    visible = {chr(byte): byte for byte in _VISIBLE}
    others = [byte for byte in range(256) if byte not in visible.values()]
    return visible | {chr(256 + number): byte for number, byte in enumerate(others)}


class Vocabulary:
    """Text and bytes of single tokens.

    Args:
        tokenizer: Of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}
        mark = tokenizer.encode("a")
        self._mark = mark[-1:]
        self._before = tokenizer.decode(self._mark)
        # A space that is written as this sign tells byte-level vocabularies from all others.
        probe = tokenizer.encode(" a")
        self._byte_level = bool(probe) and tokenizer.token(probe[0]).startswith("\u0120")

    def text(self, index: int) -> str:
        """The text of a token; of one that is no whole character ``bytes:\\xe2\\x80``, as OpenAI writes it."""
        return self._both(index)[0]

    def raw(self, index: int) -> list[int]:
        """The bytes of a token; of one without a text those of its name."""
        return self._both(index)[1]

    def contents(self, ids: Sequence[int]) -> list[bytes]:
        """Bytes that each of some tokens adds to a text: none if it is special, or no token."""
        if self._tokenizer.path is None:
            return [bytes([index]) if index < 256 else b"" for index in ids]
        texts = self._tokenizer.decode_all([[*self._mark, index] for index in ids])
        added = [text[len(self._before) :] for text in texts]
        return [
            bytes(self.raw(index)) if "\ufffd" in text else text.encode()
            for index, text in zip(ids, added, strict=True)
        ]

    def _both(self, index: int) -> tuple[str, list[int]]:
        text_and_bytes = self._known.get(index)
        if text_and_bytes is None:
            text_and_bytes = self._known[index] = self._read(index)
        return text_and_bytes

    def _read(self, index: int) -> tuple[str, list[int]]:
        if self._tokenizer.path is None:
            raw = bytes([index]) if index < 256 else b""
            return _as_text(raw) if raw else self._tokenizer.token(index), list(raw)
        # After another token, since some tokenizers drop the space before a text.
        text = self._tokenizer.decode([*self._mark, index])[len(self._before) :]
        if "\ufffd" not in text:
            text = text or self._tokenizer.token(index)
            return text, list(text.encode())
        piece = self._tokenizer.token(index)
        if len(piece) == 6 and piece.startswith("<0x"):
            raw = bytes([int(piece[3:5], 16)])
        elif self._byte_level:
            raw = bytes(_byte_of()[sign] for sign in piece if sign in _byte_of())
        else:
            raw = text.encode()
        return _as_text(raw), list(raw)


def _as_text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@lru_cache(maxsize=8)
def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer, kept."""
    return Vocabulary(tokenizer)
