"""Timed calls of a language model: by the programs of the server, with a clock of the test's own."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from systolic.core.errors import OptionError
from systolic.inference.latency import CallSizes
from systolic.runs.weights import Weights
from systolic.serving.text.opening import EngineSizes, plan_engine
from systolic.serving.text.timed import ServedTexts
from tests.serving.text.engine import SMALL, Small, shared
from tests.tiers import some


def call(small: Any, **sizes: int) -> ServedTexts:
    weights = Weights(step=0, params=small.params, model_state=small.rest, skipped=[])
    return ServedTexts(small.steps, lambda: weights, CallSizes(**sizes))


@pytest.mark.parametrize("rows", some([1, 3], [3]))
def test_a_call_runs_the_steps_of_the_server(rows: int) -> None:
    small = shared()
    made = call(small, rows=rows, prompt_tokens=20, output_tokens=5)
    times = accumulate([0.0, 10.0, 12.0])
    found = made.seconds(lambda: next(times))
    # The first of five tokens is the prompt's: four steps make the others.
    assert found == {"prefill": 10.0, "decode": 3.0}
    assert made.sizes() == {"rows": rows, "prompt_tokens": 20, "output_tokens": 5}
    # The programs are those of systolic serve for this model, and of its sizes the ones that it would choose.
    server = plan_engine(small.steps, EngineSizes())
    ran = made.program.split("; ")
    assert set(ran) <= {str(shape) for shape in server.buckets.shapes}
    assert str(server.buckets.shape(0, 20, 1)) in ran
    assert str(server.buckets.shape(rows, 0, 1)) in ran
    # Another call reads other prompts whole, and compiles nothing.
    before = len(made._runner.programs.read)
    times = accumulate([0.0, 1.0, 1.0])
    made.seconds(lambda: next(times))
    assert len(made._runner.programs.read) == before


def test_texts_beyond_the_model_are_refused() -> None:
    small = Small(replace(SMALL, learned_positions=32))
    with pytest.raises(OptionError, match="--prompt-tokens 30 and --output-tokens 5 are more than"):
        call(small, rows=1, prompt_tokens=30, output_tokens=5)
