"""OpenAI's API with OpenAI's own client."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from systolic.data.text.chat import ChatTemplate
from tests.serving.http.echo import EchoEngine
from tests.serving.http.running import CHAT, Running, echo_model, running

CALL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]


def test_models(client: openai.OpenAI) -> None:
    names = [one.id for one in client.models.list()]
    assert names == ["echo", "image", "embedding", "transcription", "tensors"]
    assert client.models.retrieve("echo").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nothing")
    assert caught.value.code == "model_not_found"


def test_a_completion(client: openai.OpenAI) -> None:
    # The prompt's first token is the one that starts a document, which has no text.
    made = client.completions.create(model="echo", prompt="hello", max_tokens=8)
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason) == ("helloh", "length")
    assert made.object == "text_completion"
    assert made.usage is not None
    assert made.usage.prompt_tokens == 6
    assert (made.usage.completion_tokens, made.usage.total_tokens) == (8, 14)
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens == 3


def test_prompts_of_every_form(client: openai.OpenAI) -> None:
    forms: list[tuple[Any, list[str]]] = [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([104, 105, 33], ["hi!"]),
        ([[104, 105, 33], [104, 111, 33]], ["hi!", "ho!"]),
    ]
    for prompt, texts in forms:
        made = client.completions.create(model="echo", prompt=prompt, max_tokens=3)
        assert [one.text for one in made.choices] == texts


def test_choices_have_their_own_seeds(server: Running, client: openai.OpenAI) -> None:
    made = client.completions.create(model="echo", prompt=["ab", "c"], n=2, seed=5, max_tokens=2)
    assert [(one.index, one.text) for one in made.choices] == [
        (0, "a"),
        (1, "a"),
        (2, "c"),
        (3, "c"),
    ]
    engine = server.state.registry.newest()[0].engine
    assert [one.sampling.seed for one in engine.requests[-4:]] == [5, 6, 5, 6]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (5, 8)  # prompts count once


def test_fields_reach_the_engine(server: Running, client: openai.OpenAI) -> None:
    client.completions.create(
        model="echo", prompt="x", max_tokens=2, temperature=0.5, top_p=0.25, seed=-1,
        presence_penalty=1, frequency_penalty=-1, logit_bias={"7": 3.5}, stop="z",
        extra_body={"top_k": 4, "min_p": 0.125, "repetition_penalty": 1.5, "ignore_eos": True, "stop_token_ids": [9]},
    )  # fmt: skip
    found = server.state.registry.newest()[0].engine.requests[-1]
    choice = found.sampling
    assert (choice.temperature, choice.top_p, choice.top_k, choice.min_p) == (0.5, 0.25, 4, 0.125)
    assert (choice.presence_penalty, choice.frequency_penalty) == (1, -1)
    assert (choice.repetition_penalty, choice.logit_bias, choice.seed) == (1.5, {7: 3.5}, 2**31 - 1)
    assert (found.stop, found.stop_tokens, found.ignore_ends) == (["z"], [9], True)


def test_a_stop_string(client: openai.OpenAI) -> None:
    made = client.completions.create(model="echo", prompt="hello", max_tokens=20, stop=["l", "y"])
    assert (made.choices[0].text, made.choices[0].finish_reason) == ("he", "stop")


def test_a_stream_says_what_the_whole_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "echo", "prompt": ["h€llo", "yes"], "max_tokens": 9, "n": 2}
    texts = [one.text for one in client.completions.create(**asked).choices]
    told, usage, ids = [""] * 4, None, set()
    ends: list[str | None] = [None] * 4
    for chunk in client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        ids.add(chunk.id)
        for choice in chunk.choices:
            told[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]
        usage = chunk.usage or usage
    assert told == texts
    assert (len(ids), set(ends)) == (1, {"length"})
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (8 + 4, 36)


def test_the_events_of_a_stream(server: Running) -> None:
    asked = {"model": "echo", "messages": HELLO, "max_tokens": 3, "stream": True}
    with server.client() as http:
        raw = http.post("/v1/chat/completions", json=asked)
    assert raw.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in raw.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    deltas = [one["choices"][0]["delta"] for one in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:] == [{"content": "<"}, {"content": "u"}, {"content": "s"}, {}]
    assert [one["choices"][0]["finish_reason"] for one in chunks] == [None] * 4 + ["length"]
    assert all("usage" not in one for one in chunks)


def test_log_probabilities_of_a_completion(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model="echo", prompt="hi", max_tokens=2, echo=True, logprobs=2, temperature=0
    )
    (choice,) = made.choices
    assert choice.text == "hih"
    found = choice.logprobs
    assert found is not None
    assert found.tokens == ["<document>", "h", "i", "<document>", "h"]
    assert found.token_logprobs == [None, -1 / 105, -1 / 106, -1 / 257, -1 / 105]
    assert found.text_offset == [0, 10, 11, 12, 22]
    assert found.top_logprobs is not None
    assert found.top_logprobs[0] is None
    assert found.top_logprobs[1] == {"h": -1 / 105, "i": -2.0}
    # What lm-eval asks for: the prompt alone.
    scored = client.completions.create(
        model="echo", prompt="hi", max_tokens=0, echo=True, logprobs=1
    )
    assert scored.choices[0].text == "hi"
    assert scored.choices[0].logprobs is not None
    assert scored.choices[0].logprobs.tokens == ["<document>", "h", "i"]


def test_a_chat(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="echo",
        messages=[
            {"role": "developer", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        ],
        logprobs=True,
        top_logprobs=1,
        max_completion_tokens=8,
    )  # fmt: skip
    (choice,) = made.choices
    assert choice.message.content == "<system>"
    assert made.usage is not None
    assert made.usage.prompt_tokens == len("<system>be<user>hi<assistant>")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    first = choice.logprobs.content[0]
    assert (first.token, first.bytes, first.logprob) == ("<", [60], -1 / 61)
    assert first.top_logprobs[0].token == "<"


def test_a_chat_fills_the_context(client: openai.OpenAI) -> None:
    with (
        running([echo_model(context=40)]) as small,
        openai.OpenAI(base_url=f"{small.url}/v1", api_key="x", max_retries=0) as http,
    ):
        made = http.chat.completions.create(model="echo", messages=HELLO)
        assert made.usage is not None
        assert made.usage.total_tokens == 40
        with pytest.raises(openai.BadRequestError) as caught:
            http.chat.completions.create(model="echo", messages=HELLO, max_tokens=30)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        assert "40 tokens" in caught.value.message


CALLS = 'Let me. <tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><tool_call>{"name": "sub", "arguments": {}}</tool_call>'


DATA = [
    '{"name": "Ada", "born": 1815}',
    '{"name": "add", "x": 1}',
    '{"name": "mul", "parameters": {}}',
    '{"name": "Ada"}',
]
BARE = '{"name": "add", "parameters": {"x": 1}}'


@pytest.mark.parametrize(("answer", "called"), [*((one, False) for one in DATA), (BARE, True)])
def test_json_of_a_template_without_marks_is_a_call_of_a_tool_only(
    answer: str, called: bool
) -> None:
    template = ChatTemplate(text=CHAT.replace("<tool_call>", ""), origin=Path("test"))
    with running([replace(echo_model(answer=answer), template=template)]) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {"model": "echo", "messages": HELLO, "tools": [CALL]}
        (choice,) = client.chat.completions.create(**asked).choices
        parts = [part.choices[0] for part in client.chat.completions.create(**asked, stream=True)]
    said = "".join(part.delta.content or "" for part in parts)
    if called:
        (call,) = choice.message.tool_calls or []
        assert (call.function.name, call.function.arguments, said) == ("add", '{"x": 1}', "")
    else:
        assert (choice.message.content, choice.finish_reason, said) == (answer, "stop", answer)
        assert not choice.message.tool_calls


def test_a_prompt_that_is_only_scored_has_no_new_tokens(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    made = client.completions.create(
        model="echo", prompt=["hello", "you"], max_tokens=0, echo=True, logprobs=1
    )
    assert [one.text for one in made.choices] == ["hello", "you"]
    assert made.usage is not None
    assert made.usage.completion_tokens == 0


def test_tools() -> None:
    with (
        running([echo_model(answer=CALLS)]) as one,
        openai.OpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0) as http,
    ):
        asked: dict[str, Any] = {"model": "echo", "messages": HELLO, "tools": [CALL]}
        choice = http.chat.completions.create(**asked).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Let me.", "tool_calls")
        assert choice.message.tool_calls is not None
        made = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
        assert made == [("add", '{"x": 1}'), ("sub", "{}")]
        said, calls, end = "", [], None
        for chunk in http.chat.completions.create(**asked, stream=True):
            (part,) = chunk.choices
            said += part.delta.content or ""
            calls += [
                (c.index, c.function.name, c.function.arguments)
                for c in part.delta.tool_calls or []
            ]
            end = part.finish_reason or end
        assert (said.strip(), end) == ("Let me.", "tool_calls")
        assert calls == [(0, "add", '{"x": 1}'), (1, "sub", "{}")]
        # The model is told of the tools, and of what it called before.
        engine = one.state.registry.newest()[0].engine
        assert isinstance(engine, EchoEngine)
        prompt = engine.tokenizer.decode(engine.requests[-1].tokens)
        assert "(tool add)" in prompt
        again = [
            *HELLO,
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 7}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "8"},
        ]  # fmt: skip
        http.chat.completions.create(model="echo", messages=again)
        assert "[add=7]<tool>8" in engine.tokenizer.decode(engine.requests[-1].tokens)


NAMED = {"type": "function", "function": {"name": "add"}}
OTHER = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("choice", "tools", "begin", "said", "made"),
    [
        # The model is given the begin of the call and says the rest.
        (NAMED, [CALL, OTHER], '<tool_call>\n{"name": "add", "arguments": ', '{"x": 1}}\n</tool_call> more', ("add", '{"x": 1}')),
        ("required", [CALL], '<tool_call>\n{"name": "add", "arguments": ', '{"x": 1}}', ("add", '{"x": 1}')),
        ("required", [CALL, OTHER], '<tool_call>\n{"name": "', 'sub", "arguments": {}}\n</tool_call>', ("sub", "{}")),
        # Cut off by the number of tokens: what there is of the arguments.
        (NAMED, [CALL], '<tool_call>\n{"name": "add", "arguments": ', '{"x": [1, 1, 1, 1, 1, 1, 1, 1', ("add", '{"x": [1, 1, 1, 1, 1, 1, 1, 1')),
    ],
)  # fmt: skip
def test_a_call_that_is_demanded(
    choice: Any, tools: list[Any], begin: str, said: str, made: tuple[str, str]
) -> None:
    with running([echo_model(answer=said)]) as one:
        http = openai.OpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0)
        asked: dict[str, Any] = {"model": "echo", "messages": HELLO, "tools": tools, "tool_choice": choice, "max_tokens": len(said)}  # fmt: skip
        (whole,) = http.chat.completions.create(**asked).choices
        (call,) = whole.message.tool_calls or []
        assert (call.function.name, call.function.arguments) == made
        assert whole.message.content is None
        engine = one.state.registry.newest()[0].engine
        assert engine.tokenizer.decode(engine.requests[-1].tokens).endswith(f"<assistant>{begin}")
        parts = [
            part.choices[0].delta for part in http.chat.completions.create(**asked, stream=True)
        ]
        (call,) = [call for part in parts for call in part.tool_calls or []]
        assert (call.function.name, call.function.arguments) == made
        assert "".join(part.content or "" for part in parts) == ""


def test_one_call_at_a_time() -> None:
    with running([echo_model(answer=CALLS)]) as one:
        http = openai.OpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0)
        found = http.chat.completions.create(
            model="echo", messages=HELLO, tools=[CALL], parallel_tool_calls=False
        )
        calls = found.choices[0].message.tool_calls or []
        assert [call.function.name for call in calls] == ["add"]
        assert found.choices[0].message.content == "Let me."


def test_log_probabilities_of_a_stream_of_several_answers(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "echo", "messages": HELLO, "n": 2, "max_tokens": 4, "logprobs": True, "top_logprobs": 1}  # fmt: skip
    told: list[list[Any]] = [[], []]
    usage = None
    for part in client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        for choice in part.choices:
            told[choice.index] += (choice.logprobs and choice.logprobs.content) or []
        usage = part.usage or usage
    whole = client.chat.completions.create(**asked)
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert told[choice.index] == choice.logprobs.content
    assert [one.token for one in told[0]] == ["<", "u", "s", "e"]
    assert usage == whole.usage


def test_embeddings(client: openai.OpenAI) -> None:
    # The toy's vector is [bytes of the text, 0, 0, 3].
    made = client.embeddings.create(model="embedding", input=["four", "seventy"])
    assert [one.embedding for one in made.data] == [[4, 0, 0, 3], [7, 0, 0, 3]]
    assert made.usage.prompt_tokens == 11
    plain = client.embeddings.create(model="embedding", input="four", encoding_format="float")
    assert plain.data[0].embedding == [4, 0, 0, 3]
    ids = client.embeddings.create(model="embedding", input=[[1, 2, 3]], encoding_format="float")
    assert ids.data[0].embedding[0] == 3
    short = client.embeddings.create(model="embedding", input="four", dimensions=2)
    assert short.data[0].embedding == [1, 0]


def test_base64_is_little_endian_float32(server: Running) -> None:
    asked = {"model": "embedding", "input": "four", "encoding_format": "base64"}
    with server.client() as http:
        found = http.post("/v1/embeddings", json=asked).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(found), "<f4").tolist() == [4, 0, 0, 3]


def test_transcriptions(client: openai.OpenAI) -> None:
    sound = ("a.wav", b"RIFF....")
    ask = client.audio.transcriptions.create
    assert ask(model="transcription", file=sound).text == "Hello world."
    assert ask(model="transcription", file=sound, response_format="text") == "Hello world.\n"
    srt = "1\n00:00:00,000 --> 00:00:01,500\nHello\n\n2\n00:00:01,500 --> 00:01:02,250\nworld.\n"
    assert ask(model="transcription", file=sound, response_format="srt") == srt
    vtt = ask(model="transcription", file=sound, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello\n")
    found = ask(model="transcription", file=sound, response_format="verbose_json")
    assert (found.duration, found.text, found.language) == (62.25, "Hello world.", "english")
    found = ask(model="transcription", file=sound, response_format="verbose_json", language="de")
    assert found.language == "de"
    assert found.segments is not None
    assert [one.text for one in found.segments] == [" Hello", " world."]
    events = list(ask(model="transcription", file=sound, stream=True))
    assert [one.type for one in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    with pytest.raises(openai.BadRequestError, match="can't be read"):
        ask(model="transcription", file=("a.wav", b"nonsense"))


def test_tokens_there_and_back(server: Running) -> None:
    with server.client() as http:
        found = http.post("/tokenize", json={"model": "echo", "prompt": "hé"}).json()
        assert found == {"count": 4, "max_model_len": 4096, "tokens": [256, 104, 195, 169]}
        text = http.post("/detokenize", json={"model": "echo", "tokens": found["tokens"]}).json()
        assert text == {"prompt": "hé"}
        chat = http.post("/tokenize", json={"model": "echo", "messages": HELLO}).json()
        assert chat["count"] == len("<user>hello<assistant>")


REFUSED: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("completions", {"prompt": "x", "best_of": 3}, 400, "best_of"),
    ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": 10**30}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": "7"}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": 5000}, 400, "max_tokens"),
    ("completions", {"prompt": "x" * 5000, "max_tokens": 5000}, 400, "prompt"),
    ("completions", {"prompt": "x" * 4000, "max_tokens": 200}, 400, "prompt"),
    ("completions", {"prompt": ["x"] * 257}, 400, "prompt"),
    ("completions", {"prompt": "x", "temperature": 2.5}, 400, "temperature"),
    ("completions", {"prompt": "x", "n": 0}, 400, "n"),
    ("completions", {"prompt": ["x"] * 100, "n": 100}, 400, "n"),
    ("completions", {"prompt": [1, "x"]}, 400, "prompt"),
    ("completions", {"prompt": [257]}, 400, "prompt"),
    ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {"prompt": {}}, 400, "prompt"),
    ("completions", {}, 400, "prompt"),
    ("completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
    ("completions", {"prompt": "x", "stop": ["a"] * 17}, 400, "stop"),
    ("completions", {"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ("completions", {"prompt": "x", "logit_bias": {"999": 1}}, 400, "logit_bias"),
    ("completions", {"prompt": "x", "stream_options": {}}, 400, "stream_options"),
    ("completions", {"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format"),
    ("completions", {"prompt": "x", "model": "nothing"}, 404, "model"),
    ("completions", {"prompt": "x", "model": "tensors"}, 400, "model"),
    ("completions", {"prompt": "x", "model": None}, 400, "model"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": HELLO, "max_tokens": 4096}, 400, "max_tokens"),
    ("chat/completions", {"messages": HELLO, "max_completion_tokens": 4096}, 400, "max_completion_tokens"),
    ("chat/completions", {"messages": HELLO, "reasoning_effort": "low"}, 400, "reasoning_effort"),
    ("chat/completions", {"messages": HELLO, "functions": [{}]}, 400, "functions"),
    ("chat/completions", {"messages": HELLO, "top_logprobs": 3}, 400, "top_logprobs"),
    ("chat/completions", {"messages": HELLO, "tools": [{}]}, 400, "tools[0]"),
    ("chat/completions", {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    ("chat/completions", {"messages": HELLO, "tools": [CALL], "tool_choice": "any"}, 400, "tool_choice"),
    ("chat/completions", {"messages": HELLO, "tools": [CALL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, 400, "tool_choice"),
    ("chat/completions", {"messages": [{"role": "bird", "content": "x"}]}, 400, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]"),
    ("chat/completions", {"messages": HELLO, "model": "embedding"}, 400, "model"),
    ("embeddings", {"model": "embedding", "input": ""}, 400, "input"),
    ("embeddings", {"model": "embedding", "input": [1, "x"]}, 400, "input"),
    ("embeddings", {"model": "embedding", "input": "x", "dimensions": 9}, 400, "dimensions"),
    ("embeddings", {"model": "embedding", "input": "x", "encoding_format": "hex"}, 400, "encoding_format"),
    ("embeddings", {"model": "echo", "input": "x"}, 400, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param"), REFUSED)
def test_what_is_refused(
    server: Running, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    with server.client() as http:
        found = http.post(f"/v1/{path}", json={"model": "echo", **body})
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b"\xff\xfe", b"[" * 100_000, b'{"prompt":"\\ud800"}']
)  # fmt: skip
def test_bodies_that_are_no_request(server: Running, raw: bytes) -> None:
    with server.client() as http:
        for path in ("completions", "chat/completions", "embeddings"):
            found = http.post(f"/v1/{path}", content=raw)
            assert (found.status_code, found.json()["error"]["type"]) == (
                400,
                "invalid_request_error",
            )


def test_paths_and_methods(server: Running) -> None:
    with server.client() as http:
        assert http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
        found = http.get("/v1/completions")
        assert (found.status_code, found.headers["allow"]) == (405, "POST")
        assert isinstance(http.get("/v2/nothing").json()["error"], str)


def test_ids_of_requests(server: Running) -> None:
    with server.client() as http:
        assert (
            http.get("/version", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
        )
        made = http.get("/version", headers={"X-Request-Id": "not a\tgood one"})
        assert made.headers["x-request-id"].startswith("req-")


def test_clients_that_send_extras(server: Running) -> None:
    body = {"model": "echo", "prompt": "hi", "nonsense": [1], "user": "me", "stream_options": None}
    with server.client() as http:
        assert http.post("/v1/completions", json=body).status_code == 200


def test_fields_that_change_no_answer_are_ignored(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=2,
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        safety_identifier="me",
        prompt_cache_key="k",
    )
    assert found.choices[0].finish_reason == "length"


def test_a_description_of_all_routes(server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        found = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in found["paths"]
    assert "prompt" in found["components"]["schemas"]["CompletionFields"]["required"]
