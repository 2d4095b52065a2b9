"""Parity of the model families with Hugging Face's transformers, on random weights.

    python benchmarks/parity.py [NAME ...] [--seeds 3] [--json FILE]

Two directions: ``in`` gives transformers' files to Systolic, ``out`` writes Systolic's config.json and weights and
gives them to transformers. Errors are differences of the outputs over the largest magnitude of transformers' float32
output; in bfloat16 both sides are compared with that too, and transformers' own error stands beside ours.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from safetensors.numpy import save_file

from systolic.models.families import CONFIG, Family, family
from tests.models.families import dense_models, test_mixtures
from tests.models.foreign import Held, converted, saved, structure

LENGTH = 48
"""Tokens of a sequence: longer than the windows, shorter than the positions."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of a family, and how either side computes its output."""

    make: Callable[[int], Any]
    """A model of transformers from a seed, in float32, with random norms and biases."""
    theirs: Callable[[Any], np.ndarray]
    """Its output, float32."""
    ours: Callable[[Any], jax.Array]
    """Output of our module."""
    load: Any = transformers.AutoModelForCausalLM
    """Class that opens a folder."""


def tokens(model_vocab: int = 120) -> np.ndarray:
    """int64[2, LENGTH]."""
    return np.random.default_rng(0).integers(0, model_vocab, (2, LENGTH))


def decoder_theirs(model: Any) -> np.ndarray:
    """Logits of a language model of transformers."""
    with torch.no_grad():
        return model(torch.tensor(tokens()), use_cache=False).logits.float().numpy()


def decoder_ours(module: Any) -> jax.Array:
    """Logits of our decoder."""
    given = jnp.asarray(tokens())
    positions = jnp.asarray(np.broadcast_to(np.arange(LENGTH), given.shape))
    graph, state = nnx.split(module)

    def run(state: Any) -> jax.Array:
        call = nnx.capture(nnx.merge(graph, state), nnx.Intermediate)
        return call(given, jnp.ones_like(given), positions)[0]

    return jax.jit(run)(state)


def decoder(kind: str, fields: dict[str, Any]) -> Case:
    """A decoder of the tests."""
    if kind == "gpt2":
        fields = {**fields, "n_positions": LENGTH}
    return Case(
        make=lambda seed: dense_models.random_model(kind, fields, seed),
        theirs=decoder_theirs,
        ours=decoder_ours,
    )


DECODERS = dense_models.CASES | test_mixtures.CASES
CASES: dict[str, Callable[[], Case]] = {
    **{name: partial(decoder, *given) for name, given in DECODERS.items()},
}
"""Name to case; a family more is a line more."""


@dataclass(frozen=True, kw_only=True)
class Error:
    """Errors of one family, direction and dtype, over the largest magnitude of the output."""

    name: str
    direction: str
    dtype: str
    maximum: float
    mean: float
    reference: float | None = None
    """Mean error of transformers in this dtype, where it is not exact."""


def error(found: Any, exact: np.ndarray) -> tuple[float, float]:
    """Maximum and mean difference over the largest magnitude of ``exact``."""
    gap = np.abs(np.asarray(found, np.float64) - exact) / np.abs(exact).max()
    return float(gap.max()), float(gap.mean())


def opened(known: Family, config: dict[str, Any], tensors: dict[str, Held], dtype: str) -> Any:
    """Our module of a file's tensors in a dtype."""
    config, tensors = known.settle(config, tensors)
    module, arrays = converted(known, config, tensors)
    if dtype == "float32":
        return module, arrays
    made = structure(known.model(config), dtype)
    params = {path: arrays[path].astype(dtype) for path in made.params}
    state = {path: arrays[path] for path in made.model_state if path in arrays}
    return made.module(params, state, train=False), arrays


def measured(name: str, case: Case, seed: int, folder: Path) -> list[Error]:
    """Both directions and dtypes of one model."""
    model = case.make(seed)
    exact = case.theirs(model).astype(np.float64)
    config, tensors = saved(model, folder / "theirs")
    known = family(config, name)
    module, arrays = opened(known, config, tensors, "float32")
    found = [Error(name=name, direction="in", dtype="float32", **both(case.ours(module), exact))]

    settled, _ = known.settle(config, tensors)
    written = known.config(known.model(settled))
    out = folder / "ours"
    out.mkdir()
    (out / CONFIG).write_text(json.dumps(written))
    there = {
        key: np.ascontiguousarray(value) for key, value in known.conversion(written).tensors(arrays)
    }
    save_file(there, out / "model.safetensors", metadata={"format": "pt"})
    again = case.load.from_pretrained(out, attn_implementation="eager").eval()
    ours = np.asarray(case.ours(module), np.float64)
    found.append(
        Error(name=name, direction="out", dtype="float32", **both(case.theirs(again), ours))
    )

    narrow, _ = opened(known, config, tensors, "bfloat16")
    reference = error(case.theirs(model.bfloat16()), exact)[1]
    sizes = both(case.ours(narrow), exact)
    found.append(Error(name=name, direction="in", dtype="bfloat16", reference=reference, **sizes))
    sizes = both(case.theirs(again.bfloat16()), np.asarray(case.ours(module), np.float64))
    found.append(Error(name=name, direction="out", dtype="bfloat16", reference=reference, **sizes))
    return found


def both(found: Any, exact: np.ndarray) -> dict[str, float]:
    """Fields of an :class:`Error`."""
    maximum, mean = error(found, exact)
    return {"maximum": maximum, "mean": mean}


def joined(errors: list[Error]) -> Error:
    """The largest maximum and the mean of the means, of several seeds."""
    references = [one.reference for one in errors if one.reference is not None]
    return Error(
        name=errors[0].name,
        direction=errors[0].direction,
        dtype=errors[0].dtype,
        maximum=max(one.maximum for one in errors),
        mean=float(np.mean([one.mean for one in errors])),
        reference=float(np.mean(references)) if references else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print("| family | direction | dtype | maximum | mean | mean of transformers |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name in given.names or CASES:
        case = CASES[name]()
        by_seed = []
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as folder:
                by_seed.append(measured(name, case, seed, Path(folder)))
        for errors in zip(*by_seed, strict=True):
            row = joined(list(errors))
            rows.append(row)
            reference = "" if row.reference is None else f"{row.reference:.1e}"
            print(
                f"| {row.name} | {row.direction} | {row.dtype} | {row.maximum:.1e} | {row.mean:.1e} | {reference} |",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
