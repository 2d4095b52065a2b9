"""A start of a small engine in a process of its own: its tokens, and what it compiled and read from the disk."""

import json
import sys
from dataclasses import replace

import jax
import jax.monitoring

from systolic.compiling.program_store import ProgramStore
from systolic.serving.facts import COMPILED
from systolic.serving.text.opening import EngineSizes, open_engine
from systolic.serving.text.request import SamplingParams, TextRequest
from tests.serving.text.engine import SMALL, Small

MODEL = replace(SMALL, layers=1, d_model=16, d_ff=16, head_dim=8)
SIZES = EngineSizes(rows=2, context=48, chunk=16, page_size=8, programs=(1, 1, 1), strict=True)


def main() -> None:
    small, compiled, lines = Small(MODEL), [], []
    made = {"kept": 0, "compiled": 0}
    store = ProgramStore(small.steps, lines.append)

    class Opening:
        def compiled(self, facts):
            made["kept" if facts.cached else "compiled"] += 1

        def ignored(self, *given):
            pass

        sized = measured = placed = ignored

    def counted(event, seconds, **more):
        if event == COMPILED:
            compiled.append(event)

    jax.block_until_ready(small.params)
    jax.monitoring.register_event_duration_secs_listener(counted)
    engine = open_engine(small.steps, small.params, small.rest, SIZES, None, Opening(), store)
    engine.start()
    greedy, drawn = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=40, seed=7),
    )
    tokens = []
    for choice, scores in ((greedy, True), (drawn, False)):
        asked = TextRequest(
            tokens=(5, 9, 2),
            max_tokens=8,
            ignore_ends=True,
            sampling=choice,
            prompt_logprobs=scores,
        )
        tokens += [token for piece in engine.submit(asked) for token in piece.token_ids]
    engine.stop()
    print(json.dumps({"tokens": tokens, "compiles": len(compiled), "lines": lines, **made}))


if __name__ == "__main__":
    sys.exit(main())
