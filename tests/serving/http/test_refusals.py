"""What a refusal says: what was given, and what to send."""

from typing import Any

import pytest

from systolic.serving.http.responses import failure
from systolic.serving.text.request import Finish, TextOutput
from tests.serving.http.running import Running

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("chat/completions", {"messages": HELLO, "max_tokens": -1}, "max_tokens is -1; ask for 1 or more"),
        ("chat/completions", {"messages": HELLO, "max_tokens": 0}, "max_tokens is 0; ask for 1 or more"),
        ("completions", {"prompt": "x", "max_tokens": 2**40}, "max_tokens is 1099511627776; ask for 2147483647 or less"),
        ("completions", {"prompt": "x", "max_tokens": "3"}, 'max_tokens is "3"; send a whole number'),
        ("completions", {"prompt": "x", "top_p": 0}, "top_p is 0; ask for more than 0"),
        ("completions", {"prompt": "x", "logit_bias": {"1": 200}}, "logit_bias[\"1\"] is 200; ask for 100 or less"),
        ("completions", {"prompt": "x", "logit_bias": {"7": 1, "104": "1"}}, "logit_bias[\"104\"] is \"1\"; send a number"),
        ("completions", {"prompt": "x", "seed": 2**63}, "seed is 9223372036854775808; ask for 9223372036854775807 or less"),
        ("completions", {"prompt": [[1, -1]]}, "prompt[0][1] is -1; ask for 0 or more"),
        ("completions", {"prompt": {"a": "b" * 99}}, f'prompt is {{"a":"{"b" * 34}...; send a text or a list'),
        ("completions", {}, "prompt is missing; send it"),
        ("chat/completions", {"messages": ["hi"]}, 'messages[0] is "hi"; send an object'),
        ("embeddings", {"input": "x", "encoding_format": "hex"}, 'encoding_format is "hex", which is not supported; leave it out'),
    ],
)  # fmt: skip
def test_refusals_say_what_was_given_and_what_to_send(
    server: Running, path: str, body: dict[str, Any], told: str
) -> None:
    with server.client() as http:
        found = http.post(f"/v1/{path}", json={"model": "echo", **body})
    assert found.json()["error"]["message"] == told


def test_only_texts_that_ended_by_themselves_are_successes() -> None:
    problems = {finish: failure(TextOutput(finish=finish)) for finish in (None, *Finish)}
    status = {finish: problem.status for finish, problem in problems.items() if problem is not None}
    assert status == {Finish.error: 500, Finish.deadline: 504, Finish.cancelled: 503}
    # A reason that no case names is a fault of the server, not a success.
    with pytest.raises(AssertionError):
        failure(TextOutput(finish="preempted"))  # ty: ignore[invalid-argument-type]
