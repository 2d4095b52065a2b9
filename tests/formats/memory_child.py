"""Peak memory of an import and of opening a Bundle, above what the process had before; prints JSON."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import psutil

import systolic
from systolic.data.arrays import Arrays
from systolic.formats.source import open_source
from systolic.formats.weights import starting_weights
from systolic.job import Adapter, AdapterKind, Batch, Field, Job, Layout
from systolic.runs.bundle.tensors import TensorSpec, write
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget, make_mesh
from systolic.steps.tasks import LanguageModel
from tests.models.foreign import structure

WIDE, LAYERS, VOCAB = 1024, 8, 8192
"""Of the model that is measured; the first one that is imported loads code and is small."""


def peak() -> int:
    """Largest resident bytes since :func:`forget`, mapped files included."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if "VmHWM" in line))


def forget() -> int:
    """Resets the peak; the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def folder(path: Path, wide: int, vocab: int) -> None:
    """A Llama of ones in float32, as Hugging Face names its tensors."""
    path.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": wide,
        "intermediate_size": 4 * wide,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    square, up, down = (wide, wide), (4 * wide, wide), (wide, 4 * wide)
    parts = {f"self_attn.{one}_proj": square for one in "qkvo"}
    parts |= {"mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down}
    parts |= {"input_layernorm": (wide,), "post_attention_layernorm": (wide,)}
    shapes = {"model.embed_tokens.weight": (vocab, wide), "model.norm.weight": (wide,)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{n}.weight": s for n, s in parts.items()}
    f32 = np.dtype(np.float32)
    planned = [TensorSpec(name=name, shape=shape, dtype=f32) for name, shape in shapes.items()]
    with (path / "model.safetensors").open("wb") as out:
        write(out, planned, (np.ones(t.shape, f32) for t in planned), {"format": "pt"})


def packed(path: Path) -> dict[str, int]:
    """Bytes of the weights that QLoRA begins with, and the peak of reading them."""
    model = open_source(path).model
    fields = {
        name: Field(shape=(16,), dtype="int32", axes=("sequence",))
        for name in ("tokens", "targets", "segments", "positions")
    }
    layout = Layout(data=1, fsdp=1)
    job = Job(
        name="tiny",
        model=model,
        task=LanguageModel(),
        data=Arrays.call(dict, fields=fields),
        steps=1,
        batch=Batch(total=1),
        layout=layout,
        start=path,
        adapter=Adapter(kind=AdapterKind.qlora, rank=1, alpha=1.0),
    )
    mesh = make_mesh(layout, jax.devices()[:1])
    target = MeshTarget(platform="cpu", layout=layout, dtype="float32", mesh=mesh)
    steps = StepFunctions(job, target)
    _ = steps.abstract_state
    before = forget()
    weights, _ = starting_weights(path, steps)
    above = peak() - before
    # uint4 takes a byte on a CPU.
    return {"size": sum(array.nbytes for array in weights.model_state.values()), "above": above}


def main() -> None:
    """Imports, opens and reads for QLoRA."""
    root = Path(sys.argv[1])
    folder(root / "tiny", 64, 64)
    systolic.import_model(root / "tiny", root / "first", parity=False)
    folder(root / "small", WIDE, VOCAB)
    source = open_source(root / "small")
    shapes = structure(source.model).params
    before = forget()
    systolic.import_model(root / "small", root / "bundle", parity=False)
    import_above = peak() - before
    bundle = open_source(root / "bundle")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=one) for p, s in shapes.items()}
    before = forget()
    arrays = bundle.arrays(like)
    open_above = peak() - before
    packed(root / "tiny")
    told = {
        "packed_folder": packed(root / "small"),
        "packed_bundle": packed(root / "bundle"),
        "weights": sum(array.nbytes for array in arrays.values()),
        "largest": 4 * VOCAB * WIDE,
        "matrix": 4 * 4 * WIDE * WIDE,
        "import_above": import_above,
        "open_above": open_above,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
