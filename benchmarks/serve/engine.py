"""An engine under load without a server around it: tokens a second, first tokens, and what the host costs a step.

    python benchmarks/serve/engine.py --model DIR --streams 1 4 16 [--precision bf16]
    python benchmarks/serve/engine.py --streams 16 64 256 --prompt 512 --answer 256   # the shape of Llama 3.2 1B

Each of the streams asks again as soon as it is answered, greedily and without end tokens, for three rounds; the
first is not counted. ``host`` is the loop's time without waiting for the device, which runs meanwhile: scheduling,
arguments, detokenising and handing out. ``cpu`` is the process's CPU time a token, prompts included. Before the engine,
with ``--model``: ``generate``, one text after another in the same process.
"""

import argparse
import json
import random
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.serve.decode_rate import median, model
from systolic.serving.text.opening import EngineSizes, open_engine
from systolic.serving.text.request import SamplingParams, TextOutput, TextRequest
from systolic.serving.text.sequence import EngineLoad, StepFacts

ROUNDS = 3


class Log:
    """Keeps what the engine tells."""

    def __init__(self) -> None:
        self.steps: list[StepFacts] = []
        self.ended: list[TextOutput] = []

    def stepped(self, facts: StepFacts) -> None:
        self.steps.append(facts)

    def ended_request(self, facts: TextOutput) -> None:
        self.ended.append(facts)


class Watch:
    """An engine's watcher that passes facts to the log of the moment."""

    log = Log()

    def stepped(self, facts: StepFacts) -> None:
        self.log.stepped(facts)

    def ended(self, facts: TextOutput, load: EngineLoad) -> None:
        self.log.ended_request(facts)


def trained(options):
    """The model of a folder in the precision that is asked for."""
    from systolic.formats.source import open_source
    from systolic.inference.model import from_source
    from systolic.job import Precision

    return from_source(open_source(options.model), Precision(options.precision))


def generated(options):
    """Figures of ``generate``: the second text of so many tokens, its programs being compiled."""
    from systolic.job import Sampling

    trained_model, row = trained(options), {}
    for _ in range(2):
        pieces = trained_model.stream(
            "a" * options.prompt, tokens=options.answer, sampling=Sampling(temperature=0.0)
        )
        next(iter(pieces))
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in pieces:
            pass
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        row = {
            "generate tokens_per_second": (options.answer - 16) / seconds,
            "cpu_seconds": cpu / (options.answer - 16),
        }
    return row


def opened(options, watch):
    """A started engine, and the seconds until it was ready."""
    begin = time.perf_counter()
    if options.model:
        found = trained(options)
        steps, params, rest = (
            found.setup.steps,
            found.weights.params,
            found.weights.model_state,
        )
    else:
        import jax

        paged, _ = model()
        steps = paged.steps
        params, rest = jax.jit(steps.network.init)(jax.random.key(0))
    most = max(options.streams)
    sizes = EngineSizes(
        rows=most,
        context=options.prompt + options.answer + 1,
        chunk=options.chunk,
        programs=tuple(options.programs),
    )
    engine = open_engine(steps, params, rest, sizes, watch)
    engine.start()
    return engine, time.perf_counter() - begin


def load(engine, watch, streams, options):
    """Figures of so many streams."""
    draw = random.Random(0)
    vocab = engine.runner.vocab

    def one(rounds):
        for _ in range(rounds):
            tokens = [draw.randrange(vocab) for _ in range(options.prompt)]
            choice = SamplingParams(temperature=0.0)
            asked = TextRequest(
                tokens=tokens, max_tokens=options.answer, sampling=choice, ignore_ends=True
            )
            for _ in engine.submit(asked):
                pass

    def together(rounds):
        threads = [threading.Thread(target=one, args=(rounds,)) for _ in range(streams)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    together(1)
    watch.log = log = Log()
    cpu = time.process_time()
    seconds = together(ROUNDS - 1)
    cpu = time.process_time() - cpu
    host = [facts.host_seconds for facts in log.steps]
    return {
        "streams": streams,
        "output_tokens_per_second": streams * (ROUNDS - 1) * options.answer / seconds,
        "first_token_seconds": median([facts.first_token_seconds for facts in log.ended]),
        "cpu_seconds": cpu / (streams * (ROUNDS - 1) * options.answer),
        "step_seconds": median([facts.seconds for facts in log.steps]),
        "host_seconds": median(host),
        "host_share": sum(host) / sum(facts.seconds for facts in log.steps),
        "padded_share": sum(facts.padded_tokens for facts in log.steps)
        / sum(f.padded_tokens + f.decode_rows + f.prefill_tokens for f in log.steps),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--programs", type=int, nargs=3, default=[4, 2, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.model:
        print(generated(options), flush=True)
    watch = Watch()
    engine, ready = opened(options, watch)
    rows = []
    print(f"ready in {ready:.1f} s", flush=True)
    for streams in options.streams:
        rows.append(load(engine, watch, streams, options))
        print(rows[-1], flush=True)
    engine.stop()
    if options.json:
        options.json.write_text(json.dumps({"ready_seconds": ready, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
