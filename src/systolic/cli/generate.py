"""``systolic generate RUN "prompt"``: continues a text, streamed."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from systolic.cli.output import print_json
from systolic.cli.parse import parse


def run(args: Sequence[str]) -> int:
    """The verb."""
    return parse(generate, args, "systolic generate")


def generate(
    run: Annotated[Path, tyro.conf.Positional],
    prompt: Annotated[str, tyro.conf.Positional] = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
    checkpoint: str = "best",
    trust: bool = False,
    json: bool = False,
) -> int:
    """Continues a prompt with a trained language model.

    Args:
        run: The run's directory.
        prompt: The text to continue.
        tokens: At most so many new tokens.
        temperature: 0 always takes the most likely token; larger is more varied.
        top_k: Only the k most likely tokens; 0 is all.
        top_p: Only the most likely tokens that together have this probability; 1 is all.
        seed: The same seed gives the same text.
        checkpoint: best, last or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object at the end instead of streaming.
    """
    from systolic.cli.trained import load
    from systolic.steps.decode import Sampling
    from systolic.train.generate import stream, tokenizer_of

    trained = load(run, checkpoint, trust=trust)
    tokenizer_of(trained.setup.job)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    weights = trained.weights
    pieces = []
    if not json:
        sys.stdout.write(prompt)
    start = time.perf_counter()
    for piece in stream(
        trained.setup.steps,
        weights.params,
        weights.rest,
        prompt,
        tokens=tokens,
        sampling=sampling,
        seed=seed,
    ):
        pieces.append(piece)
        if not json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    seconds = time.perf_counter() - start
    if json:
        print_json(
            {
                "run": str(run),
                "step": weights.step,
                "prompt": prompt,
                "text": "".join(pieces),
                "seconds": seconds,
            }
        )
    else:
        sys.stdout.write("\n")
    return 0
