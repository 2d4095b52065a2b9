"""Cost of adapters side by side: CPU time of a step without any, with one that all texts have, and with four mixed.

    python benchmarks/serve/adapters.py --streams 1 4 16 [--shape 135m] [--rank 16]

Engines over the same random weights answer texts of the same length in turns; figures are medians of the turns, in time of the CPU, which a
shared machine does not stretch. ``ratio`` is against the engine without adapters, in the same turn; ``bytes`` is the share of the weights that
the matrices of adapters are. They stand beside every matrix.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import jax

from systolic.data.text.documents import Prompts
from systolic.job import Adapter, AdapterKind, Batch, Job, Layout
from systolic.models.decoder.config import Decoder
from systolic.serving.text.engine import Engine
from systolic.serving.text.opening import EngineSizes, open_engine
from systolic.serving.text.request import SamplingParams, TextRequest
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget
from systolic.steps.tasks import LanguageModel

COUNTS = (0, 1, 4)
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "d_model": 64, "d_ff": 128, "heads": 2, "kv_heads": 1, "head_dim": 32, "vocab": 320},
    "135m": {"layers": 30, "d_model": 576, "d_ff": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64, "vocab": 49_152},
}  # fmt: skip


def opened(options: argparse.Namespace, count: int) -> Engine:
    """A started engine over random weights, with adapters that change every product."""
    total = count * options.rank
    lora = Adapter(kind=AdapterKind.lora, rank=total, alpha=float(total)) if count else Adapter()
    job = Job(
        name="adapters",
        model=Decoder(**SHAPES[options.shape], tie_embeddings=True),
        task=LanguageModel(),
        data=Prompts(sequence=256),
        steps=1,
        batch=Batch(total=1),
        layout=Layout(data=1, fsdp=1),
        adapter=lora,
    )
    steps = StepFunctions(job, MeshTarget.of(job, "cpu", jax.devices()[:1]))
    params, rest = jax.jit(steps.network.init)(jax.random.key(0))
    if count:
        params = {path: 0.02 * jax.random.normal(jax.random.key(1), a.shape) for path, a in params.items()}  # fmt: skip
    sizes = EngineSizes(
        rows=max(options.streams),
        context=256,
        programs=(len(options.streams), 1, 1),
        adapters=count,
    )
    engine = open_engine(steps, params, rest, sizes)
    engine.start()
    return engine


def seconds_of(engine: Engine, streams: int, tokens: int, count: int) -> float:
    """Seconds of the CPU for so many texts together, each with the next adapter."""
    begin = time.process_time()
    live = [
        engine.submit(
            TextRequest(
                tokens=[65, 66, 67],
                max_tokens=tokens,
                sampling=SamplingParams(temperature=0.0),
                ignore_ends=True,
                adapter=1 + number % count if count else 0,
                root=bytes([1 + number % count] * 16) if count else b"",
            )
        )
        for number in range(streams)
    ]
    total = sum(list(stream)[-1].completion_tokens for stream in live)
    assert total == streams * tokens, (total, streams, tokens)
    return time.process_time() - begin


def measured(engines: dict[int, Engine], streams: int, options: argparse.Namespace) -> list[Any]:
    """A row of each engine."""
    turns = [
        {count: seconds_of(engines[count], streams, options.answer, count) for count in engines}
        for _ in range(options.turns + 1)
    ][1:]
    rows = []
    for count, engine in engines.items():
        memory = engine.memory
        rows.append(
            {
                "streams": streams,
                "adapters": count,
                "step_cpu_ms": 1e3 * statistics.median(turn[count] for turn in turns) / options.answer,
                "ratio": statistics.median(turn[count] / turn[0] for turn in turns),
                "bytes": memory.adapters_bytes / memory.weights_bytes,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    engines = {count: opened(options, count) for count in COUNTS}
    for streams in options.streams:
        for row in measured(engines, streams, options):
            print(json.dumps({name: round(value, 3) for name, value in row.items()}), flush=True)
    for engine in engines.values():
        engine.stop()


if __name__ == "__main__":
    main()
