"""Folders of Hugging Face as sources: what they hold, how their weights arrive, what is refused."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from flax import nnx
from jax.sharding import PartitionSpec

from systolic.cli.main import main
from systolic.core.errors import DataError, NotFoundError, OptionError, SystolicError
from systolic.formats.jobs import job_of
from systolic.formats.source import Source, open_source
from systolic.formats.weights import structure_of
from systolic.job import Model, Split, Stored, Target
from systolic.models.decoder.config import Decoder
from systolic.runs.bundle.tensors import read_header
from tests.formats import folders
from tests.models.foreign import relative, structure


def arrays(source: Source, dtype: str) -> dict[str, jax.Array]:
    """Weights on one device."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = structure(source.model).params
    like = {p: jax.ShapeDtypeStruct(s.shape, dtype, sharding=one) for p, s in params.items()}
    return source.arrays(like)


@pytest.mark.parametrize(("dtype", "shard"), [("float32", "5GB"), ("bfloat16", "20KB")])
def test_weights_arrive_exactly(tmp_path: Path, dtype: str, shard: str) -> None:
    model = folders.llama()
    folders.folder(tmp_path, model, dtype=getattr(torch, dtype), shard=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    source = open_source(tmp_path)
    assert source.dtype == dtype
    assert job_of(source).dtypes.parameters is (Stored.bf16 if dtype == "bfloat16" else Stored.f32)
    held = arrays(source, dtype)
    theirs = model.model.layers[2].mlp.up_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(np.asarray(held["blocks/mlp/up"][2], np.float32), theirs.T)
    tokens = np.random.default_rng(0).integers(0, 300, (2, 17))
    ours = structure(source.model).module(
        {path: array.astype("float32") for path, array in held.items()}, {}, train=False
    )
    positions = np.broadcast_to(np.arange(17), tokens.shape)
    found = ours(jax.numpy.asarray(tokens), np.ones_like(tokens), jax.numpy.asarray(positions))
    assert relative(found, folders.logits(tmp_path, tokens)) < 1e-4


def test_every_dtype_is_read_as_it_was_written(tmp_path: Path) -> None:
    wide = torch.tensor([[1.5, -2.0, 0.25], [448.0, 0.0, -0.001953125]])
    kinds = {
        "f64": torch.float64,
        "f32": torch.float32,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }
    tensors = {name: wide.to(kind) for name, kind in kinds.items()}
    whole = {"i64": torch.arange(5), "bool": torch.tensor([True, False]), "none": torch.zeros(0, 3)}
    safetensors.torch.save_file(tensors | whole, tmp_path / "x.safetensors", {"made": "by torch"})
    found, metadata = read_header(tmp_path / "x.safetensors")
    assert metadata == {"made": "by torch"}
    assert set(found) == set(tensors | whole)
    assert found["bf16"].dtype == ml_dtypes.bfloat16
    assert found["e4m3"].dtype == ml_dtypes.float8_e4m3fn
    for name, tensor in tensors.items():
        expected = tensor.to(torch.float64).numpy()
        np.testing.assert_array_equal(found[name].read().astype(np.float64), expected)
    np.testing.assert_array_equal(found["i64"].read(), np.arange(5))
    assert found["none"].read().shape == (0, 3)


def test_weights_go_straight_into_their_shards(tmp_path: Path) -> None:
    source = open_source(folders.folder(tmp_path))
    mesh = jax.make_mesh((len(jax.devices()),), ("fsdp",))
    params = structure(source.model).params
    like = {
        path: jax.ShapeDtypeStruct(
            shape.shape,
            shape.dtype,
            sharding=jax.sharding.NamedSharding(
                mesh, PartitionSpec(None, "fsdp") if path == "blocks/mlp/up" else PartitionSpec()
            ),
        )
        for path, shape in params.items()
    }
    up = source.arrays(like)["blocks/mlp/up"]
    assert up.addressable_shards[0].data.shape == (3, 32 // len(jax.devices()), 48)
    np.testing.assert_array_equal(up, arrays(source, "float32")["blocks/mlp/up"])


def test_a_decoder_brings_no_text_and_reads_others(tmp_path: Path) -> None:
    job = job_of(open_source(folders.folder(tmp_path / "plain")))
    begun = job_of(open_source(folders.folder(tmp_path / "begun", start=True)))
    assert job.data.size(Split.train) == job.data.size(Split.validation) == 0
    assert (job.data.context, job.data.fields()["tokens"].shape) == (256, (256,))
    tokenizer = job.data.get_tokenizer()
    assert tokenizer.prompt("Paris") == tokenizer.encode("Paris")
    assert tokenizer.documents(["Paris"])[0].tolist() == tokenizer.encode("Paris")
    assert begun.data.get_tokenizer().prompt("Paris") == [1, *tokenizer.encode("Paris")]
    (tmp_path / "text.txt").write_text("Paris")
    passages = begun.data.at(tmp_path / "text.txt")
    assert passages.get_tokenizer().documents(["Paris"])[0].tolist()[0] == 1


def missing(folder: Path) -> Path:
    """A folder whose weights lack one tensor."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def unknown(folder: Path) -> Path:
    """A folder with a tensor too many."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def cut(folder: Path) -> Path:
    """A folder whose copy was interrupted."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def garbled(folder: Path) -> Path:
    """A folder with an error page in place of weights."""
    (folder / "model.safetensors").write_text("<html>not found</html>")
    return folder


def pickled(folder: Path) -> Path:
    """A folder with PyTorch's weights only."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


def foreign(folder: Path) -> Path:
    """A folder of an unknown family."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llamma"}))
    return folder


def empty(folder: Path) -> Path:
    """No model."""
    return folder.parent


@pytest.mark.parametrize(
    ("damage", "kind", "says"),
    [
        (missing, DataError, "lacks 1 of 30 tensors: model.layers.1.mlp.up_proj.weight"),
        (unknown, DataError, "model.layers.0.self_attn.q_proj.bias"),
        (cut, DataError, "cut short"),
        (garbled, DataError, "safetensors file"),
        (pickled, NotFoundError, "pytorch_model.bin, which is not read"),
        (foreign, OptionError, "did you mean llama?"),
        (empty, OptionError, "config.json"),
    ],
)
def test_what_can_not_be_opened_is_named(
    tmp_path: Path, damage: object, kind: type[SystolicError], says: str
) -> None:
    path = damage(folders.folder(tmp_path / "model"))  # ty: ignore[call-non-callable]
    with pytest.raises(kind) as caught:
        open_source(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_gguf_files_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a download from a hub leaves it: the files of several precisions, and nothing else."""
    one, two = tmp_path / "model-f16.gguf", tmp_path / "model q8.gguf"
    for path, given in (
        (one, f"holds a GGUF file: give COMMAND{one}"),
        (two, f"holds GGUF files: give one, COMMAND'{two}' or {one}"),
    ):
        path.write_bytes(b"GGUF")
        for verb in ("import", "generate", "eval", "serve"):
            assert main([verb, str(tmp_path)]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            told = given.replace("COMMAND", "systolic import " if verb == "import" else "")
            assert line.startswith(f"systolic: {tmp_path} is no ")
            assert line.partition(" [")[0].endswith(f"; it {told}")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folders.folder(tmp_path, shard="20KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(NotFoundError, match=r"lacks 1 of \d+ shards, first model-00002"):
        open_source(tmp_path)


def test_a_copy_has_the_same_fingerprint(tmp_path: Path) -> None:
    one, two = (open_source(folders.folder(tmp_path / name)) for name in ("one", "two"))
    assert one.fingerprint() == two.fingerprint()
    other = folders.folder(tmp_path / "other", folders.llama(rope_theta=5e5))
    assert open_source(other).fingerprint() != one.fingerprint()


def test_layers_in_other_dtypes_make_a_stack_that_holds_both(tmp_path: Path) -> None:
    """float16 in one layer and bfloat16 in the next."""
    folder = folders.folder(tmp_path / "theirs")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        kind = torch.float16 if "layers.1" in name else torch.bfloat16
        tensors[name] = tensor.to(kind)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(folder)
    assert source.dtypes()["blocks/query"] == np.float32
    assert source.dtypes()["embedding"] == "bfloat16"
    found = np.asarray(arrays(source, "float32")["blocks/query"])
    for layer in range(3):
        theirs = tensors[f"model.layers.{layer}.self_attn.q_proj.weight"].float().numpy()
        np.testing.assert_array_equal(found[layer].reshape(theirs.T.shape), theirs.T)


class Changing(Model):
    width = 3

    def build(self, rngs: nnx.Rngs, target: Target) -> nnx.Module:
        return nnx.Linear(2, self.width, rngs=rngs)


def test_the_structure_of_a_users_model_is_that_of_today() -> None:
    model = Changing()
    assert structure_of(model).params["kernel"].shape == (2, 3)
    model.width = 5
    assert structure_of(model).params["kernel"].shape == (2, 5)
    again = [
        structure_of(Decoder(layers=1, d_model=8, heads=2, kv_heads=1, d_ff=8, vocab=9))
        for _ in range(2)
    ]
    assert again[0] is again[1]
