"""What records of served models only name: sizes of models, layouts, and why some can't be expressed."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from systolic.chips import Slice
from systolic.chips import slice as find_slice
from systolic.core.errors import SystolicError
from systolic.job import ExpertAxis, Job, Layout, Served
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.decoder.options import Router, Score
from systolic.recipes.jobs import source_of

Row = Mapping[str, Any]

NAMES = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3": "deepseek-v3",
    "3.1-70b": "llama-3.1-70b",
    "3.3-70b": "llama-3.1-70b",
    "3.1-8b": "llama-3.1-8b",
    "3.1-405b": "llama-3.1-405b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-0.6b": "qwen3-0.6b",
    "qwen3-1.7b": "qwen3-1.7b",
    "qwen3-4b": "qwen3-4b",
    "qwen3-8b": "qwen3-8b",
    "qwen3-14b": "qwen3-14b",
    "qwen3-32b": "qwen3-32b",
    "mixtral-8x7b": "mixtral-8x7b",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "gemma-3-27b": "gemma-3-27b",
}
"""Part of a record's model to the published model of the same sizes: R1 has V3's, Llama 3.3 70B those of 3.1."""
OTHERS = ("embedding", "qwen3.5", "coder")
"""Parts of names of other models that have one of NAMES in them."""
SCOUT = Decoder(
    layers=48,
    d_model=5120,
    d_ff=8192,
    heads=40,
    kv_heads=8,
    head_dim=128,
    vocab=202_240,
    tie_embeddings=False,
    experts=16,
    experts_per_token=1,
    shared_experts=1,
    dispatch=Dispatch.dropless,
    router=Router(score=Score.sigmoid, normalise=False),
    rope_theta=500_000.0,
)
"""Llama 4 Scout's text model (config.json in transformers 5.23's Llama4TextConfig): its vocabulary of 202,048 rounded up; no norms of queries
and keys, full attention in place of chunks of 8,192."""
QWEN = Decoder(
    layers=28,
    d_model=3584,
    d_ff=18944,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocab=152_064,
    tie_embeddings=False,
    rope_theta=1e6,
)
"""Qwen2.5-7B without the biases of its queries, keys and values."""
SIZES = {
    "scout": SCOUT,
    "qwen2.5-7b": QWEN,
    "qwen2.5-32b": replace(QWEN, layers=64, d_model=5120, d_ff=27648, heads=40, kv_heads=8),
}
"""Part of a record's model to the sizes of one that is no published model here."""
BOTH_AXES = {
    "deepseek": Layout(data=1, fsdp=1, expert=4, tensor=-1),
    "scout": Layout(data=1, fsdp=1, expert=-1, tensor=8),
}
"""Meshes of jax-llm-examples (main.py and ShardingRules of model.py) in the commits that print the tables, ef1a60c and 04e61d9: DeepSeek's y
has 4 devices and its z 16, Scout's 8 and 2. DeepSeek's experts lie over y and their hidden units over z, Scout's the other way round; heads lie
over both (Scout's 40 over y alone), and so does the vocabulary."""
HEADS = Served(expert_axis=ExpertAxis.heads)
"""Experts and heads over the same devices: all that records name have it so."""
CORES = re.compile(r"v7x-(\d+)")


def expressed(row: Row) -> tuple[Job, Slice, str]:
    """The job of a record under its layout, the slice, and what is known to differ.

    Raises:
        SystolicError: with the reason why the record can't be expressed.
    """
    for kind, reason in (
        ("ci_floor", "a threshold that a project asserts, not a measurement"),
        ("measured_startup", "seconds to start, not of a step"),
        ("documented_startup", "seconds to start, not of a step"),
    ):
        if row["kind"] == kind:
            raise SystolicError(reason)
    if row.get("task"):
        raise SystolicError(f"no text generation: {row['task']}")
    model = str(row["model"]).lower()
    dtype = str(row.get("dtype", ""))
    if "fp8" in dtype or "fp8" in model:
        raise SystolicError("fp8 weights can't be expressed, int8 and the compute dtype can")
    job, on = _job(model), slice_of(row)
    layout, said = _layout(row, model, job, on)
    return Job(**{**_fields(job), "layout": layout}), on, said


def slice_of(row: Row) -> Slice:
    """The slice of a record; TPU7x is counted in chips there and in cores here.

    Raises:
        SystolicError: the record names none.
    """
    text = str(row.get("slice") or "")
    if found := CORES.match(text):
        return find_slice(f"tpu7x-{2 * int(row.get('chips') or found[1])}")
    if not text:
        raise SystolicError("the record names no slice")
    return find_slice(text.split(" ")[0])


def _job(model: str) -> Job:
    for part, sizes in SIZES.items():
        if part in model:
            made = source_of("lm", {"model": sizes, "sequence": 2048}).job
            return Job(**{**_fields(made), "name": part})
    if not any(part in model for part in OTHERS):
        for part, name in NAMES.items():
            if part in model:
                return source_of(name, {}).job
    raise SystolicError(f"the sizes of {model} are not in the list of published models")


def _layout(row: Row, model: str, job: Job, on: Slice) -> tuple[Layout, str]:
    from systolic.forecasting.serving.layout import serving_layout, with_heads_for

    for part, layout in BOTH_AXES.items():
        if part in model and "jax-llm-examples" in row["system"]:
            return layout, ""
    text = str(row.get("parallelism") or "")
    tensor = re.search(r"TP\s*=?\s*(\d+)", text)
    expert = re.search(r"EP\s*=?\s*(\d+)", text)
    if tensor is None:
        return serving_layout(job, on), "layout not printed"
    ways = int(tensor[1])
    if on.num_devices % ways:
        raise SystolicError(f"{text} on {on.num_devices} devices")
    layout = Layout(data=on.num_devices // ways, fsdp=1, tensor=ways)
    if expert is not None and isinstance(job.model, Decoder) and job.model.experts > 1:
        if int(expert[1]) != ways:
            raise SystolicError(f"{text}: experts and heads over different numbers of devices")
        layout = Layout(data=on.num_devices // ways, fsdp=1, expert=ways)
    try:
        with_heads_for(job, layout, HEADS).model.check(layout)
    except SystolicError:
        return serving_layout(job, on), f"{text}: experts and heads can't share devices here"
    copies = isinstance(job.model, Decoder) and not job.model.latent and ways > job.model.kv_heads
    return layout, "key-value heads on several devices" if copies else ""


def _fields(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__dataclass_fields__}
