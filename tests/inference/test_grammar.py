"""Grammars of answers over the tokens of real tokenizers: what can follow, byte for byte, and what is refused."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from systolic.core.errors import OptionError
from systolic.data.text.tokenizer import Tokenizer
from systolic.inference.grammar import (
    Grammars,
    Matcher,
    choice_rule,
    fill_masks,
    grammar_text,
    json_rule,
    regex_rule,
    written_rule,
)
from tests.data.text.test_tokenizer import _trained
from tests.serving.http.schemas import random_schema

KINDS = ("none", "bytes", "pieces", "prepended")
TEXTS = (
    "hello there",
    " a\n\n  b",
    "x€y 日本 \U0001f600",
    '{"a": [1,\t2]}',
    "ÿ\x7f\x00",
    "worldworld  z",
)


def tokenizer_of(kind: str, folder: Path) -> Tokenizer:
    if kind == "none":
        return Tokenizer()
    described = json.loads(_trained(kind).to_str())
    vocab = described["model"]["vocab"]
    more = [] if kind == "bytes" else [*map(chr, range(32, 127)), *"éöß\U0001f600\n\t"]
    if kind == "prepended":  # a token for each byte, as SentencePiece has them
        more = [f"<0x{byte:02X}>" for byte in range(256)]
        described["model"]["byte_fallback"] = True
    for piece in more:
        vocab.setdefault(piece, len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return Tokenizer(path=folder)


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return tokenizer_of(request.param, tmp_path)


def followed(grammars: Grammars, matcher: Matcher, draw: random.Random, most: int) -> Iterator[int]:
    """Tokens drawn evenly of those that can follow, up to the end."""
    for _ in range(most):
        mask = np.zeros((1, -(-grammars.vocab // 32)), np.uint32)
        fill_masks([(matcher, 0)], mask)
        bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[: grammars.vocab]
        token = int(draw.choice(bits.nonzero()[0].tolist()))
        matcher.accept(token)
        yield token
        if matcher.complete:
            return


def test_tokens_have_the_bytes_that_they_add_to_a_text(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 5, [tokenizer.end or 0])
    mark = tokenizer.encode("a")
    draw = random.Random(1)
    for text in TEXTS:
        ids = tokenizer.encode("a" + text)[len(mark) :]
        if tokenizer.decode([*mark, *ids]) == "a" + text:  # where it has tokens for all of it
            parser = grammars.compiled(grammar_text("start: @a", {"a": choice_rule([text])})).copy()
            for token in ids:
                parser.accept(token)
            assert parser.complete, text
    parser = grammars.compiled(grammar_text(r"start: /(?s:.){40}/", {})).copy()
    ids = list(followed(grammars, parser, draw, 200))
    stream = tokenizer.stream(mark)
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert len(text) == 40


def test_random_json_of_random_schemas_is_valid(tokenizer: Tokenizer) -> None:
    vocab = tokenizer.vocab_size + 3  # as a model's, rounded up
    grammars = Grammars(tokenizer, vocab, [] if tokenizer.end is None else [tokenizer.end])
    ended = 0
    for seed in range(25):
        draw = random.Random(seed)
        schema = random_schema(draw)
        text = grammar_text("start: @answer", {"answer": json_rule(schema)})
        ids = list(followed(grammars, grammars.compiled(text).copy(), draw, 3000))
        stream = tokenizer.stream(tokenizer.encode("a"))
        written = "".join(map(stream.push, ids)) + stream.flush()
        if len(ids) < 3000:
            jsonschema.validate(json.loads(written), schema)
            ended += 1
    assert ended >= 24


@pytest.mark.parametrize(
    ("rule", "fits", "fails"),
    [
        (regex_rule("a/b\\/c\n[0-9]"), ["a/b/c\n7"], ["a/b/c7", "a/b/c\n77"]),
        (choice_rule(['say "no"', "ja\\é"]), ['say "no"', "ja\\é"], ["say", "nein"]),
        (written_rule('root ::= "x" [0-9]+ ";"'), ["x12;"], ["x;"]),
        (written_rule('start: "x" INT\nINT: /[0-9]{2}/'), ["x12"], ["x1"]),
        (json_rule(True), ["[]", '{"a": null}', "3"], ["{a}", ""]),
        (json_rule({"type": "object"}), ["{}", '{\n  "a": [1]\n}'], ["{}}", "[]", '{\n\n"a":1}']),
    ],
)  # fmt: skip
def test_texts_that_a_rule_takes(rule: Any, fits: list[str], fails: list[str]) -> None:
    start = Grammars(Tokenizer(), 257, [256]).compiled(grammar_text("start: @a", {"a": rule}))
    for text in fits + fails:
        state = start.copy().state
        whole = state.try_consume_tokens(list(text.encode())) == len(text.encode())
        assert (whole and state.is_accepting()) == (text in fits), text


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "array", "uniqueItems": True}, "the schema has uniqueItems, which cannot be followed; leave it out"),
        ({"properties": {"a": {"not": {}, "if": {}}}}, "the schema has if, not, which"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "the schema has oneOf with"),
        ({"properties": {"a": {"minProperties": 2}}}, "the schema has minProperties above the number of required"),
        ({"type": "string", "format": "zip"}, "it cannot be followed: Unknown format: zip"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"$ref": "#/$defs/x"}, "Pointer '/$defs/x' does not exist"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, r"minimum (5) is greater than maximum (1)"),
        (False, "the schema is no JSON object"),
        ([], "the schema is no JSON object"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_followed_is_refused_by_its_keyword(schema: Any, said: str) -> None:
    grammars = Grammars(Tokenizer(), 257, [256])
    with pytest.raises(OptionError) as caught:
        grammars.compiled(grammar_text("start: @a", {"a": json_rule(schema)}))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_of_the_parser_are_not_the_clients() -> None:
    schema = {"not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(OptionError, match="the schema has not"):
        Grammars(Tokenizer(), 257, [256]).compiled(
            grammar_text("start: @a", {"a": json_rule(schema)})
        )
