"""Steps of ``systolic serve`` on an H100, forecast by XLA's GPU compiler, beside those that were timed on one.

``python benchmarks/gpu/decode.py`` needs the extra ``gpu-forecast`` and no GPU. The times are of
``benchmarks/results/2026-11-22-serve-gpu.json``: a decoder of the shape of Llama 3.2 1B, 512 tokens behind each text, the
choice of tokens and the host's gaps included, which a forecast leaves out. They are those of the program of that day.

``--kernels`` prints what the compiled steps launch, by kind: in a layer, outside of layers, bytes and forecast time; ``--graphs``
compiles each to its end as well, minutes in all, and counts the CUDA graphs that hold the launches; ``--flags`` are XLA's.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
from decode_rate import SHAPE
from records import RESULTS

from systolic.chips import slice
from systolic.chips.flags import compile_options
from systolic.compiling import Compiler, host_backend
from systolic.compiling.dump import dump_options
from systolic.compiling.gpu_compiler import compiler, flags_for
from systolic.forecasting import Forecast, forecast_program
from systolic.forecasting.command import forecast_server, source_of
from systolic.forecasting.serving.capacity import PAGE_SIZE
from systolic.forecasting.serving.forecast import Load
from systolic.forecasting.serving.layout import layout_of_requests
from systolic.forecasting.serving.server_steps import server_steps
from systolic.job import ServedCache

TIMED = RESULTS / "2026-11-22-serve-gpu.json"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": SHAPE["d_model"],
    "intermediate_size": SHAPE["d_ff"],
    "num_hidden_layers": SHAPE["layers"],
    "num_attention_heads": SHAPE["heads"],
    "num_key_value_heads": SHAPE["kv_heads"],
    "head_dim": SHAPE["head_dim"],
    "vocab_size": SHAPE["vocab"],
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


STEPS = ((1, 1), (16, 1), (64, 1), (256, 1), (1, 256), (1, 512), (1, 2048))
"""Texts of a step and tokens that it reads of each; of one text several are a part of its prompt."""
PROMPT = 512
KINDS = (
    (r"custom-call .*__cublas", "matmul of cuBLAS"),
    (r"custom-call .*__cudnn\$fmha", "attention of cuDNN"),
    (r"custom-call .*triton", "attention over pages, Pallas"),
    (r"fusion .*gemm_fusion", "matmul of Triton"),
    (r"fusion .*\"__triton\"", "norm (Triton)"),
    (r"fusion .*calls=%\S*scatter", "write into pages"),
    (r"fusion .*calls=%\S*concatenate", "fusion that concatenates"),
    (r"fusion .*kind=kInput", "fusion around a reduction"),
    (r"fusion .*kind=kLoop", "elementwise fusion"),
    (r"(copy|transpose|concatenate|slice) ", "copy"),
    (r"(sort|top-k) ", "sort"),
)
"""An opcode and its attributes to the kind of its launch; the first that matches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", action="store_true", help="launches by kind")
    parser.add_argument("--graphs", action="store_true", help="and the CUDA graphs that hold them")
    parser.add_argument("--flags", default="", help="flags of XLA's compiler, with --kernels")
    chosen = parser.parse_args()
    if compiler() is None:
        raise SystemExit(
            "the extra gpu-forecast is not installed: pip install 'systolic[gpu-forecast]'"
        )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        if chosen.kernels or chosen.graphs:
            print_kernels(folder, tuple(chosen.flags.split()), graphs=chosen.graphs)
        else:
            print_times(folder)


def print_times(folder: str) -> None:
    """The table of steps that were timed."""
    timed = json.loads(TIMED.read_text())
    server = forecast_server(folder, on="h100", prompt_tokens=PROMPT, output_tokens=128)
    steps = {step.rows: step for step in server.steps if step.tokens == 1}
    print(
        "| texts | a step timed, ms | the engine's step, prompts among them, ms | forecast, ms | error |"
    )
    print("|---|---|---|---|---|")
    engine = {row["streams"]: row["step_seconds"] for row in timed["engine"]["rows"]}
    for rows in (1, 16, 64, 256):
        seconds, own = timed["ours"][f"ours decode {rows}"]["seconds"], steps[rows].seconds
        print(
            f"| {rows} | {seconds * 1e3:.2f} | {engine[rows] * 1e3:.2f} | {own * 1e3:.2f} | {own / seconds - 1:+.1%} |"
        )


def print_kernels(folder: str, flags: tuple[str, ...], *, graphs: bool) -> None:
    """Each step's launches, and a table of them by kind."""
    for rows, tokens in STEPS:
        steps = engine_steps(folder, tokens)
        forecast = forecast_program(
            steps.program((rows, tokens)), "step", steps.on, compiler=Compiler(flags=flags)
        )
        assert forecast.step_seconds is not None
        launches = list(launches_of(forecast))
        what = f"{rows} texts" if tokens == 1 else f"{tokens} tokens of a prompt"
        held = f", {graphs_of(steps, (rows, tokens), flags)}" if graphs else ""
        print(f"\n{what}: {len(launches)} launches, {forecast.step_seconds * 1e3:.2f} ms{held}")
        print(
            f"needed at least: {needed_bytes(steps, rows, tokens) / 1e6:,.0f} MB (weights, keys and values once)"
        )
        print("\n| kind | in a layer | outside | MB | ms |\n|---|---|---|---|---|")
        count, moved, seconds = Counter(), Counter(), Counter()
        for kind, num_bytes, own in launches:
            count[kind] += 1
            moved[kind] += num_bytes
            seconds[kind] += own
        for kind, _ in seconds.most_common():
            inside, outside = divmod(count[kind], CONFIG["num_hidden_layers"])
            print(
                f"| {kind} | {inside} | {outside} | {moved[kind] / 1e6:,.0f} | {seconds[kind] * 1e3:.3f} |"
            )


def engine_steps(folder: str, tokens: int) -> Any:
    """Steps of an engine on one H100 whose prompts are as in the timed runs, or the one part that is read."""
    on, prompt = slice("h100"), PROMPT if tokens == 1 else tokens
    load = Load(prompt_tokens=prompt, output_tokens=128, chunk=prompt)
    job = source_of(folder, {}).job
    layout = layout_of_requests(job, on, load, 256, ServedCache.plain).layout
    return server_steps(replace(job, layout=layout), on, load, PAGE_SIZE, None)


def launches_of(forecast: Forecast) -> Iterator[tuple[str, float, float]]:
    """Kind, bytes and forecast seconds of each launch."""
    module, timeline, _ = forecast.schedules[0]
    lines = {each.name: f"{each.opcode} {each.rest}" for each in module.entry}
    for span, times in timeline.leaves():
        line = lines[span.name]
        kind = next((kind for mark, kind in KINDS if re.match(mark, line)), span.opcode)
        for _ in range(int(times)):
            yield kind, span.bytes, span.seconds / times


def needed_bytes(steps: Any, rows: int, tokens: int) -> int:
    """Bytes of the matrices, and of the keys and values that a step reads."""
    paged = steps.program((rows, tokens))
    weights = 2 * steps.job.model.num_parameters
    return (
        weights
        + rows
        * paged.pages
        * PAGE_SIZE
        * 2
        * 2
        * SHAPE["layers"]
        * SHAPE["kv_heads"]
        * SHAPE["head_dim"]
    )


def graphs_of(steps: Any, key: tuple[int, int], flags: tuple[str, ...]) -> str:
    """CUDA graphs of the step, compiled to its end, and the launches in them."""
    host_backend.take_as_there(steps.on, False)
    program = steps.program(key).trace(steps.on, host_backend.devices(steps.on))
    lowered = program.traced.lower(lowering_platforms=("cuda",))
    own = compile_options([*flags_for(program.facts.verb), *flags], "gpu")
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile({**own, **dump_options(Path(folder))})
        # The second, ``…_after_thunk_passes.txt``, is there only where a pass made graphs.
        dumps = sorted(Path(folder).glob("*thunk_sequence*.txt"))
        lines = dumps[-1].read_text().splitlines()
    graphs = sum("kCommandBuffer" in line for line in lines)
    inside = sum(line.startswith(" ") for line in lines)
    alone = Counter(line.split()[1] for line in lines if not line.startswith(" "))
    del alone["kCommandBuffer:"], alone["kCommandBuffer"]
    beside = ", ".join(f"{count} {kind}" for kind, count in alone.items())
    return f"{graphs} CUDA graphs with {inside} launches, beside them {beside or 'none'}"


if __name__ == "__main__":
    main()
