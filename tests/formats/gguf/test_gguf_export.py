"""GGUF files written here: what comes back through our reader and through llama.cpp's own, and what is refused."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers

import systolic
from systolic.cli.main import main
from systolic.core.errors import DataError, OptionError, RunError, SystolicError, TakenError
from systolic.data.text.chat import find_template
from systolic.formats.gguf.reader import rotated, unrotated
from systolic.formats.gguf.tokenizer import merges_of, words_of
from systolic.formats.gguf.writer import GgufOptions, describe, plan, write_gguf
from systolic.formats.hugging_face.writer import differences, outgoing
from systolic.formats.source import TransformersSource, open_source
from tests.formats import folders
from tests.formats.gguf.test_gguf_gemma import LINEAR

SIZES: dict[str, Any] = {
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
HEADS = {"head_dim": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWED = {**HEADS, "query_pre_attn_scalar": 32, "sliding_window": 16, "num_hidden_layers": 6}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama with biases": ("Llama", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("Llama", {"rope_scaling": LLAMA3, "rope_theta": 500_000.0}),
    "llama linear": ("Llama", {"rope_scaling": dict(LINEAR)}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"rope_theta": 1e6}),
    "qwen3": ("Qwen3", {**HEADS, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", WINDOWED),
    "gemma3": ("Gemma3", {**WINDOWED, "rope_scaling": dict(LINEAR)}),
    "gemma3 without windows": ("Gemma3", {**WINDOWED, "layer_types": ["full_attention"] * 6}),
}
NOISE = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8}
"""Largest rounding error of a precision over the number."""


def model(name: str, **changes: Any) -> Any:
    """A small model of transformers, all of whose weights are random."""
    kind, own = KINDS[name]
    torch.manual_seed(0)
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**{**SIZES, **own, **changes})
    made = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter, value in made.named_parameters():
        torch.nn.init.normal_(value, 1.0 if "norm" in parameter else 0.0, 0.1)
    return made


def folder(path: Path, name: str, **changes: Any) -> Path:
    return folders.folder(path, model(name, **changes), start=True)


def written(source: Path, file: Path, precision: str) -> Path:
    """The model of a folder as a GGUF file, without the comparison of logits."""
    opened = open_source(source)
    made = outgoing(opened)
    described = describe(made.config, str(source))
    tensors = plan(made, described, precision)
    words = words_of(source, made.config, described.model.vocab, starts=None, source=str(source))
    write_gguf(file, described, words.fields, tensors, made.pieces, lambda _: None)
    return file


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors by transformers' names, float32."""
    opened = open_source(path)
    assert isinstance(opened, TransformersSource)
    names = {
        name for rule in opened.conversion.rules for p in rule.places() for name in rule.names(p)
    }
    return {name: opened.tensors[name].read().astype(np.float32) for name in names}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    source = folder(tmp_path / "source", name)
    file = written(source, tmp_path / "made.gguf", "f32")
    assert differences(open_source(source).model, open_source(file).config) == []
    theirs, ours = tensors(source), tensors(file)
    assert set(ours) == set(theirs)
    for tensor, array in theirs.items():
        if "gemma" in name and "norm" in tensor:
            # llama.cpp has them plus one, which rounds to half a unit in the last place of the sum.
            assert (np.abs(ours[tensor] - array) <= np.spacing(np.abs(array) + 1) / 2).all(), tensor
        else:
            np.testing.assert_array_equal(ours[tensor], array)


@pytest.mark.parametrize("precision", ["f16", "bf16", "q8_0"])
def test_a_precision_rounds_and_no_more(tmp_path: Path, precision: str) -> None:
    source = folder(tmp_path / "source", "llama")
    file = written(source, tmp_path / "made.gguf", precision)
    theirs, ours = tensors(source), tensors(file)
    for tensor, array in theirs.items():
        away = np.abs(ours[tensor] - array)
        if array.ndim == 1:
            assert not away.any(), tensor
        elif precision == "q8_0":
            # Half a step of a block's 127, and the step itself in f16.
            largest = np.abs(array.reshape(-1, 32)).max(1, keepdims=True)
            assert (away.reshape(-1, 32) <= largest * (0.5 / 127 + 2**-11)).all(), tensor
        else:
            # Numbers below f16's normal ones round to a multiple of 2^-24.
            assert (away <= np.abs(array) * NOISE[precision] + 2**-25).all(), tensor
    # As llama.cpp's own package sees it.
    found = gguf.GGUFReader(file)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in found.tensors}
    assert kinds["blk.0.ffn_up.weight"] == precision.upper()
    assert kinds["blk.1.attn_norm.weight"] == "F32"
    query = next(one for one in found.tensors if one.name == "blk.1.attn_q.weight")
    array = gguf.quants.dequantize(query.data, query.tensor_type).astype(np.float32)
    np.testing.assert_array_equal(
        unrotated(4, array), ours["model.layers.1.self_attn.q_proj.weight"]
    )


def test_rotations_are_inverse() -> None:
    rows = np.arange(2 * 8 * 3).reshape(16, 3)
    assert rotated(2, rows)[:4, 0].tolist() == [0, 12, 3, 15]
    np.testing.assert_array_equal(unrotated(2, rotated(2, rows)), rows)


def test_rows_that_no_block_divides_are_f16(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", "llama", intermediate_size=72)
    file = written(source, tmp_path / "made.gguf", "q8_0")
    kinds = {one.name: one.tensor_type.name for one in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"


def test_the_command_compares_the_file_with_its_source(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, out = folder(tmp_path / "source", "llama"), tmp_path / "out" / "small.gguf"
    words = ["export", str(source), "--to", "gguf", "--precision", "q8_0", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["architecture"], told["precision"]) == ("llama", "q8_0")
    assert told["bytes"] == out.stat().st_size
    assert told["parameters"] == sum(p.numel() for p in model("llama").parameters())
    assert 1e-4 < told["parity"]["max_relative"] < 0.05
    assert told["parity"]["passed"]
    assert list(out.parent.iterdir()) == [out]
    # What llama.cpp asks of it.
    fields = gguf.GGUFReader(out).fields
    value = {name: field.contents() for name, field in fields.items()}
    assert value["tokenizer.ggml.pre"] == "gpt-2"
    assert value["tokenizer.ggml.add_bos_token"] is True
    assert (value["tokenizer.ggml.bos_token_id"], value["tokenizer.ggml.eos_token_id"]) == (1, 0)
    assert value["tokenizer.chat_template"] == folders.TEMPLATE
    assert value["general.file_type"] == 7
    assert value["tokenizer.ggml.tokens"][-1].startswith("[PAD")


def test_a_file_in_a_wrong_order_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison sees what a converter may get wrong: rows of queries and keys as they were."""
    source = folder(tmp_path / "source", "llama")
    monkeypatch.setattr("systolic.formats.gguf.reader.rotated", lambda heads, array: array)
    with pytest.raises(RunError, match="computes something else"):
        systolic.export(source, tmp_path / "made.gguf", to="gguf")
    assert [one.name for one in tmp_path.iterdir()] == ["source"]


def pieces() -> tokenizers.Tokenizer:
    """SentencePiece's BPE as transformers converts it: bytes for what has no piece, merges of any two pieces by score."""
    from tokenizers import decoders, models, normalizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(
        folders.TEXT, trainers.BpeTrainer(vocab_size=80, special_tokens=special)
    )
    found = json.loads(made.to_str())["model"]["vocab"]
    words = sorted(set(found) - set(special), key=lambda word: found[word])
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: number for number, token in enumerate([*names, *words])}
    merges = merges_of({word: -float(number) for number, word in enumerate(words)})
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([tokenizers.AddedToken(one, normalized=False) for one in special])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    return made


def test_pieces_of_sentencepiece_come_back(tmp_path: Path) -> None:
    theirs = pieces()
    size = theirs.get_vocab_size() + 7
    model("llama", vocab_size=size).save_pretrained(tmp_path / "source")
    theirs.save(str(tmp_path / "source" / "tokenizer.json"))
    about = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps(about))
    file = written(tmp_path / "source", tmp_path / "made.gguf", "f16")
    made = tokenizers.Tokenizer.from_file(str(open_source(file).tokenizer))
    for text in (*folders.TEXT, "  two  ☂ spaces\n", "<s>x</s>"):
        assert made.encode(text).ids == theirs.encode(text).ids
        assert made.decode(made.encode(text).ids) == theirs.decode(theirs.encode(text).ids)
    found = gguf.GGUFReader(file).fields
    types = found["tokenizer.ggml.token_type"].contents()
    assert types[:4] == [2, 3, 3, 6] or types[:4] == [3, 3, 3, 6]
    assert types[-7:] == [5] * 7
    assert found["tokenizer.ggml.add_space_prefix"].contents() is True


def test_several_ends_and_a_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", "llama")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    file = written(source, tmp_path / "made.gguf", "f16")
    made = open_source(file)
    assert made.tokenizer is not None
    assert json.loads((made.tokenizer.parent / "generation_config.json").read_text()) == {
        "eos_token_id": [0, 3]
    }
    template = find_template(made.tokenizer.parent)
    assert template is not None
    assert template.text == folders.TEMPLATE


def windowed(path: Path) -> Path:
    return folder(path, "mistral", sliding_window=16)


def wordless(path: Path) -> Path:
    model("llama").save_pretrained(path)
    return path


def unigram(path: Path) -> Path:
    source = folder(path, "llama")
    raw = json.loads((source / "tokenizer.json").read_text())
    raw["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<|end|>", 0.0], ["a", -1.0]]}
    (source / "tokenizer.json").write_text(json.dumps(raw))
    return source


def strange(path: Path) -> Path:
    source = folder(path, "llama")
    raw = json.loads((source / "tokenizer.json").read_text())
    raw["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": False},
            raw["pre_tokenizer"],
        ],
    }
    (source / "tokenizer.json").write_text(json.dumps(raw))
    return source


def encoder(path: Path) -> Path:
    own = {**SIZES, "max_position_embeddings": 64}
    own.pop("num_key_value_heads")
    transformers.BertForMaskedLM(transformers.BertConfig(**own)).save_pretrained(path)
    folders.tokenizer().save_pretrained(path)
    return path


def large(path: Path) -> Path:
    made = model("llama")
    made.model.layers[1].mlp.up_proj.weight.data[3, 5] = 1e5
    return folders.folder(path, made)


def broken(path: Path) -> Path:
    made = model("llama")
    made.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    return folders.folder(path, made)


REFUSED: list[tuple[Callable[[Path], Path], type[SystolicError], str]] = [
    (windowed, OptionError, "model.window is 16"),
    (wordless, OptionError, "has no tokenizer.json"),
    (unigram, OptionError, "of the kind Unigram"),
    (strange, OptionError, "splits or joins words in a way"),
    (encoder, OptionError, "is a bert, which is not written as GGUF"),
    (large, OptionError, "model.layers.1.mlp.up_proj.weight holds 100000"),
    (broken, DataError, "model.layers.1.mlp.up_proj.weight holds NaN"),
]


@pytest.mark.parametrize(
    ("make", "kind", "says"), REFUSED, ids=[one[0].__name__ for one in REFUSED]
)
def test_what_gguf_can_not_hold_is_named(
    tmp_path: Path, make: Callable[[Path], Path], kind: type[SystolicError], says: str
) -> None:
    source = make(tmp_path / "source")
    with pytest.raises(kind) as caught:
        systolic.export(source, tmp_path / "made.gguf", to="gguf", precision="f16")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == ["source"]


def test_wrong_options_are_one_line(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", "llama")
    out = tmp_path / "made.gguf"
    out.write_text("mine")
    cases: list[tuple[dict[str, Any], type[SystolicError], str]] = [
        ({"out": out, "to": "gguf"}, TakenError, "exists"),
        ({"out": tmp_path / "made", "to": "gguf"}, OptionError, "no name of a GGUF file"),
        (
            {"out": tmp_path / "home", "precision": "f16"},
            OptionError,
            "for to='gguf' and given with to='hf'",
        ),
    ]
    for given, kind, says in cases:
        with pytest.raises(kind, match=says):
            systolic.export(source, **given)
    assert out.read_text() == "mine"
    with pytest.raises(OptionError, match="'q4'"):
        GgufOptions(precision="q4")


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", "llama")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
    try:
        with pytest.raises(RunError, match=r"File too large.*nothing was left"):
            systolic.export(source, tmp_path / "made.gguf", to="gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.name for one in tmp_path.iterdir()] == ["source"]
