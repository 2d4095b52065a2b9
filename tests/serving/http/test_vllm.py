"""Fields and routes as vLLM has them, and the list of those that are not carried out."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from systolic.data.text.chat import ChatTemplate
from systolic.serving.http.protocol import UNSUPPORTED
from systolic.serving.http.responses_api import UNSUPPORTED_RESPONSES
from tests.serving.http.running import CHAT, Running, echo_model, running

HELLO = [{"role": "user", "content": "hello"}]
PAGE = Path(__file__).parents[3] / "docs/serving.md"
REFUSED: dict[str, Any] = {
    "best_of": 3,
    "skip_special_tokens": False,
    "add_generation_prompt": False,
    "response_format": {"type": "xml"},
    "reasoning": {"effort": "low"},
}
"""Values of fields that are refused for some values only."""


def test_the_engine_is_told_of_vllms_fields(server: Running, client: openai.OpenAI) -> None:
    more = {"min_tokens": 2, "priority": -3, "truncate_prompt_tokens": 4}
    answer = client.completions.create(model="echo", prompt="hello", max_tokens=3, extra_body=more)
    request = server.state.registry.newest()[0].engine.requests[-1]
    assert (request.min_tokens, request.priority) == (2, -3)
    assert answer.choices[0].text == "ell"  # The last four tokens are read.
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    client.chat.completions.create(model="echo", messages=HELLO, max_tokens=3, extra_body=more)
    request = server.state.registry.newest()[0].engine.requests[-1]
    assert (request.min_tokens, request.priority, len(request.tokens)) == (2, -3, 4)
    # -1 keeps as many as fit beside the new ones.
    answer = client.completions.create(
        model="echo", prompt="x" * 5000, max_tokens=6, extra_body={"truncate_prompt_tokens": -1}
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4090


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"min_tokens": 4}, "min_tokens is 4, and the answer has at most 3; ask for 3 or less"),
        ({"min_tokens": -1}, "min_tokens is -1; ask for 0 or more"),
        ({"truncate_prompt_tokens": 4094}, "truncate_prompt_tokens is 4094, and 4093 tokens fit beside 3 new ones; ask for 4093 or less"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2; ask for -1 or more"),
        ({"truncate_prompt_tokens": 0}, "prompt has no tokens; send some text"),
        ({"priority": 1.5}, "priority is 1.5; send a whole number"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_refused(
    client: openai.OpenAI, more: dict[str, Any], told: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="echo", prompt="hello", max_tokens=3, extra_body=more)
    assert told in caught.value.message


def test_usage_with_every_event(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    request: dict[str, Any] = {"model": "echo", "max_tokens": 3, "n": 2, "stream": True}
    prompt = len("<user>hello<assistant>")
    chunks = list(client.chat.completions.create(**request, messages=HELLO, stream_options=options))
    first = [c.usage for c in chunks if c.choices and c.choices[0].index == 0]
    assert [u.completion_tokens for u in first] == [0, 1, 2, 3, 3]
    assert {u.prompt_tokens for u in first} == {prompt}
    assert all(u.total_tokens == prompt + u.completion_tokens for u in first)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    parts = list(client.completions.create(**request, prompt="hello", stream_options=options))
    assert [c.usage.completion_tokens for c in parts if c.choices and c.choices[0].index == 1] == [2, 3]  # fmt: skip
    # As vLLM has it, the numbers of each event go with those of the end.
    options = {"continuous_usage_stats": True}
    parts = list(client.completions.create(**request, prompt="hello", stream_options=options))
    assert all(c.usage is None for c in parts)


def test_tokens_of_chats_and_of_encoders(server: Running) -> None:
    def post(path: str, **body: Any) -> dict[str, Any]:
        with server.client() as http:
            return http.post(path, json=body).json()

    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    with_tool = post("/tokenize", model="echo", messages=HELLO, tools=[tool])
    assert with_tool["count"] == len("<user>hello(tool add)<tool_call><assistant>")
    special = post("/tokenize", model="echo", messages=HELLO, add_special_tokens=True)
    assert special["count"] == len("<user>hello<assistant>") + 1
    bare = post("/tokenize", model="echo", prompt="hi", add_special_tokens=False, return_token_strs=True)  # fmt: skip
    assert (bare["tokens"], len(bare["token_strs"])) == ([104, 105], 2)
    around = post("/tokenize", model="embedding", prompt="hi")
    assert around == {"count": 4, "max_model_len": 12, "tokens": [1, 104, 105, 2]}
    bare = post("/tokenize", model="embedding", prompt="hi", add_special_tokens=False)
    assert bare["tokens"] == [104, 105]
    assert post("/detokenize", model="embedding", tokens=[104, 105]) == {"prompt": "hi"}
    with server.client() as http:
        about = http.get("/tokenizer_info", params={"model": "echo"}).json()
    assert about["chat_template"] == CHAT
    assert about["model_max_length"] > 0
    # Bytes have an end that no text holds: by its id alone.
    assert (about["eos_token"], about["eos_token_id"]) == (None, 256)
    no_chat = post("/tokenize", model="embedding", messages=HELLO)["error"]
    assert no_chat["message"] == "embedding knows no chat; send prompt"
    no_text = post("/tokenize", model="tensors", prompt="hi")["error"]
    assert no_text["message"] == "tensors is a model of kind tensors and reads no texts"
    with_end = post("/tokenize", model="echo", messages=HELLO, continue_final_message=True)["error"]
    assert with_end["param"] == "continue_final_message"


def test_a_chat_that_ends_before_the_answer() -> None:
    text = CHAT.replace(
        "<assistant>", "{% if add_generation_prompt %}<assistant>{% endif %}{{ more }}"
    )
    template = ChatTemplate(text=text, origin=Path("test"))
    names = {"more": "!!"}
    with running([replace(echo_model(), template=template)]) as server, server.client() as http:
        body = {"messages": HELLO, "chat_template_kwargs": names}
        counts = [
            http.post("/tokenize", json={**body, "add_generation_prompt": answers}).json()["count"]
            for answers in (None, True, False)
        ]
    whole = len("<user>hello<assistant>!!")
    assert counts == [whole, whole, len("<user>hello!!")]


def cosine(left: int, right: int) -> float:
    """Of the toy's vectors [length, 0, 0, 3]."""
    return (left * right + 9) / ((left**2 + 9) * (right**2 + 9)) ** 0.5


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_pairs(server: Running, path: str) -> None:
    sides = {"text_1": "a", "text_2": ["ab", "abcd"]}
    with server.client() as http:
        answer = http.post(path, json={"model": "embedding", **sides}).json()
        assert (answer["object"], answer["model"]) == ("list", "embedding")
        assert [(d["index"], d["object"]) for d in answer["data"]] == [(0, "score"), (1, "score")]
        scores = [d["score"] for d in answer["data"]]
        assert scores == pytest.approx([cosine(1, 2), cosine(1, 4)])
        # The tokens of both texts of each pair.
        assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 0, "total_tokens": 8}
        for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
            body = dict(zip(names, sides.values(), strict=True))
            again = http.post(path, json={"model": "embedding", **body}).json()
            assert [d["score"] for d in again["data"]] == scores
        pairs = {"text_1": ["a", "b"], "text_2": ["ab", "abcd"], "truncate_prompt_tokens": 4}
        cut = http.post(path, json={"model": "embedding", **pairs}).json()
        assert cut["data"][1]["score"] == pytest.approx(cosine(3, 4))
        assert cut["usage"]["prompt_tokens"] == 3 + 4 + 3 + 4
        for body, told in (
            ({}, "text_1 and text_2 are missing; send both"),
            ({"text_1": [], "text_2": "a"}, "text_1 is empty; send a text or several"),
            ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts and text_2 3; send one text, or as many as in text_2"),
            ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 13}, "truncate_prompt_tokens is 13, and the model reads up to 12; ask for 12 or less"),
        ):  # fmt: skip
            refused = http.post(path, json={"model": "embedding", **body})
            assert (refused.status_code, refused.json()["error"]["message"]) == (400, told)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_by_a_query(server: Running, path: str) -> None:
    body = {"model": "embedding", "query": "abcd", "documents": ["a", "abc", "ab"]}
    with server.client() as http:
        answer = http.post(path, json=body).json()
        best = http.post(path, json={**body, "top_n": 1}).json()
        none = http.post(path, json={**body, "documents": []})
        assert none.json()["error"]["message"] == "documents is empty; send a text or several"
        wrong = http.post(path, json={**body, "model": "echo"})
        assert wrong.json()["error"]["param"] == "model"
    assert [r["index"] for r in answer["results"]] == [1, 2, 0]
    assert answer["results"][0]["document"] == {"text": "abc"}
    assert answer["results"][0]["relevance_score"] == pytest.approx(cosine(4, 3))
    assert answer["usage"] == {"prompt_tokens": 3 * 4 + 6, "total_tokens": 18}
    assert best["results"] == answer["results"][:1]


def test_vectors_of_truncated_texts(client: openai.OpenAI) -> None:
    def first(content: Any, kept: int) -> float:
        more = {"truncate_prompt_tokens": kept}
        answer = client.embeddings.create(
            model="embedding", input=content, encoding_format="float", extra_body=more
        )
        return answer.data[0].embedding[0]

    assert first("abcdef", 5) == 5  # three letters and the tokens around them
    assert first("a" * 40, -1) == 12
    assert first([7, 8, 9], 2) == 2


def unsupported() -> dict[str, set[str]]:
    """Fields that the page says are refused, by route."""
    section = PAGE.read_text().split("### Fields that are refused")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(/v1/[a-z/]+)` \| (.*) \|$", section, re.MULTILINE)
    return {path: set(re.findall(r"`([a-z_0-9]+)`", fields)) for path, fields in rows}


def test_the_page_lists_the_fields_that_are_refused(server: Running) -> None:
    listed = unsupported()
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/responses": {"input": "x"},
    }
    assert set(listed) == set(bodies)
    refused: dict[str, set[str]] = {path: set() for path in bodies}
    known = {*UNSUPPORTED, *UNSUPPORTED_RESPONSES, *REFUSED, *set().union(*listed.values())}
    with server.client() as http:
        described = http.get("/openapi.json").json()
        for path, body in bodies.items():
            reference = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]  # fmt: skip
            schema = described["components"]["schemas"][reference.split("/")[-1]]
            for name in known & set(schema["properties"]) - set(body):
                kinds = json.dumps(schema["properties"][name])
                value = REFUSED.get(name, True)
                for kind, some in (("array", ["x"]), ("string", "x"), ("integer", 3), ("object", {"a": 1})):  # fmt: skip
                    if name not in REFUSED and f'"{kind}"' in kinds:
                        value = [1] if name == "allowed_token_ids" else some
                answer = http.post(path, json={"model": "echo", **body, name: value})
                if answer.status_code == 400:
                    error = answer.json()["error"]
                    assert error["param"] == name
                    assert error["message"].startswith(name)
                    refused[path].add(name)
    assert refused == listed
