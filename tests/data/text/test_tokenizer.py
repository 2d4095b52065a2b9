"""Tokenizers: what goes in comes out, characters stay whole, special tokens are known."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

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
