"""A program under capture that is forked tells and answers what one with an interpreter of its own does."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from systolic.capture import capture
from systolic.chips import slice
from systolic.core.errors import RunError
from tests import forked
from tests.capture import nursery

PROGRAM = """
import os, sys
import jax, jax.numpy as jnp
print(sys.argv[1:], __name__, os.environ.get("JAX_PLATFORMS"), jax.default_backend(), jax.device_count())

@jax.jit
def step(w):
    return w - 0.01 * jnp.tanh(w @ w)

w = jnp.ones((256, 256))
for _ in range(int(sys.argv[1])):
    w = step(w)
raise ValueError("its end")
"""


@pytest.fixture(params=["0", "20"])
def told(
    request: pytest.FixtureRequest,
    program_nursery: forked.Nursery,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> list[Any]:
    """What both leave: events, answer, why there is none, what they print."""
    if not forked.NURSERY:
        pytest.skip("children are started as usual here")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), request.param, "a b"]
    both = []
    for way in ("own", "forked"):
        answer = tmp_path / way
        answer.mkdir()
        reason = ""
        try:
            if way == "own":
                capture(command, slice("v5e-8"), answer, quick=True)
            else:
                with nursery.forking(program_nursery):
                    capture(command, slice("v5e-8"), answer, quick=True)
        except RunError as error:
            reason = str(error)
        both.append([*left(answer), reason, capfd.readouterr().err.splitlines()[:1]])
    return both


def left(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Events and answer without what differs from one process to the next: its id, and seconds."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    path = folder / "answer.json"
    answer = json.loads(path.read_text()) if path.exists() else {}
    for program in answer.get("programs", ()):
        program.pop("seconds")
    return [{k: v for k, v in event.items() if k != "pid"} for event in events], answer


def test_a_forked_program_is_as_one_of_its_own(told: list[Any]) -> None:
    own, fork = told
    assert own == fork
    assert own[-1][0].startswith("['")
    assert any(event.get("stage") == "importing" for event in own[0])


def test_it_is_forked(program_nursery: forked.Nursery) -> None:
    if not forked.NURSERY:
        pytest.skip("children are started as usual here")
    command, env = [sys.executable, __file__], {**os.environ, forked.CAPTURE: "folder"}
    assert forked.nursery_of(command, env) is None
    with nursery.forking(program_nursery):
        assert forked.nursery_of(command, env) is program_nursery
        assert forked.nursery_of([sys.executable, "-c", "pass"], env) is None
        assert forked.nursery_of([sys.executable], env) is None
