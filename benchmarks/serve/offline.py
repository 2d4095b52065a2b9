"""A file of requests by ``systolic batch`` against one request after the other, with the same model and programs.

    python benchmarks/serve/offline.py DIR --lines 64 --rows 16

The lines ask for greedy answers to prompts of different lengths. Opening and compiling are not in the seconds.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import systolic

WORDS = [
    "what",
    "is",
    "the",
    "capital",
    "of",
    "a",
    "river",
    "that",
    "runs",
    "through",
    "many",
    "old",
    "towns",
    "and",
    "their",
    "gardens",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--lines", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = []
        for _ in range(options.lines):
            prompt = " ".join(draw.choices(WORDS, k=draw.randrange(8, 120)))
            row = {"prompt": prompt, "max_tokens": options.tokens, "temperature": 0}
            rows.append(json.dumps({**row, "ignore_eos": True}))
        (folder / "in.jsonl").write_text("\n".join(rows))
        found = {}
        for in_flight in (1, 0):
            done = systolic.batch(
                options.model,
                folder / "in.jsonl",
                folder / f"out{in_flight}.jsonl",
                rows=options.rows,
                context=1024,
                in_flight=in_flight,
            )
            if done.stopped:
                sys.exit("interrupted: nothing to compare")
            found["one by one" if in_flight else "batch"] = {
                "failed": done.failed,
                "prompt_tokens": done.prompt_tokens,
                "completion_tokens": done.completion_tokens,
                "seconds": round(done.seconds, 2),
                "completion_tokens_per_second": round(done.completion_tokens / done.seconds, 1),
            }
    single, batch = found["one by one"]["seconds"], found["batch"]["seconds"]
    print(json.dumps({**found, "times": round(single / batch, 2)}, indent=1))


if __name__ == "__main__":
    main()
