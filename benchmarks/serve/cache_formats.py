"""Quality of a language model over pages in each format of keys and values: ``python benchmarks/serve/cache_formats.py MODEL [TEXTS] [FORMAT ...]``.

Texts of :data:`LENGTH` tokens from the language reference that is part of Python are scored in chunks, as the server reads prompts, and
the beginning of each is continued greedily. ``agrees`` is how many of the new tokens, until the first other one, are those of plain pages.
"""

import math
import pydoc_data.topics
import sys
from pathlib import Path

from systolic.core.units import si
from systolic.inference.model import open_model
from systolic.job import ServedCache
from systolic.serving.text.opening import EngineSizes, open_engine
from systolic.serving.text.request import SamplingParams, TextRequest

LENGTH, BEGINNING, NEW = 512, 96, 32
SIZES = {"rows": 1, "context": LENGTH + 64, "chunk": 256, "programs": (1, 1, 1)}


def texts(tokenizer, count: int) -> list[list[int]]:
    """So many texts, far from each other."""
    whole = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    each = len(whole) // count
    return [
        tokenizer.encode(whole[n * each : n * each + 6 * LENGTH])[:LENGTH] for n in range(count)
    ]


def figures(model, cache: ServedCache, count: int):
    """Bytes of a page, mean loss of a token, and greedy texts."""
    weights = model.weights
    sizes = EngineSizes(**SIZES, cache=cache)
    engine = open_engine(model.setup.steps, weights.params, weights.model_state, sizes)
    engine.start()
    greedy = SamplingParams(temperature=0.0)
    losses, made = [], []
    for tokens in texts(model.setup.job.data.get_tokenizer(), count):
        scored = TextRequest(
            tokens=tokens, max_tokens=1, sampling=greedy, ignore_ends=True, prompt_logprobs=True
        )
        pieces = list(engine.submit(scored))
        losses += [-value for piece in pieces for value, _ in piece.prompt_logprobs if value]
        begin = TextRequest(
            tokens=tokens[:BEGINNING], max_tokens=NEW, sampling=greedy, ignore_ends=True
        )
        made.append([token for piece in engine.submit(begin) for token in piece.token_ids])
    engine.stop()
    return engine.memory.page_bytes, sum(losses) / len(losses), made


def agreement(found: list[int], wanted: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = list(zip(found, wanted, strict=True))
    return next((n for n, (one, other) in enumerate(pairs) if one != other), len(pairs))


def main(path: str, count: str = "4", *asked: str) -> None:
    """Prints a row for plain pages and for each format."""
    model = open_model(Path(path))
    print("| pages | bytes of a page | pages in the same memory | perplexity | lost | agrees |")
    print("|---|---|---|---|---|---|")
    first = None
    for cache in ServedCache:
        if asked and cache is not ServedCache.plain and cache.value not in asked:
            continue
        page, loss, made = figures(model, cache, int(count))
        first = first or (page, loss, made)
        same = sum(agreement(one, other) for one, other in zip(made, first[2], strict=True))
        row = f"{si(page, 'B')} | {first[0] / page:.2f} | {math.exp(loss):.4f} | {math.expm1(loss - first[1]):+.3%}"
        print(f"| {cache.value} | {row} | {same} of {NEW * len(made)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
