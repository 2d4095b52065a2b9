"""What the hook wrote is read once; damage is one line, and an earlier hook's answer is read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from systolic.capture.program import ANSWER, EVENTS, CaptureEvent, joined, read_answer, read_events
from systolic.core.errors import RunError

PROGRAM: dict[str, Any] = {
    "name": "step",
    "text": "program0.txt",
    "refused": "",
    "flops": 8.0,
    "flops_are_least": False,
    "places": [[0, 0, 0, 0, 0]],
    "seconds": {"lower": 0.1, "compile": 2.0},
    "held": {"bytes": 0, "other_bytes": 0, "host_bytes": 0},
}
OLDEST: dict[str, Any] = {
    "programs": [PROGRAM | {"calls_per_step": 1}],
    "order": [{"program": 0, "after": [[0, 1]]}],
    "periodic": [PROGRAM | {"calls": 1.0, "every": 2.5}],
    "held": [{"bytes": 4, "memory": "device", "shape": [1], "dtype": "float32", "born": 3}],
    "others": [{"name": "init", "calls": 1}],
    "operations_per_step": 0,
    "ended": "ended by itself",
    "notes": [],
    "cautions": [],
    "versions": {"jax": "0.5.0", "jaxlib": "0.5.0", "libtpu": None},
    "flags": "",
}
"""An answer without the fields that later hooks write."""


def test_the_answer_of_an_earlier_hook_is_read(tmp_path: Path) -> None:
    (tmp_path / ANSWER).write_text(json.dumps(OLDEST))
    answer = read_answer(tmp_path)
    (program,) = answer.programs
    assert (program.copies, program.mesh, program.open_loops) == (1, {}, [])
    assert program.places == [(0, 0, 0, 0, 0)]
    assert (answer.moves, answer.beside, answer.lent_compiler) == ({}, [], False)
    assert answer.order[0].after == [(0, 1)]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "Expecting property name"),
        ("[]", "Expected `object`"),
        (json.dumps(OLDEST | {"flags": None}), "Expected `str`, got `null` - at `$.flags`"),
        (json.dumps(OLDEST | {"programs": [{}]}), "missing required field `name`"),
    ],
)
def test_a_damaged_answer_is_one_line(tmp_path: Path, content: str, what: str) -> None:
    (tmp_path / ANSWER).write_text(content)
    with pytest.raises(RunError, match=re.escape(what)) as raised:
        read_answer(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / ANSWER} is damaged (")
    assert str(raised.value).endswith("; run the command again")
    assert "\n" not in str(raised.value)


def test_events_are_read_up_to_the_line_that_is_written(tmp_path: Path) -> None:
    lines = ['{"pid": 1, "stage": "importing"}', '{"stage": "running", "jax": "0.9"}', '{"fail']
    (tmp_path / EVENTS).write_text("\n".join(lines))
    events = read_events(tmp_path)
    assert [event.stage for event in events] == ["importing", "running"]
    (tmp_path / EVENTS).write_text("[]\n")
    with pytest.raises(RunError, match=r"events\.jsonl is damaged .*; run the command again$"):
        read_events(tmp_path)


def test_the_last_word_of_events_counts() -> None:
    first = CaptureEvent(refused="no libtpu", next="pip install libtpu")
    last = joined([CaptureEvent(stage="importing"), first, CaptureEvent(refused="old", next="")])
    assert last == CaptureEvent(stage="importing", refused="old", next="")
    assert joined([]) == CaptureEvent()
