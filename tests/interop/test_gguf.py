"""GGUF files, written by llama.cpp's own package: weights, configuration, tokenizer, and what is refused."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

import systolic
from systolic.core.errors import DataError, OptionError, SystolicError
from systolic.data.text.chat import find_template
from systolic.data.text.tokenizer import Around, Tokenizer
from systolic.interop.source import open_source
from systolic.job import Sampling
from tests.interop import folders
from tests.interop.test_source import arrays
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
) -> Path:
    """A GGUF file of a Llama of transformers and the tokenizer of :mod:`tests.interop.folders`."""
    out, config = gguf.GGUFWriter(path, arch), model.config
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
    """The tokenizer of :mod:`tests.interop.folders`."""
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
    found = ours(tokens, np.ones_like(tokens), positions)
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


def test_a_file_generates_like_the_folder_it_was_made_from(tmp_path: Path, model: Any) -> None:
    file = write(tmp_path / "small.gguf", model, KINDS.F32)
    folder = folders.folder(tmp_path / "small", model, start=True)
    for chat in (False, True):
        ask = {"tokens": 10, "sampling": Sampling(temperature=0), "chat": chat}
        assert systolic.open(file).generate("the capital", **ask) == systolic.open(folder).generate(
            "the capital", **ask
        )


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
        (tmp_path / "model.onnx", OptionError, "no maintained package turns ONNX into JAX"),
    ]
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07")
    for path, kind, says in cases:
        with pytest.raises((kind, OptionError)) as caught:
            open_source(path)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
