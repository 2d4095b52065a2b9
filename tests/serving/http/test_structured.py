"""Answers that follow a schema, a grammar or the parameters of tools, from a real engine at temperature 1."""

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from systolic.data.text.chat import ChatTemplate
from systolic.inference.grammar import grammar_text, json_rule
from systolic.serving.http.chat import ThoughtReader
from systolic.serving.registry import Served, ServedText
from systolic.serving.text.engine import Engine
from systolic.serving.text.request import SamplingParams, TextOutput, TextRequest
from tests.serving.http.running import CHAT, Running, running
from tests.serving.http.schemas import random_schema
from tests.serving.text.engine import SIZES, shared, with_pages
from tests.serving.text.storm import Watched

ROWS = 8
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 7]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {**SCHEMA, "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"enum": ["é"]}}, "$defs": {"A": {"type": "null"}}}}}  # fmt: skip
SUB: Any = {"type": "function", "function": {"name": "add_all"}}
THINKS = CHAT.replace("<assistant>", "<assistant>{% if begin %}<think>{% endif %}{# </think> #}")


def opened(watched: Watched | None = None, **changed: Any) -> Engine:
    sizes = replace(SIZES, rows=ROWS, context=512, chunk=64, page_size=32, programs=(1, 1, 1))
    return shared().opened(replace(sizes, **changed), watched)


def chat(engine: Engine, name: str, template: str) -> ServedText:
    made = ChatTemplate(text=template, origin=Path("test"))
    return ServedText(name=name, engine=engine, tokenizer=engine.tokenizer, template=made)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    templates = {"marked": CHAT, "bare": CHAT.replace("<tool_call>", ""), "thinks": THINKS}
    models: list[Served] = [chat(opened(), name, text) for name, text in templates.items()]
    with running(models) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, model: str = "marked", **more: Any) -> list[Any]:
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 400, "seed": 3, **more}
    return client.chat.completions.create(model=model, **asked).choices


class Step(BaseModel):
    kind: Literal["add", "sub"]
    by: int | None


class Plan(BaseModel):
    steps: tuple[Step, Step]
    done: bool


class Person(BaseModel):
    flag: Literal["a", "b"]
    plan: Plan | None


@pytest.mark.parametrize("seed", range(4))
def test_openais_client_parses_pydantics_models(client: openai.OpenAI, seed: int) -> None:
    made = client.chat.completions.parse(
        model="marked", messages=HELLO, response_format=Person, seed=seed, max_tokens=450
    )
    assert isinstance(made.choices[0].message.parsed, Person)
    tool = openai.pydantic_function_tool(Person)
    made = client.chat.completions.parse(
        model="marked", messages=HELLO, tools=[tool], tool_choice="required", seed=seed
    )
    assert made.choices[0].message.tool_calls is not None
    (call,) = made.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Person)
    answer = client.responses.parse(model="marked", input="Hi", text_format=Person)
    assert isinstance(answer.output_parsed, Person)


def test_streams_and_choices_with_log_probabilities_follow_the_schema(
    client: openai.OpenAI,
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    choices = ask(client, n=4, response_format=form, logprobs=True, top_logprobs=2)
    parts = ["", "", "", ""]
    for chunk in client.chat.completions.create(
        model="marked", messages=HELLO, n=4, response_format=form, stream=True, seed=3
    ):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in choices] == parts
    assert len(set(parts)) > 1
    for choice in choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        content = choice.logprobs.content
        # Of the model's own distribution, whose likeliest tokens need not be allowed.
        assert all(one.logprob <= one.top_logprobs[0].logprob < 0 for one in content)
        text = b"".join(bytes(one.bytes) for one in content)
        assert text.decode().startswith(choice.message.content)


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_choice": ["yes"]}, ("yes",)),
        ({"structured_outputs": {"regex": "[ab]/"}}, ("a/", "b/")),
        ({"guided_regex": "x|y"}, ("x", "y")),
        ({"guided_grammar": 'root ::= "é" ("1" | "2")'}, ("é1", "é2")),
        ({"structured_outputs": {"json": '{"enum": [1, null]}'}}, ("1", "null")),
        ({"guided_json": {"const": "a"}}, ('"a"',)),
        ({"response_format": {"type": "text"}, "guided_choice": ["z"]}, ("z",)),
        ({"guided_choice": ["a b c"], "stop": " c"}, ("a b",)),
        ({"guided_choice": ["abc"], "ignore_eos": True, "logit_bias": {"97": -100}}, ("abc",)),
    ],
)  # fmt: skip
def test_what_vllm_calls_structured_outputs(
    server: Running, form: dict[str, Any], fits: tuple[str, ...]
) -> None:
    with server.client() as http:
        body = {"model": "marked", "prompt": "x", "n": 4, "max_tokens": 30, **form}
        choices = http.post("/v1/completions", json=body).json()["choices"]
        assert {choice["text"] for choice in choices} <= set(fits)
        assert {choice["finish_reason"] for choice in choices} == {"stop"}


CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize("model", ["marked", "bare"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("parallel", [False, True])
def test_arguments_of_a_demanded_call_follow_their_schema(
    client: openai.OpenAI, model: str, choice: Any, parallel: bool
) -> None:
    asked: Any = {"tools": [ADD, SUB], "tool_choice": choice, "parallel_tool_calls": parallel}
    names = Counter[str]()
    for made in ask(client, model, n=6, logit_bias={"59": 2, "10": 2}, **asked):
        cut = made.finish_reason == "length"
        assert made.finish_reason == "tool_calls" or parallel
        assert cut or not made.message.content
        calls = [(c.function.name, c.function.arguments) for c in made.message.tool_calls]
        assert len(calls) == 1 or parallel
        for name, arguments in calls:
            names[name] += 1
            assert json.loads(arguments) == {"add": {"a": None, "b": "é"}, "add_all": {}}[name]
    assert names["add"] == names.total() or choice == "required"


@pytest.mark.parametrize(("model", "bias"), [("marked", "60"), ("bare", "123")])
def test_a_call_of_its_own_accord_follows_its_schema(
    client: openai.OpenAI, model: str, bias: str
) -> None:
    # The mark, or the name of a call's field, comes of its own accord only where the model is drawn to it.
    for made in ask(client, model, n=8, tools=[ADD, SUB], logit_bias={bias: 6}, max_tokens=60):
        assert made.finish_reason in ("length", "stop", "tool_calls")
        for call in made.message.tool_calls or []:
            json.loads(call.function.arguments)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, "response_format", "the schema has not, which cannot be followed"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "has no schema"),
    ({"response_format": {"type": "xml"}}, "response_format", "takes text, json_object or json_schema"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
    ({"guided_regex": "a", "guided_choice": ["x"]}, "guided_choice", "send one"),
    ({"guided_json": "{"}, "guided_json", "guided_json: "),
    ({"guided_grammar": "nonsense"}, "guided_grammar", "guided_grammar: "),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "is 3"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "is []"),
    ({"structured_outputs": {}}, "structured_outputs", "takes one of json, regex"),
    ({"structured_outputs": {"structural_tag": {}, "regex": "a"}}, "structured_outputs", "takes one of"),
    ({"tools": [SUB, {"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": True}}}]}, "tools[1].function.parameters", "uniqueItems"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters", "no JSON object"),
    ({"model": "bare", "tools": [SUB], "response_format": {"type": "json_object"}}, "response_format", "leave one out"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "said"), REFUSED)
def test_what_cannot_be_followed_is_refused(
    server: Running, body: dict[str, Any], param: str, said: str
) -> None:
    with server.client() as http:
        asked = {"model": "marked", "messages": HELLO, "max_tokens": 5, **body}
        made = http.post("/v1/chat/completions", json=asked)
    assert (made.status_code, made.json()["error"]["param"]) == (400, param), made.text
    assert said in made.json()["error"]["message"]


def test_a_tool_that_is_not_strict_is_followed_as_far_as_it_can_be(client: openai.OpenAI) -> None:
    function = {"name": "f", "strict": False, "parameters": {**SCHEMA, "uniqueItems": True}}
    (made,) = ask(
        client, tools=[{"type": "function", "function": function}], tool_choice="required"
    )
    jsonschema.validate(json.loads(made.message.tool_calls[0].function.arguments), SCHEMA)


@pytest.mark.parametrize("begin", [True, False])
def test_a_schema_begins_after_the_thought(client: openai.OpenAI, begin: bool) -> None:
    # A thought of "<" and "/" that may end at each step, or an answer without one.
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    ended = 0
    # A thought hardly ever says the mark by chance, however long it is.
    most = 80 if begin else 400
    for seed in range(6):
        asked: dict[str, Any] = {"response_format": form, "seed": seed, "max_tokens": most}
        asked["extra_body"] = {"chat_template_kwargs": {"begin": begin}}
        (made,) = ask(client, "thinks", **asked)
        thought = getattr(made.message, "reasoning_content", None)
        said, streamed = "", ""
        for chunk in client.chat.completions.create(
            model="thinks", messages=HELLO, stream=True, **asked
        ):
            said += chunk.choices[0].delta.content or ""
            streamed += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        assert (said, streamed) == (made.message.content, thought or "")
        if begin:
            assert thought
        if made.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(said), SCHEMA)
    assert ended or begin


@pytest.mark.parametrize("size", [1, 2, 5, 99])
@pytest.mark.parametrize(
    ("begun", "text", "thought", "said"),
    [
        (True, "let <me></think>\n\n{}", "let <me>", "{}"),
        (True, "let </thin", "let </thin", ""),
        (False, "<think>x</think> {} ", "x", "{} "),
        (False, "<th", "", "<th"),
        (False, '{"a": "</think>"}', "", '{"a": "</think>"}'),
    ],
)
def test_thoughts_are_split_from_answers(
    begun: bool, text: str, thought: str, said: str, size: int
) -> None:
    reader = ThoughtReader(begun=begun)
    parts = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    parts.append(reader.flush())
    assert "".join(part for part, _ in parts) == thought
    assert "".join(part for _, part in parts) == said


def test_a_text_is_the_same_alone_and_where_it_loses_its_pages() -> None:
    watched = Watched()
    engine = with_pages(opened(watched), 18)
    engine.start()
    try:
        rules = {"answer": {"json_schema": {"type": "array", "items": SCHEMA, "minItems": 3}}}
        text = json.dumps({"grammars": [rules["answer"]]})
        grammar = engine.grammars.compiled(text)
        requests = [
            TextRequest(
                tokens=list(range(40 + n)),
                max_tokens=150,
                sampling=SamplingParams(seed=n, top_k=90 if n % 2 else 0),
                grammar=grammar,
            )
            for n in range(10)
        ]
        alone = [TextOutput.joined(list(engine.submit(one))) for one in requests]
        preempted = watched.counts.preempted
        streams = [engine.submit(one) for one in requests]
        together = [TextOutput.joined(list(stream)) for stream in streams]
    finally:
        engine.stop()
    assert watched.counts.preempted > preempted
    assert [one.text for one in together] == [one.text for one in alone]
    assert [one.finish for one in together] == [one.finish for one in alone]


def test_proposals_change_no_text_that_follows_a_schema() -> None:
    schema = {"type": "array", "items": {"enum": ["abcabcabc", "abcabd"]}, "minItems": 5}
    text = grammar_text("start: @answer", {"answer": json_rule({**schema, "maxItems": 5})})
    texts, accepted = [], []
    for speculate in (0, 3):
        engine = opened(speculate=speculate)
        engine.start()
        try:
            grammar = engine.grammars.compiled(text)
            streams = [
                engine.submit(
                    TextRequest(
                        tokens=[*b"abcabcabc abcabd ["],
                        max_tokens=300,
                        sampling=SamplingParams(seed=seed, temperature=seed / 3),
                        grammar=grammar,
                    )
                )
                for seed in range(4)
            ]
            outputs = [TextOutput.joined(list(stream)) for stream in streams]
        finally:
            engine.stop()
        texts.append([output.text for output in outputs])
        accepted.append(sum(output.accepted_tokens for output in outputs))
        assert all(len(json.loads(output.text)) == 5 for output in outputs)
    assert texts[0] == texts[1]
    assert accepted[0] == 0 < accepted[1]


class Storm:
    """Requests with schemas of their own from several threads, some of which leave in the middle."""

    def __init__(self, server: Running) -> None:
        self.server, self.did, self.lock = server, Counter[str](), threading.Lock()

    def run(self, count: int, threads: int) -> None:
        def work(first: int) -> None:
            with self.server.client() as http:
                for number in range(first, count, threads):
                    what = self.ask(http, random.Random(number))
                    with self.lock:
                        self.did[what] += 1

        workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def ask(self, http: httpx.Client, draw: random.Random) -> str:
        """What became of a request."""
        schema = random_schema(draw)
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        body = {
            "model": "marked",
            "response_format": form,
            "max_tokens": draw.choice((20, 380, 380, 380)),
        }
        body["messages"] = [
            {"role": "user", "content": chr(draw.randrange(33, 500)) * draw.randrange(1, 30)}
        ]
        if draw.random() < 0.2:
            body |= {"logit_bias": {"34": 1.0}, "frequency_penalty": 0.5, "top_p": 0.95}
        if draw.random() < 0.15:
            with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as told:
                assert told.status_code == 200
                for number, _ in enumerate(told.iter_lines()):
                    if number > 8:
                        return "left"
            return "left late"
        made = http.post("/v1/chat/completions", json=body)
        assert made.status_code == 200, (made.text, schema)
        (choice,) = made.json()["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        return choice["finish_reason"]


def storm(count: int, threads: int) -> None:
    watched = Watched()
    engine = with_pages(opened(watched), 34)
    with running([chat(engine, "marked", CHAT)]) as server:
        made = Storm(server)
        made.run(count, threads)
        print(dict(made.did), watched.counts.steps, "steps,", watched.counts.preempted, "preempted")
        assert sum(made.did.values()) == count
        assert made.did["stop"] > 0.5 * count
        assert made.did["left"] > 0
        assert engine.ready  # Nothing was compiled, which would have ended it.
        assert "error" not in watched.counts.ended
    assert engine.scheduler.pool.in_use == 0
    assert not engine._live


def test_answers_that_end_are_valid_under_load() -> None:
    storm(60, 12)


@pytest.mark.slow
def test_two_thousand_answers_are_valid_under_load() -> None:
    storm(2000, 16)
