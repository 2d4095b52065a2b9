"""Tokenizers: what goes in comes out, characters stay whole, special tokens are known."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from systolic.cli.main import main
from systolic.core.errors import DataError
from systolic.data.text.tokenizer import Tokenizer


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=30))
def test_tokenizers_round_trip_and_stream_whole_characters(text, tokenizer_file):
    for tokenizer in (Tokenizer(), Tokenizer(path=tokenizer_file.parent)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        parts = [stream.push(i) for i in ids]
        assert "".join(parts) + stream.flush() == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts)


def test_a_stream_that_continues_a_text_keeps_its_first_space(tmp_path):
    # As in Llama 2's tokenizer.json: words begin with a mark, and decoding drops the first space.
    words = [f"\u2581{word}" for word in ["The", "capital", "of", "France", "is", "Paris"]]
    vocab = {token: index for index, token in enumerate(["<unk>", *words])}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(path=tmp_path)
    ids = tokenizer.encode("The capital of France is Paris")
    for split in range(1, len(ids)):
        stream = tokenizer.stream(ids[:split])
        parts = [stream.push(i) for i in ids[split:]]
        assert "".join(parts) == "".join(f" {word[1:]}" for word in words[split:])
        assert stream.flush() == ""
    assert tokenizer.stream().push(ids[-1]) == "Paris"


def test_half_a_character_waits_and_is_marked_at_the_end(tokenizer_file):
    for tokenizer in (Tokenizer(), Tokenizer(path=tokenizer_file)):
        ids = tokenizer.encode("a\u4e2d")
        stream = tokenizer.stream()
        assert "".join(stream.push(i) for i in ids[:-1]) == "a"
        assert set(stream.flush()) == {"\ufffd"}


def test_an_empty_text_opens_with_what_starts_one_or_ended_the_last(tokenizer_file, tmp_path):
    from systolic.data.text.tokenizer import Around

    imported = Tokenizer(path=tokenizer_file, around=Around.own)
    assert imported.prompt("") == []
    assert imported.opening("") == [0]
    assert imported.opening("a") == imported.prompt("a")
    # Qwen's names no start, and its documents end with <|endoftext|>.
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"bos_token": null, "eos_token": "</s>"}')
    assert Tokenizer(path=tmp_path, around=Around.own).opening("") == [1]


def test_special_tokens_are_found_asked_for_or_configured(tokenizer_file, tmp_path):
    found = Tokenizer(path=tokenizer_file)
    assert (found.start, found.end) == (0, 1)
    assert found.documents(["a"])[0].tolist() == [0, *found.encode("a"), 1]
    asked = Tokenizer(path=tokenizer_file, eos="<s>")
    assert asked.end == 0
    with pytest.raises(DataError, match="did you mean <s>"):
        _ = Tokenizer(path=tokenizer_file, bos="<S>").start
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    config = {"bos_token": None, "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    configured = Tokenizer(path=tmp_path)
    assert (configured.start, configured.end) == (None, 1)
    assert configured.vocab_size == found.vocab_size <= 400
    assert configured.digest() == found.digest() != "bytes"
    assert (Tokenizer().start, Tokenizer().vocab_size) == (256, 257)
    broken = tmp_path / "broken.json"
    broken.write_text('{"model": {"vocab": 3, "type": "Nope"}, "added_tokens": []}')
    with pytest.raises(DataError, match=r"cannot be read as a tokenizer\.json"):
        _ = Tokenizer(path=broken).vocab_size


def test_a_tokenizer_is_trained_and_used(tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(
            "the array flows \u4e2d while pulses beat\n" * (number + 1)
        )
    out = tmp_path / "out"
    args = ["data", "tokenizer", str(text), "--out", str(out)]
    assert main([*args, "--vocab", "270", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    made = Tokenizer(path=out)
    assert record["vocab"] == made.vocab_size == 270
    # One of twenty documents is held out; what was read is all others.
    whole = {file.name: file.stat().st_size for file in text.iterdir()}
    assert record["documents"] == 19
    assert sum(whole.values()) - record["bytes"] in whole.values()
    document = "the array flows \u4e2d"
    assert made.decode(made.encode(document)) == document
    assert (
        1
        < record["bytes_per_token"]
        == pytest.approx(
            len((line := "the array flows \u4e2d while pulses beat\n").encode())
            / len(made.encode(line)),
            rel=0.1,
        )
    )
    assert made.start is not None
    assert made.end not in (None, made.start)
    assert record["next"] == f"systolic train lm --path {text} --tokenizer {out}"
    assert main(args) == 2
    assert "exists; remove it" in capsys.readouterr().err
    assert main([*args[:3], "--to", str(tmp_path / "b"), "--vocab", "257"]) == 2
    assert "--vocab is 257; it must be at least 258" in capsys.readouterr().err


def test_the_files_of_a_tokenizer_make_the_same_one_elsewhere(tokenizer_file, tmp_path):
    chosen = Tokenizer(path=tokenizer_file, bos="</s>", eos="<s>")
    for name, content in chosen.files().items():
        (tmp_path / name).write_bytes(content)
    kept = Tokenizer(path=tmp_path)
    assert (kept.start, kept.end, kept.digest()) == (chosen.start, chosen.end, chosen.digest())
    assert Tokenizer().files() == {}


def test_a_file_that_was_replaced_is_another_tokenizer(tmp_path):
    def write(*words):
        vocab = {word: index for index, word in enumerate(["<unk>", *words])}
        made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.save(str(tmp_path / "new.json"))
        (tmp_path / "new.json").replace(tmp_path / "tokenizer.json")

    write("sea", "ship")
    first, late = Tokenizer(path=tmp_path), Tokenizer(path=tmp_path, eos="ship")
    assert first.encode("ship sea") == [2, 1]
    write("ship", "sea")
    assert Tokenizer(path=tmp_path).encode("ship sea") == [1, 2]
    # Who holds the old one goes on with it; who has not read it yet gets no other.
    assert first.encode("ship sea") == [2, 1]
    with pytest.raises(DataError, match="has changed since it was opened"):
        late.encode("ship")


BYTE = ("GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "RobertaTokenizer")
SPACED = (
    "hello world",
    " hello",
    "a\n b<s> c</s>d",
    "",
    "x <|end|> y<|end|>z [TOOL] ",
    "<PAD><|im|>",
)


def _trained(kind: str) -> tokenizers.Tokenizer:
    """A small tokenizer of a kind, with its own special tokens."""
    bpe = tokenizers.models.BPE
    made = tokenizers.Tokenizer(bpe() if kind == "bytes" else bpe(unk_token="<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    elif kind == "pieces":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        space = normalizers.Replace(" ", "▁")
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], initial_alphabet=alphabet
    )
    made.train_from_iterator(["hello there a b c d x y z world"] * 9, trainer)
    return made


LISTED = {
    "0": {"content": "<s>", "special": True, "normalized": False},
    "1": {"content": "</s>", "special": True, "normalized": False, "rstrip": True},
    "300": {"content": "<|end|>", "special": True, "normalized": False, "lstrip": True},
    "301": {"content": "[TOOL]", "special": False, "normalized": False},
}


@pytest.mark.parametrize(
    ("kind", "config", "beside"),
    [
        ("bytes", {"added_tokens_decoder": LISTED, "eos_token": "<|end|>"}, {}),
        ("bytes", {"eos_token": "<|end|>", "pad_token": "<PAD>"}, {}),
        ("bytes", {"eos_token": {"content": "<|end|>", "rstrip": True, "lstrip": False, "normalized": False, "single_word": False, "__type": "AddedToken"}}, {}),
        ("bytes", {"eos_token": "<|end|>"}, {"added_tokens.json": {"[TOOL]": 301, "<|end|>": 300}}),
        ("bytes", {"additional_special_tokens": ["<|end|>", "<|im|>"]}, {}),
        ("bytes", {"extra_special_tokens": ["<|end|>", "<|im|>"], "additional_special_tokens": ["<no>"]}, {}),
        ("bytes", {"extra_special_tokens": {"image_token": "<|im|>"}, "tool_token": "[TOOL]"}, {}),
        ("bytes", {}, {"special_tokens_map.json": {"eos_token": "<|end|>", "additional_special_tokens": ["<|im|>"]}}),
        ("pieces", {"added_tokens_decoder": LISTED, "eos_token": "<|end|>"}, {}),
        ("prepended", {"eos_token": "<|end|>"}, {"added_tokens.json": {"<|end|>": 300}}),
        *[("bytes", {"tokenizer_class": name, "add_prefix_space": given}, {}) for name in (*BYTE, "PreTrainedTokenizerFast") for given in (False, True)],
        ("bytes", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": True}, {}),
        *[
            (kind, {"tokenizer_class": name, "add_prefix_space": given, "legacy": legacy}, {})
            for kind in ("pieces", "prepended")
            for name in ("LlamaTokenizer", "LlamaTokenizerFast")
            for given in (False, True)
            for legacy in (False, True)
        ],
        ("pieces", {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False}, {}),
        ("bytes", {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}, {}),
        ("bytes", {"clean_up_tokenization_spaces": True}, {}),
    ],
)  # fmt: skip
def test_files_beside_a_tokenizer_are_followed_as_by_transformers(
    kind: str, config: dict[str, Any], beside: dict[str, Any], tmp_path: Path
) -> None:
    _trained(kind).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in beside.items():
        (tmp_path / name).write_text(json.dumps(content))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(path=tmp_path)
    classes = "tokenizer_class" in config
    # Classes of transformers have names of tokens, and of Qwen words, of their own beside what the files say.
    for text in SPACED[:2] if classes else SPACED:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert [ours.token(one) for one in ids] == theirs.convert_ids_to_tokens(ids)
    if theirs.eos_token_id is not None and not classes:
        assert ours.end == theirs.eos_token_id
    assert classes or ours.vocab_size == len(theirs)
    # What a run keeps of it is the same tokenizer.
    kept = tmp_path / "kept"
    kept.mkdir()
    for name, content in ours.files().items():
        (kept / name).write_bytes(content)
    again = Tokenizer(path=kept)
    assert again.digest() == ours.digest()
    assert [again.encode(text) for text in SPACED] == [ours.encode(text) for text in SPACED]


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {"content": "<a>"}}},
        {"added_tokens_decoder": {"5": "<a>"}},
        {"added_tokens_decoder": {"5": {"special": True}}},
        {"added_tokens_decoder": [1]},
    ],
)
def test_damaged_lists_of_tokens_are_one_line(config: dict[str, Any], tmp_path: Path) -> None:
    _trained("bytes").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="added_tokens_decoder") as caught:
        Tokenizer(path=tmp_path).encode("a")
    assert "\n" not in str(caught.value)
