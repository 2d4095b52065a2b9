"""GGUF files, written by llama.cpp's own package: weights, configuration, tokenizer, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
import torch
import transformers

import systolic
from systolic.core.errors import DataError, NotFoundError, OptionError, SystolicError
from systolic.data.text.chat import PLAIN, find_template
from systolic.data.text.documents import Prompts
from systolic.data.text.instructions import Instructions
from systolic.data.text.tokenizer import Around, Tokenizer
from systolic.formats.gguf import tokenizer as gguf_tokenizer
from systolic.formats.hugging_face.reader import impossible
from systolic.formats.jobs import job_of
from systolic.formats.outline import contents_of
from systolic.formats.source import TransformersSource, open_source
from systolic.job import Sampling
from tests.formats import folders
from tests.formats.test_source import arrays
from tests.models.foreign import relative, structure

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
FORMS = Path(__file__).parents[2] / "recorded" / "templates"
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def rotated(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order of llama.cpp's converter: neighbouring pairs instead of halves."""
    shape = (heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def write(
    path: Path,
    model: Any,
    kind: gguf.GGMLQuantizationType,
    *,
    pre: str = "gpt-2",
    arch: str = "llama",
    most: int = 0,
    **more: Any,
) -> Path:
    """A GGUF file of a Llama of transformers and the tokenizer of :mod:`tests.formats.folders`.

    Args:
        path: The file.
        model: The Llama.
        kind: How matrices are stored.
        pre: How words are split.
        arch: The architecture that it names.
        most: Tensors of a part; 0 for one file.
        more: Metadata that are written beside or in place of the others: values with their kinds.
    """
    out, config = gguf.GGUFWriter(path, arch, split_max_tensors=most), model.config
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10_000.0)
    out.add_license("mit")
    add_tokenizer(out, config.vocab_size, pre)
    for name, (value, sort) in more.items():
        out.kv_data[0].pop(name, None)
        if value is not None:
            out.add_key_value(name, value, sort)
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        theirs = WHOLE.get(name)
        if theirs is None:
            layer, _, part = (
                name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
            )
            theirs = f"blk.{layer}.{NAMES[part]}.weight"
            if part == "self_attn.q_proj":
                array = rotated(array, config.num_attention_heads)
            if part == "self_attn.k_proj":
                array = rotated(array, config.num_key_value_heads)
        if array.ndim == 1 or kind is gguf.GGMLQuantizationType.F32:
            out.add_tensor(theirs, array)
        else:
            out.add_tensor(theirs, gguf.quants.quantize(array, kind), raw_dtype=kind)
    finish(out)
    return path


def add_tokenizer(out: gguf.GGUFWriter, vocab_size: int, pre: str = "gpt-2") -> None:
    """The tokenizer of :mod:`tests.formats.folders`."""
    words = folders.tokenizer().backend_tokenizer
    vocab = words.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    tokens += [f"<|unused{i}|>" for i in range(vocab_size - len(tokens))]
    control = words.get_added_tokens_decoder()
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types([3 if i in control else 1 for i in range(len(tokens))])
    merges = __import__("json").loads(words.to_str())["model"]["merges"]
    out.add_token_merges([" ".join(pair) for pair in merges])
    out.add_bos_token_id(1)
    out.add_eos_token_id(0)
    out.add_add_bos_token(True)
    out.add_chat_template(folders.TEMPLATE)


def finish(out: gguf.GGUFWriter) -> None:
    """Writes the file."""
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture(scope="module")
def model() -> Any:
    """Widths that all quantizations divide, norms other than one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=304,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    for name, value in made.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(value, 1.0, 0.1)
    return made


KINDS = gguf.GGMLQuantizationType


@pytest.mark.parametrize(
    ("kind", "dtype"), [(KINDS.F32, "float32"), (KINDS.F16, "float16"), (KINDS.BF16, "bfloat16")]
)
def test_plain_weights_come_back(tmp_path: Path, model: Any, kind: Any, dtype: str) -> None:
    source = open_source(write(tmp_path / "small.gguf", model, kind))
    assert (source.dtype, source.licence, source.kind) == (dtype, "mit", "gguf")
    found = arrays(source, "float32")
    layer = model.model.layers[1]
    for path, theirs in (
        ("blocks/query", layer.self_attn.q_proj.weight),
        ("blocks/key", layer.self_attn.k_proj.weight),
        ("blocks/mlp/down", layer.mlp.down_proj.weight),
    ):
        expected = theirs.detach().to(getattr(torch, dtype)).float().numpy().T
        ours = np.asarray(found[path][1]).reshape(expected.shape)
        np.testing.assert_array_equal(ours, expected)
    norm = np.asarray(found["blocks/mlp_norm/scale"][1])
    np.testing.assert_array_equal(norm, layer.post_attention_layernorm.weight.detach().numpy())


@pytest.mark.usefixtures("at_once")
def test_quantized_weights_compute_what_transformers_does(tmp_path: Path, model: Any) -> None:
    file = write(tmp_path / "small.gguf", model, KINDS.Q8_0)
    made = systolic.import_model(file, tmp_path / "bundle")
    assert made.dtype == "float32"  # what they dequantize to, exactly
    assert made.parity is not None
    assert made.parity.max_relative < 1e-5
    tokens = np.random.default_rng(0).integers(0, 304, (2, 17))
    ours = structure(open_source(file).model).module(
        arrays(open_source(file), "float32"), {}, train=False
    )
    positions = np.broadcast_to(np.arange(17), tokens.shape)
    found = jax.jit(lambda *given: ours(*given))(tokens, np.ones_like(tokens), positions)
    with torch.no_grad():
        exact = model(torch.tensor(tokens), use_cache=False).logits.numpy()
    # 8 bits a weight: near the model it was made from, and not the same.
    assert 1e-4 < relative(found, exact) < 0.05


def test_the_tokenizer_is_rebuilt(tmp_path: Path, model: Any) -> None:
    source = open_source(write(tmp_path / "small.gguf", model, KINDS.F32))
    assert source.tokenizer is not None
    ours = Tokenizer(path=source.tokenizer, around=Around.own)
    theirs = folders.tokenizer(start=True)
    for text in (*folders.TEXT, "  Two  spaces, 1234 and\n\nÆther ☂<|stop|>x", ""):
        assert ours.documents([text])[0].tolist() == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text)) == theirs.decode(
            ours.encode(text), skip_special_tokens=True
        )
    template = find_template(source.tokenizer.parent)
    assert template is not None
    assert template.text == folders.TEMPLATE
    assert (ours.start, ours.end) == (1, 0)


def test_contents_are_those_of_weights_and_tokenizer(tmp_path: Path, model: Any) -> None:
    file = write(tmp_path / "small.gguf", model, KINDS.F32)
    contents = contents_of(file, "best")
    (tmp_path / "other").mkdir()
    assert contents_of(shutil.copy(file, tmp_path / "other" / "b.gguf"), "best") == contents
    words = write(tmp_path / "words.gguf", model, KINDS.F32, pre="llama-bpe")
    assert contents_of(words, "best") != contents


@pytest.mark.slow
def test_a_file_generates_like_the_folder_it_was_made_from(tmp_path: Path, model: Any) -> None:
    file = write(tmp_path / "small.gguf", model, KINDS.F32)
    folder = folders.folder(tmp_path / "small", model, start=True)
    for chat in (False, True):
        ask = {"tokens": 10, "sampling": Sampling(temperature=0), "chat": chat}
        assert systolic.open(file).generate("the capital", **ask) == systolic.open(folder).generate(
            "the capital", **ask
        )


def adapter(path: Path) -> Path:
    """What llama.cpp makes of a PEFT folder."""
    out = gguf.GGUFWriter(path, "llama")
    out.add_type("adapter")
    out.add_string(gguf.Keys.Adapter.TYPE, "lora")
    out.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 8.0)
    for name, shape in (("lora_a", (4, 64)), ("lora_b", (64, 4))):
        out.add_tensor(f"blk.0.attn_q.weight.{name}", np.zeros(shape, np.float32))
    finish(out)
    return path


def test_what_is_not_read_is_named(tmp_path: Path, model: Any) -> None:
    cut = write(tmp_path / "cut.gguf", model, KINDS.F32)
    cut.write_bytes(cut.read_bytes()[:2000])
    html = tmp_path / "page.gguf"
    html.write_text("<html>not found</html>")
    cases: list[tuple[Path, type[SystolicError], str]] = [
        (cut, DataError, "no intact GGUF file"),
        (html, DataError, "no intact GGUF file"),
        (write(tmp_path / "a.gguf", model, KINDS.F32, arch="mamba"), DataError, "mamba"),
        (write(tmp_path / "b.gguf", model, KINDS.F32, pre="klingon"), OptionError, "'klingon'"),
        (adapter(tmp_path / "c.gguf"), OptionError, "adapter of llama.cpp and no model; give the"),
        (tmp_path / "model.onnx", OptionError, "no maintained package turns ONNX into JAX"),
    ]
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07")
    for path, kind, says in cases:
        with pytest.raises((kind, OptionError)) as caught:
            open_source(path)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


V = gguf.GGUFValueType
NOTHING = 4294967295
"""-1 in 32 bits, which some converters write where there is no such token."""


def test_ids_of_no_token_are_none(tmp_path: Path, model: Any) -> None:
    names = ("padding", "unknown", "seperator", "eot", "eom", "mask")
    more = {f"tokenizer.ggml.{name}_token_id": (NOTHING, V.UINT32) for name in names}
    source = open_source(write(tmp_path / "model.gguf", model, KINDS.F32, **more))
    assert "pad_token_id" not in source.config
    assert job_of(source).data.ends == {0, 3}  # its end, and that of turns by its template
    assert source.notes == ()
    more = {"tokenizer.ggml.eos_token_id": (900, V.UINT32)}
    (note,) = open_source(write(tmp_path / "beyond.gguf", model, KINDS.F32, **more)).notes
    assert "beyond.gguf has tokenizer.ggml.eos_token_id 900 and " in note
    assert note.endswith(" tokens; it is read as a file without that token")
    more = {f"tokenizer.ggml.{name}_token_id": (NOTHING, V.UINT32) for name in ("bos", "eos")}
    source = open_source(write(tmp_path / "other.gguf", model, KINDS.F32, **more))
    assert source.tokenizer is not None
    assert Tokenizer(path=source.tokenizer.parent, around=Around.own).prompt("a")[0] != NOTHING


@pytest.mark.parametrize(
    ("name", "value", "sort"),
    [
        ("tokenizer.ggml.tokens", [1, 2], V.ARRAY),
        ("tokenizer.ggml.tokens", 7, V.UINT32),
        ("tokenizer.ggml.tokens", ["a", "b"], V.ARRAY),
        ("tokenizer.ggml.token_type", [1, 3], V.ARRAY),
        ("tokenizer.ggml.token_type", "x", V.STRING),
        ("tokenizer.ggml.merges", ["a"], V.ARRAY),
        ("tokenizer.ggml.merges", [3], V.ARRAY),
        ("tokenizer.ggml.merges", ["zz qq"], V.ARRAY),
        ("tokenizer.ggml.model", 3, V.UINT32),
        ("tokenizer.ggml.model", "llama", V.STRING),
        ("tokenizer.ggml.pre", 3, V.UINT32),
        ("general.architecture", 3, V.UINT32),
        ("general.alignment", 0, V.UINT32),
        ("general.alignment", "x", V.STRING),
        ("llama.block_count", NOTHING, V.UINT32),
        ("llama.block_count", 20_000_000, V.UINT32),
        ("llama.block_count", 0, V.UINT32),
        ("llama.block_count", "two", V.STRING),
        ("llama.block_count", None, V.UINT32),
        ("llama.attention.head_count", 0, V.UINT32),
        ("llama.attention.head_count", [4, 4], V.ARRAY),
        ("llama.attention.head_count_kv", 0, V.UINT32),
        ("llama.attention.key_length", 0, V.UINT32),
        ("llama.embedding_length", -64, V.INT32),
        ("llama.feed_forward_length", 1.5, V.FLOAT32),
        ("llama.context_length", 0, V.UINT32),
        ("llama.attention.layer_norm_rms_epsilon", "x", V.STRING),
        ("llama.rope.freq_base", "x", V.STRING),
        ("llama.rope.scaling.type", 5, V.UINT32),
    ],
)
def test_odd_metadata_are_one_line(
    name: str, value: Any, sort: Any, tmp_path: Path, model: Any
) -> None:
    path = write(tmp_path / "model.gguf", model, KINDS.F32, **{name: (value, sort)})
    with pytest.raises(SystolicError) as caught:
        open_source(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_damaged_header_is_one_line_or_a_model(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut at many lengths, and with some bytes changed."""
    content = write(tmp_path / "model.gguf", model, KINDS.F16).read_bytes()
    size = content.index(b"output.weight") + 60
    monkeypatch.setattr(
        gguf_tokenizer,
        "write_atomically",
        lambda path, text: (path.parent.mkdir(parents=True, exist_ok=True), path.write_text(text)),
    )
    path, random, refused = tmp_path / "damaged.gguf", np.random.default_rng(5), 0
    damaged = [content[:length] for length in range(0, size, 37)]
    for _ in range(250):
        made = bytearray(content)
        for place in random.integers(0, size, random.integers(1, 4)):
            made[place] = random.choice([0, 1, 255, random.integers(256)])
        damaged.append(bytes(made))
    for one in damaged:
        path.write_bytes(one)
        told = None
        try:
            job_of(open_source(path)).data.notes()
        except SystolicError as error:
            told = str(error)
        refused += told is not None
        assert told is None or ("\n" not in told and len(told) < 1000), told
    assert refused > 0.6 * len(damaged)


def test_a_split_file_is_read_whole_from_any_part(tmp_path: Path, model: Any) -> None:
    whole = open_source(write(tmp_path / "whole.gguf", model, KINDS.Q8_0))
    write(tmp_path / "parts.gguf", model, KINDS.Q8_0, most=6)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) == 4
    expected = arrays(whole, "float32")
    for part in parts:
        source = open_source(part)
        assert source.config == whole.config
        found = arrays(source, "float32")
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
    second = open_source(parts[1])
    assert isinstance(second, TransformersSource)
    assert second.weight_files == tuple(parts)
    assert second.tokenizer == whole.tokenizer
    assert "split" in str(impossible(second))
    # A part that is missing, has another name, or is of another file.
    kept = parts[2].read_bytes()
    parts[2].unlink()
    with pytest.raises(
        NotFoundError, match=r"one of 4 parts .* 1 are missing .* first parts-00003"
    ):
        open_source(parts[0])
    parts[2].write_bytes(parts[3].read_bytes())
    with pytest.raises(DataError, match="says that it is part 3"):
        open_source(parts[0])
    parts[2].write_bytes(kept[:500])
    with pytest.raises(DataError, match="no intact part"):
        open_source(parts[0])
    other = tmp_path / "renamed.gguf"
    other.write_bytes(kept)
    with pytest.raises(DataError, match=r"one of 4 parts .* give the parts their names back"):
        open_source(other)


def test_a_kind_of_numbers_that_is_not_read_is_named(tmp_path: Path, model: Any) -> None:
    path = write(tmp_path / "model.gguf", model, KINDS.F32)
    content = bytearray(path.read_bytes())
    # Name, dims, shape, kind: float32 becomes int32 of the same size.
    place = content.index(b"output.weight") + len(b"output.weight") + 4 + 16
    content[place : place + 4] = int(KINDS.I32).to_bytes(4, "little")
    path.write_bytes(bytes(content))
    with pytest.raises(OptionError, match=r"output.weight stored as I32"):
        open_source(path)


@pytest.mark.parametrize(
    ("template", "tokens", "end"),
    [
        ("llama3", ["<|begin|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], {"<|eot_id|>", "<|eom_id|>"}),
        ("chatml", ["<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"<|im_end|>"}),
        ("gemma2", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], {"<end_of_turn>"}),
        ("phi3", ["<s>", "<|endoftext|>", "<|end|>", "<|user|>"], {"<|end|>"}),
        ("exaone", ["[BOS]", "<eos>", "[|endofturn|]"], {"[|endofturn|]"}),
        # Known by the template alone.
        ("command_r", ["<s>", "<eos>", "<|START|>", "<|END|>"], {"<|END|>"}),
        # Known by its text alone: the template refuses, or there is none.
        ("", ["<s>", "<|end_of_text|>", "<|eot_id|>"], {"<|eot_id|>"}),
        # Of gpt-oss, whose channels end with <|end|> and whose answers do not.
        ("gpt_oss", ["<s>", "<|endoftext|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>"], {"<|return|>", "<|call|>"}),
    ],
)  # fmt: skip
def test_ends_of_turns_are_found_where_the_files_name_another(
    template: str, tokens: list[str], end: set[str], tmp_path: Path, model: Any
) -> None:
    """As a GGUF file and as a folder; the end that is named is the second token."""
    made = folders.tokenizer().backend_tokenizer
    vocab = made.get_vocab(with_added_tokens=True)
    words = [*sorted(vocab, key=lambda token: vocab[token])[4:], *tokens]
    words += [f"<|unused{i}|>" for i in range(304 - len(words))]
    first = words.index(tokens[0])
    text = (FORMS / f"{template}.jinja").read_text() if template else None
    control = range(first, first + len(tokens))
    more = {
        "tokenizer.ggml.tokens": (words, V.ARRAY),
        "tokenizer.ggml.token_type": ([3 if i in control else 1 for i in range(304)], V.ARRAY),
        "tokenizer.ggml.bos_token_id": (first, V.UINT32),
        "tokenizer.ggml.eos_token_id": (first + 1, V.UINT32),
        "tokenizer.chat_template": (text, V.STRING),
    }
    source = open_source(write(tmp_path / "model.gguf", model, KINDS.F32, **more))
    expected = {words.index(one) for one in (*end, tokens[1])}
    assert job_of(source).data.ends == expected
    # The same tokenizer in a folder, whose generation_config.json says as little.
    assert source.tokenizer is not None
    data = Prompts(tokenizer=source.tokenizer.parent, stops=(first + 1,))
    assert data.ends == expected
    tuned = Instructions(path=tmp_path, tokenizer=source.tokenizer.parent, template=text or PLAIN)
    assert expected <= tuned.ends
