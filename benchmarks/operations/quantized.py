"""Work of tpu-inference's quantized matmul kernels, as its profiles name them: blocks of rows, columns and depth.

Needs the repository ``vllm-project/tpu-inference`` on PYTHONPATH (commit 3582484df was used); activations are taken to be fp8, since the
products run faster than bf16's peak.
"""

import importlib
import importlib.util
import json
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from arrays import like

from systolic.compiling.kernels import counted

_FOLDER = "tpu_inference.kernels.quantized_matmul"
_VMEM = 60 * 2**20
_NAME = re.compile(r"quantized_matmul_kernel_(\d+)_(\d+)_(\d+)")
_SHAPE = re.compile(r"\w+\[([\d,]+)\]")


def count(name: str, line: str) -> dict[str, Any] | None:
    """What a kernel's body does, by its name and its HLO line; None for another, and without the library."""
    blocks = _NAME.search(name)
    if blocks is None or importlib.util.find_spec("tpu_inference") is None:
        return None
    library = importlib.import_module(f"{_FOLDER}.blockwise_kernel")
    tuned = importlib.import_module(f"{_FOLDER}.tuned_block_sizes")
    library.get_device_vmem_limit = lambda: _VMEM
    _, x, w, scales = ([int(n) for n in dims.split(",")] for dims in _SHAPE.findall(line)[:4])
    kernel = partial(
        library.quantized_matmul_kernel,
        block_size=x[1] // scales[0],
        x_q_dtype=jnp.float8_e4m3fn,
        tuned_value=tuned.TunedValue(*map(int, blocks.groups())),
    )
    arguments = like(x, jnp.bfloat16), like(w, jnp.float4_e2m1fn), like(scales, jnp.float32)
    lowered = jax.jit(kernel).trace(*arguments).lower(lowering_platforms=("tpu",))
    text = counted(lowered.compiler_ir(dialect="hlo").as_hlo_text())
    found = re.search(r'"counted":(\{.*?\})\s*,\s*"body"', text)
    return json.loads(found[1]) if found else None
