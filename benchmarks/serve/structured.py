"""Cost of structured output: microseconds of masks a token, and the share of a step, at 1, 16 and 64 streams.

    python benchmarks/serve/structured.py --tokenizer DIR --streams 1 16 64 [--shape small]

Texts of the same length with and without a schema by one engine, in turns; figures are medians of the turns, in time of the CPU, which a
shared machine does not stretch. ``masks`` is the time of computing masks, ``accepting`` that of moving parsers on, both in the engine's
thread, and ``share`` theirs of all that the process needs, the model's own among it. The model has random weights: its texts are no real
ones, which have fewer possible continuations. Without --tokenizer tokens are bytes.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

from systolic.data.text.documents import Prompts
from systolic.data.text.tokenizer import Tokenizer
from systolic.inference.grammar import Matcher, grammar_text, json_rule
from systolic.job import Batch, Job, Layout
from systolic.models.decoder.config import Decoder
from systolic.serving.text import runner
from systolic.serving.text.engine import Engine
from systolic.serving.text.opening import EngineSizes, open_engine
from systolic.serving.text.request import SamplingParams, TextRequest
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget
from systolic.steps.tasks import LanguageModel

ADDRESS = {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, "required": ["street", "zip"], "additionalProperties": False}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "notes": {"type": "array", "minItems": 400, "items": {"$ref": "#/$defs/person"}},
    },
    "required": ["notes"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "role": {"enum": ["owner", "member", "guest"]},
                "home": {"anyOf": [ADDRESS, {"type": "null"}]},
            },
            "required": ["name", "age", "role", "home"],
            "additionalProperties": False,
        }
    },
}
"""An answer that does not end before its number of tokens."""


class Spent:
    """Seconds and calls of a function that is replaced by a timed one."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, self.calls = 0.0, 0
        function = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.thread_time() - begin
                self.calls += 1

        setattr(owner, name, timed)

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def opened(options: argparse.Namespace) -> Engine:
    """A started engine over random weights."""
    tokenizer = Tokenizer(path=options.tokenizer)
    shape = {"layers": 2, "d_model": 64, "d_ff": 128, "heads": 2, "kv_heads": 1, "head_dim": 32}
    if options.shape == "135m":  # SmolLM2's
        shape = {"layers": 30, "d_model": 576, "d_ff": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64}  # fmt: skip
    vocab = -(-tokenizer.vocab_size // 64) * 64
    job = Job(
        name="structured",
        model=Decoder(**shape, vocab=vocab, tie_embeddings=True),
        task=LanguageModel(),
        data=Prompts(tokenizer=options.tokenizer, sequence=512),
        steps=1,
        batch=Batch(total=1),
        layout=Layout(data=1, fsdp=1),
    )
    steps = StepFunctions(job, MeshTarget.of(job, "cpu", jax.devices()[:1]))
    params, rest = jax.jit(steps.network.init)(jax.random.key(0))
    sizes = EngineSizes(rows=max(options.streams), context=512, programs=(3, 1, 1))
    engine = open_engine(steps, params, rest, sizes)
    engine.start()
    return engine


def seconds_of(engine: Engine, streams: int, tokens: int, grammar: Matcher | None) -> float:
    """Seconds of the CPU for so many texts together."""
    begin = time.process_time()
    live = [
        engine.submit(
            TextRequest(
                tokens=[65, 66, 67],
                max_tokens=tokens,
                sampling=SamplingParams(seed=number),
                ignore_ends=True,
                grammar=grammar,
            )
        )
        for number in range(streams)
    ]
    total = sum(list(stream)[-1].completion_tokens for stream in live)
    assert total == streams * tokens, (total, streams, tokens)
    return time.process_time() - begin


def measured(
    engine: Engine, streams: int, options: argparse.Namespace, masks: Spent, accepting: Spent
) -> dict[str, Any]:
    """Figures of so many streams."""
    grammar = engine.grammars.compiled(grammar_text("start: @a", {"a": json_rule(SCHEMA)}))
    rows: list[tuple[float, float, float, float]] = []
    for turn in range(options.turns + 1):
        free = seconds_of(engine, streams, options.answer, None)
        masks.take(), accepting.take()
        bound = seconds_of(engine, streams, options.answer, grammar)
        if turn:
            rows.append((free, bound, masks.take(), accepting.take()))
    tokens = streams * options.answer
    free, bound, filled, moved = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "streams": streams,
        "masks_us_per_token": 1e6 * filled / tokens,
        "accepting_us_per_token": 1e6 * moved / tokens,
        "step_cpu_ms_free": 1e3 * free / options.answer,
        "step_cpu_ms_schema": 1e3 * bound / options.answer,
        "share": (filled + moved) / bound,
        "ratio": statistics.median(after / before for before, after, *_ in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--shape", choices=("small", "135m"), default="small")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    engine = opened(options)
    begin = time.process_time()
    engine.grammars.compiled(grammar_text("start: @a", {"a": json_rule({"type": "null"})}))
    first = time.process_time() - begin
    begin = time.process_time()
    engine.grammars.compiled(grammar_text("start: @a", {"a": json_rule(SCHEMA)}))
    schema = time.process_time() - begin
    facts = {"vocab": engine.runner.vocab, "first_grammar_s": first, "schema_ms": 1e3 * schema}
    print(json.dumps({name: round(value, 3) for name, value in facts.items()}), flush=True)
    masks, accepting = Spent(runner, "fill_masks"), Spent(Matcher, "accept")
    for streams in options.streams:
        row = measured(engine, streams, options, masks, accepting)
        print(json.dumps({name: round(value, 3) for name, value in row.items()}), flush=True)
    engine.stop()


if __name__ == "__main__":
    main()
