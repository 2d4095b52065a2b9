"""OpenAI's Responses API with OpenAI's own client."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from systolic.data.text.chat import ChatTemplate
from tests.serving.http.running import CHAT, Running, echo_model, running

TOOL: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "strict": False,
}
CALL = '{"name": "add", "arguments": {"x": 1}}'


def test_a_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="echo", input="hello", instructions="be", max_output_tokens=8, metadata={"a": "b"}
    )
    assert answer.output_text == "<system>"
    (message,) = answer.output
    assert (message.type, message.status) == ("message", "incomplete")
    assert (answer.status, answer.object, answer.metadata) == ("incomplete", "response", {"a": "b"})
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    size = len("<system>be<user>hello<assistant>")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (size, 8)
    assert answer.usage.input_tokens_details.cached_tokens == size // 2


def test_items_are_messages(server: Running, client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": 3}'},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "four", "annotations": []}]},
        {"role": "user", "content": "b"},
    ]  # fmt: skip
    client.responses.create(model="echo", input=items, max_output_tokens=1)
    request = server.state.registry.newest()[0].engine.requests[-1]
    text = bytes(request.tokens).decode()
    assert text == "<user>a<assistant>[add=3]<tool>4<assistant>four<user>b<assistant>"


def test_a_stream_says_what_the_whole_says(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "echo", "input": "h€llo", "max_output_tokens": 12}
    whole = client.responses.create(**request)
    events = list(client.responses.create(**request, stream=True))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert len(deltas) > 3
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def answering(text: str) -> Any:
    template = ChatTemplate(text=CHAT, origin=Path("test"))
    return running([replace(echo_model(answer=text), template=template)])


def test_a_call_of_a_function_and_the_helper_of_streams() -> None:
    with answering(f"Let me. <tool_call>{CALL}</tool_call>") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = client.responses.create(model="echo", input="add", tools=[TOOL])
        message, call = answer.output
        assert message.type == "message"
        assert answer.output_text == "Let me. "
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("add", {"x": 1})
        assert (answer.status, call.call_id[:5]) == ("completed", "call-")
        with client.responses.stream(model="echo", input="add", tools=[TOOL]) as stream:
            kinds = [event.type for event in stream]
            last = stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds
        assert kinds[-1] == "response.completed"
        assert [item.type for item in last.output] == ["message", "function_call"]
        # What came back goes in again.
        items: Any = [*(item.model_dump(exclude_none=True) for item in answer.output)]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
        client.responses.create(model="echo", input=items, tools=[TOOL])
        request = server.state.registry.newest()[0].engine.requests[-1]
        assert bytes(request.tokens).startswith(b"<assistant>Let me. [add=1]<tool>2")


def test_log_probabilities(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "echo", "input": "hi", "max_output_tokens": 3, "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    (message,) = client.responses.create(**request).output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [(p.token, p.logprob) for p in part.logprobs] == [("<", -1 / 61), ("u", -1 / 118), ("s", -1 / 116)]  # fmt: skip
    assert part.logprobs[0].top_logprobs[0].token == "<"
    scored = [e for e in client.responses.create(**request, stream=True) if e.type == "response.output_text.delta"]  # fmt: skip
    assert [p.token for e in scored for p in e.logprobs] == ["<", "u", "s"]


@pytest.mark.parametrize(
    ("more", "param", "told"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
        ({"input": []}, "input", "input is empty; send at least one"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "input[0] is of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "this model reads text only"),
        ({"input": [{"role": "user"}]}, "input[0].content", "input[0].content is missing; send a text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "only functions are supported"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens is 5000"),
        ({"max_output_tokens": 0}, "max_output_tokens", "ask for 1 or more"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format"),
        ({"include": ["file_search_call.results"]}, "include", "it takes message.output_text.logprobs"),
        ({"model": "tensors"}, "model", "does not write text"),
    ],
)  # fmt: skip
def test_refusals(server: Running, more: dict[str, Any], param: str, told: str) -> None:
    with server.client() as http:
        answer = http.post("/v1/responses", json={"model": "echo", "input": "hi", **more})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert told in error["message"]
