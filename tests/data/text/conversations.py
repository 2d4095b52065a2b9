"""Forty conversations as clients send them and data files hold them."""

from typing import Any

FUNCTION = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a <city> & its “region”",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Zürich, 東京"},
                "days": {"type": "integer", "enum": [1, 2]},
                "units": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
        "strict": True,
    },
    "x-vendor": {"cache": None, "tags": ["a"]},
}
SMALL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
DOCUMENTS = [
    {"doc_id": 1, "title": "Ünit", "text": "A <b>fact</b>."},
    {"doc_id": 2, "title": "Two", "text": "Another\nfact."},
]


def user(content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def system(content: Any = "Be brief.", **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": content, **more}


def said(content: Any = "hello there", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any = '{"city": "Zürich", "days": 2}', *, id: str = "abc123XYZ", **more: Any) -> dict[str, Any]:  # fmt: skip
    function = {"name": "weather", "arguments": arguments}
    return {"id": id, "type": "function", "function": function, **more}


def called(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **more}


def result(content: Any = '{"celsius": 7}', *, id: str = "abc123XYZ", **more: Any) -> dict[str, Any]:  # fmt: skip
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in texts]


TOOLS = [FUNCTION, SMALL]
LOOP = [user("weather?"), called(call(), content=None), result(), said("Seven degrees.")]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "question": {"messages": [user(), said()]},
    "system": {"messages": [system(), user("a <b> & 'c' \"d\""), said("e\n\nf")]},
    "turns": {"messages": [user("a"), said("b"), user("c"), said("d"), user("e"), said("f")]},
    "system turns": {"messages": [system(), user("a"), said("b"), user("c"), said("d")]},
    "unicode": {"messages": [user("東京 é 😀 \u2028"), said("ÄÖ ß 🤖")]},
    "spaces": {"messages": [system(" s \n"), user("  a \n"), said("\n b  ")]},
    "empty answer": {"messages": [user("a"), said("")]},
    "marks": {"messages": [user("<|im_end|>{{ x }}{% y %}</think>"), said("<|eot_id|>")]},
    "late system": {"messages": [user("a"), said("b"), system("c"), user("d"), said("e")]},
    "two questions": {"messages": [user("a"), user("b"), said("c")]},
    "answer first": {"messages": [said("a"), user("b"), said("c")]},
    "names": {"messages": [user("a", name="Ann"), said("b", name="Bob")]},
    "more fields": {"messages": [user("a", lang="de", n=1), said("b", weight=1, x={"y": None})]},
    "nulls": {
        "messages": [
            user("a", name=None, tool_calls=None),
            said("b", tool_calls=None, refusal=None, function_call=None, audio=None),
        ]
    },
    "parts": {"messages": [user(text("one ", "two")), said(text("three"))]},
    "parts of all": {"messages": [system(text("s")), user(text("u")), said(text("a", "b"))]},
    "no parts": {"messages": [user([]), said("b")]},
    "developer": {"messages": [{"role": "developer", "content": "D."}, user("a"), said("b")]},
    "call": {"messages": LOOP, "tools": TOOLS},
    "call without tools": {"messages": LOOP},
    "call of no content": {"messages": [user("w"), called(call()), result(), said()]},
    "call of empty content": {"messages": [user("w"), called(call(), content=""), result(), said()]},
    "call with content": {
        "messages": [system(), user("w"), called(call(), content="Let me look."), result(), said()],
        "tools": [FUNCTION],
    },
    "object arguments": {
        "messages": [user("w"), called(call({"city": "Zürich", "days": 2}), content=None), result(), said()],
        "tools": TOOLS,
    },
    "no arguments": {
        "messages": [user("w"), called(call("{}"), content=None), result(), said()],
        "tools": [SMALL],
    },
    "deep arguments": {
        "messages": [
            user("w"),
            called(call('{"b": {"é": [1, {"<": null}]}, "a": true, "s": "x\\"y"}'), content=None),
            result(),
            said(),
        ],
        "tools": TOOLS,
    },
    "two calls": {
        "messages": [
            user("w"),
            called(call(), call('{"city": "東京"}', id="def456UVW"), content=None),
            result(),
            result("8", id="def456UVW", name="weather"),
            said("Seven and eight."),
        ],
        "tools": TOOLS,
    },
    "two rounds": {
        "messages": [*LOOP, user("and there?"), called(call(id="zzz999zzz")), result(id="zzz999zzz"), said()],
        "tools": TOOLS,
    },
    "rounds on end": {
        "messages": [user("w"), called(call()), result(), called(call(id="zzz999zzz")), result(id="zzz999zzz"), said()],
        "tools": TOOLS,
    },
    "long id": {"messages": [user("w"), called(call(id="call_1234567890"), content=None), result(id="call_1234567890"), said()], "tools": TOOLS},
    "call fields": {"messages": [user("w"), called(call(index=0, note="n"), content=None), result(extra=1), said()], "tools": TOOLS},
    "result in parts": {"messages": [user("w"), called(call(), content=None), result(text("7", "8")), said()], "tools": TOOLS},
    "tools alone": {"messages": [system(), user("a"), said("b")], "tools": [FUNCTION]},
    "documents": {"messages": [user("a"), said("b")], "documents": DOCUMENTS},
    "documents and tools": {"messages": [system(), user("a"), said("b")], "documents": DOCUMENTS, "tools": TOOLS},
    "reasoning": {"messages": [user("a"), said("b", reasoning_content="because"), user("c"), said("d", reasoning_content="so")]},
    "thinking": {"messages": [user("a"), said("b", thinking="because")]},
    "reasoning of a call": {"messages": [user("w"), called(call(), reasoning="look it up"), result(), said("c", reasoning="done")], "tools": TOOLS},
    "thought in text": {"messages": [user("a"), said("<think>\nx\n</think>\n\nb"), user("c"), said("<think>y</think>d")]},
    "no thinking": {"messages": [user("a"), said("b")], "chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
    "kwargs": {"messages": [system(), user("a"), said("b")], "chat_template_kwargs": {"controls": {"citations": True}, "reasoning_effort": "high", "date_string": "1 Jan 2020"}},
}  # fmt: skip
