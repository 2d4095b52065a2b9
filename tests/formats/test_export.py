"""Export: what came from transformers goes home bit for bit, and what was trained here opens there."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import systolic
from systolic.cli.main import main
from systolic.core.errors import OptionError
from systolic.formats.comparison import compare, of_text, outputs_of
from systolic.formats.hugging_face.reader import reference
from systolic.formats.hugging_face.writer import config_of, outgoing_model
from systolic.formats.source import open_source
from systolic.job import Model
from systolic.models.decoder.config import Decoder, Dispatch, Mlp, NormKind
from systolic.models.decoder.options import Mup
from systolic.models.vision.config import CNN
from tests.formats import folders
from tests.formats.gguf.test_gguf import KINDS, write
from tests.models.families import test_image_families as image_families
from tests.steps import tiny
from tests.tiers import some

SMALL = ["--steps", "2", "--sequence", "32", "--batch", "2", "--model.layers", "2"]
SIZES = [
    "--model.d-model",
    "32",
    "--model.d-ff",
    "64",
    "--model.heads",
    "2",
    "--model.head-dim",
    "16",
]


def held(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder."""
    found: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def other(name: str) -> Any:
    """A small model of another family of transformers."""
    shared = {"vocab_size": 304, "hidden_size": 32, "intermediate_size": 48}
    shared |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    decoders = {**shared, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    if name in image_families.CASES:
        return image_families.made(*image_families.CASES[name])
    if name == "bert":
        config = transformers.BertConfig(**shared, max_position_embeddings=64)
        return transformers.BertForMaskedLM(config)
    if name == "vit":
        own = {k: v for k, v in shared.items() if k != "vocab_size"}
        return transformers.ViTForImageClassification(
            transformers.ViTConfig(**own, image_size=16, patch_size=4, num_labels=5)
        )
    if name == "mixtral":
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**decoders, num_local_experts=4, num_experts_per_tok=2)
        )
    return folders.llama(tie_word_embeddings=True)


@pytest.mark.parametrize(
    "name",
    some(
        ["llama", "mixtral", "bert", "vit", "resnet-basic", "mobilenet-torch"],
        ("llama", "bert", "resnet-basic"),
    ),
)
def test_a_family_comes_home_bit_for_bit(tmp_path: Path, name: str) -> None:
    model = other(name)
    model.save_pretrained(tmp_path / "theirs")
    if name in ("llama", "mixtral"):
        folders.tokenizer().save_pretrained(tmp_path / "theirs")
    systolic.import_model(tmp_path / "theirs", tmp_path / "bundle", parity=False)
    made = systolic.export(tmp_path / "bundle", tmp_path / "home")
    theirs, home = held(tmp_path / "theirs"), held(tmp_path / "home")
    assert set(home) <= set(theirs)  # tied and derived tensors are left out
    for tensor, array in home.items():
        np.testing.assert_array_equal(array, theirs[tensor])
    assert made.parameters == sum(array.size for array in home.values())
    config = json.loads((tmp_path / "home" / "config.json").read_text())
    assert config == json.loads((tmp_path / "theirs" / "config.json").read_text())
    _, told = type(model).from_pretrained(tmp_path / "home", output_loading_info=True)
    assert not told["unexpected_keys"]
    assert not told["missing_keys"]


def test_a_bundle_whose_layers_are_read_one_by_one_comes_home(tmp_path: Path) -> None:
    # A layer's matrices of 1 MiB and more, as real models have.
    model = folders.llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=2)
    folders.tokenizer().save_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "theirs")
    systolic.import_model(tmp_path / "theirs", tmp_path / "bundle", parity=False)
    source = open_source(tmp_path / "bundle")
    assert max(len(list(source.pieces(path))) for path in source.dtypes()) == 2
    systolic.export(tmp_path / "bundle", tmp_path / "home")
    theirs, home = held(tmp_path / "theirs"), held(tmp_path / "home")
    assert set(home) == set(theirs)
    for tensor, array in home.items():
        np.testing.assert_array_equal(array, theirs[tensor])


def test_a_shard_each_and_one_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.folder(tmp_path / "theirs", dtype=torch.bfloat16)
    monkeypatch.setattr("systolic.runs.bundle.folder.shards_of.__defaults__", (20_000,))
    systolic.export(folder, tmp_path / "home")
    assert len(list((tmp_path / "home").glob("model-*.safetensors"))) > 1
    rows = np.arange(20, dtype=np.int32).reshape(2, 10)
    expected = folders.logits(folder, rows)
    np.testing.assert_array_equal(folders.logits(tmp_path / "home", rows), expected)


@pytest.mark.slow
def test_what_was_trained_here_opens_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = folders.folder(tmp_path / "words")
    text = tmp_path / "text.txt"
    text.write_text("the capital of France is Paris\n" * 200)
    words = ["--path", str(text), "--tokenizer", str(tokenizer / "tokenizer.json")]
    run = tmp_path / "run"
    options = [*SMALL, *SIZES, "--model.kv-heads", "1", "--model.norm-eps", "1e-4", *words]
    assert main(["train", "lm", *options, "--run", str(run), "--json"]) == 0
    capfd.readouterr()
    assert main(["export", str(run), "--out", str(tmp_path / "home"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["model_type"] == "llama"
    rows = np.random.default_rng(0).integers(0, 300, (2, 24)).astype(np.int32)
    # In a second process, as a user of transformers opens it.
    probe = of_text(rows)
    theirs, framework, _ = reference(open_source(tmp_path / "home"), probe)
    model = systolic.open(run)
    ours = outputs_of(model.setup.steps, model.weights, probe.ours)
    found = compare(ours, theirs, framework, 1e-4)
    assert found.passed, found.line()
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "home")("the capital")["input_ids"]
    assert ids == model.job.data.get_tokenizer().encode("the capital")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Decoder(tie_embeddings=False, vocab=256), "model.embedding-scale is 27.7"),
        (Decoder(mlp=Mlp.relu, vocab=256), "model.mlp is relu, not"),
        (Decoder(ngrams=2, vocab=256), "model.ngrams is 2, not 0"),
        (
            Decoder(experts=4, vocab=256, embedding_scale=1.0),
            "model.capacity-factor is 1.25, which leaves tokens without a slot out",
        ),
        (CNN(), "no family of transformers computes this CNN"),
    ],
)
def test_what_transformers_can_not_say_is_named(model: Model, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        outgoing_model(model, {}, {})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"capacity_factor": 0.0}, {"dispatch": Dispatch.dropless}])
def test_a_mixture_that_drops_no_token_has_a_family(changes: dict[str, Any]) -> None:
    assert config_of(Decoder(experts=4, vocab=256, **changes), {})["model_type"] == "mixtral"


LARGE = {"layers": 2, "d_model": 32, "d_ff": 48, "heads": 4, "kv_heads": 2, "head_dim": 8}
GEMMA = {"norm": NormKind.rms_offset, "post_norms": True, "mlp": Mlp.geglu}
GEMMA |= {"window": 4, "global_every": 2, "embedding_scale": 32**0.5, "query_pre_attn_scalar": 8.0}
GROWN: dict[str, tuple[dict[str, Any], Mup]] = {
    "llama": ({"qkv_bias": True, "out_bias": True}, Mup(base_width=8, base_head_dim=4)),
    "qwen3": (
        {"tie_embeddings": False, "qk_norm": True},
        Mup(base_width=8, base_head_dim=4),
    ),
    "gemma2": (GEMMA, Mup(base_width=8)),
}


@pytest.mark.parametrize("kind", list(GROWN))
def test_factors_of_a_base_width_go_into_the_weights(tmp_path: Path, kind: str) -> None:
    more, mup = GROWN[kind]
    model = Decoder(vocab=64, **LARGE, mup=mup, **more)
    steps = tiny.steps(tiny.job(model=model, layout=tiny.ONE_DEVICE))
    draw, rows = np.random.default_rng(0), np.arange(24, dtype=np.int32).reshape(2, 12)
    weights = {
        path: draw.normal(0.5, 0.2, shape.shape).astype(np.float32)
        for path, shape in steps.network.params.items()
    }
    place = np.tile(np.arange(12, dtype=np.int32), (2, 1))

    def forward(params: Any, *given: Any) -> jax.Array:
        module: Any = steps.network.module(params, {}, train=False)
        return module(*given)

    ours = jax.jit(forward)(weights, rows, np.ones_like(rows), place)

    made = outgoing_model(model, weights, {})
    assert made.config["model_type"] == kind
    tensors = {spec.name: next(made.pieces(spec.name)).copy() for spec in made.specs}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(dict(made.config)))
    theirs = folders.logits(tmp_path, rows)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    # What a Bundle keeps of it makes the same folder again.
    assert config_of(model, made.config) == made.config


def test_the_gain_of_a_norm_that_adds_one_survives_bfloat16() -> None:
    """The last norm's scale lies near -1, where bfloat16 has steps of 2**-8, with a gain of about an eighth."""
    model = Decoder(vocab=64, **LARGE, mup=Mup(base_width=4), **GEMMA)
    params = tiny.steps(tiny.job(model=model, layout=tiny.ONE_DEVICE)).network.params
    draw, half = np.random.default_rng(0), jax.numpy.bfloat16
    weights = {
        path: draw.normal(0.5, 0.2, shape.shape).astype(half) for path, shape in params.items()
    }
    made = outgoing_model(model, weights, {})
    found = {
        spec.name: (spec.dtype, next(made.pieces(spec.name)).astype(np.float32))
        for spec in made.specs
    }
    dtype, written = found["model.norm.weight"]
    gain = (1 + weights["norm/scale"].astype(np.float32)) / 8
    assert dtype == np.float32
    np.testing.assert_allclose(1 + written, gain, rtol=1e-5)
    assert found["model.layers.0.input_layernorm.weight"][0] == half


def test_a_gguf_file_becomes_a_folder(tmp_path: Path) -> None:
    model = folders.llama(rms_norm_eps=1e-5)
    file = write(tmp_path / "small.gguf", model, KINDS.F32)
    systolic.export(file, tmp_path / "home")
    rows = np.arange(20, dtype=np.int32).reshape(2, 10)
    with torch.no_grad():
        expected = model(torch.tensor(rows), use_cache=False).logits.numpy()
    np.testing.assert_allclose(folders.logits(tmp_path / "home", rows), expected, atol=1e-6)
