"""Writes text under layouts on 8 virtual devices; prints one JSON object a layout."""

import json
import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from systolic.job import ExpertAxis, Layout, Sampling, Served
from systolic.models.decoder.config import Dispatch
from systolic.steps.decode import Decode
from systolic.steps.programs import jit_decode, jit_prefill, jit_weights
from systolic.steps.step_functions import StepFunctions
from tests.steps import tiny
from tests.steps.layouts_child import EXPERTS, GPT2, LATENT

DENSE = replace(tiny.MODEL, layers=2)
MIXTURE = replace(EXPERTS, layers=2, capacity_factor=0)
DROPLESS = replace(EXPERTS, layers=2, dispatch=Dispatch.dropless)
LATENTS = replace(LATENT, capacity_factor=0)
LAYOUTS = {
    "a row for all": (DENSE, Layout(data=4, fsdp=1, tensor=2), 1),
    "data-expert-tensor": (MIXTURE, Layout(data=2, fsdp=1, expert=2, tensor=2), 8),
    "few rows over experts": (DROPLESS, Layout(data=1, fsdp=1, expert=4, tensor=2), 2),
    "rows over experts": (DROPLESS, Layout(data=1, fsdp=1, expert=4, tensor=2), 8),
    "heads over experts": (DROPLESS, Layout(data=2, fsdp=1, expert=2, tensor=2), 4),
    "biased": (replace(GPT2, layers=2), Layout(data=4, fsdp=1, tensor=2), 8),
    "latents": (LATENTS, Layout(data=2, fsdp=1, expert=2, tensor=2), 8),
}
"""Model, layout and rows."""
QUICK = ("few rows over experts", "heads over experts", "latents")
"""Rows that do not divide by the devices, heads over the expert axis, and experts in slots beside dense layers."""
HEADS, WIDE = ExpertAxis.heads, ("heads over experts",)
ROWS, PROMPT, CAPACITY, TOKENS = 8, 6, 12, 5
_GATHERED = re.compile(r"= \w+\[([\d,]*)\]\S* all-gather")


def write(
    steps: StepFunctions, rows: int, served: Served
) -> tuple[list[list[int]], list[float], str]:
    """New tokens of each row, the sum of the keys of each, and the compiled decode step.

    The first rows are the same, and the weights too, however many rows there are.
    """
    decode = Decode(steps, Sampling(temperature=0.0), served)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 64, (ROWS, PROMPT))[:rows], jnp.int32)
    # The longest prompt's last tokens don't fit any more: they are dropped, not written over others.
    count = jnp.asarray(rng.integers(2, PROMPT + 1, ROWS)[:rows], jnp.int32).at[0].set(PROMPT)
    params = {
        path: rng.normal(size=shape.shape).astype(np.float32) / 4
        for path, shape in steps.network.params.items()
    }
    weights = jit_weights(decode)(params)
    rest = {path: jnp.zeros(shape.shape) for path, shape in steps.network.model_state.items()}
    state = jit_prefill(decode, rows)(
        weights, rest, tokens, count, jax.random.key(0), capacity=CAPACITY
    )
    step = jit_decode(decode, rows).lower(weights, rest, state, count=TOKENS).compile()
    state, first = step(weights, rest, state)
    state, more = step(weights, rest, state)
    text = step.as_text()
    keys = np.asarray(jnp.abs(state.cache.key).sum(axis=(0, 2, 3, 4)))
    return np.concatenate([first, more], axis=1).tolist(), keys.tolist(), text


def main(names: list[str]) -> None:
    for name in names:
        model, layout, rows = LAYOUTS[name]
        served = Served(expert_axis=HEADS) if name in WIDE else Served()
        steps = tiny.steps(tiny.job(layout=layout, model=model), 8)
        tokens, keys, text = write(steps, rows, served)
        gathered = [
            int(np.prod([int(n) for n in dims.split(",") if n])) for dims in _GATHERED.findall(text)
        ]
        print(
            json.dumps({"name": name, "tokens": tokens, "keys": keys, "gathered": gathered}),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
