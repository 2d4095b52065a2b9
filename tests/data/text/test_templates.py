"""Published forms of chat templates over forty conversations, with transformers as the oracle, for serving and training.

The templates in tests/recorded/templates are written for these tests, with the constructs of the published ones that
they are named after.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest
import transformers
from transformers.utils import chat_template_utils

from systolic.core.errors import DataError, SystolicError
from systolic.data.text import messages as environment
from systolic.data.text.chat import DATE, ChatTemplate, find_template
from systolic.data.text.conversations import Line, closing, read, tokenized
from systolic.data.text.messages import is_learned, takes_of
from systolic.data.text.tokenizer import Tokenizer
from systolic.serving.http.chat import ChatFields, ToolCall, checked_messages, rendered
from systolic.serving.http.protocol import ProblemError
from systolic.serving.registry import ServedText
from tests.data.text.conversations import CONVERSATIONS, LOOP
from tests.formats import folders
from tests.serving.http.echo import EchoEngine
from tests.tiers import some

FORMS = Path(__file__).parents[2] / "recorded" / "templates"
NAMES = sorted(file.stem for file in FORMS.glob("*.jinja") if "." not in file.stem)

SEVERAL = (
    *("deepseek_r1", "gemma3", "glm4_5", "gpt_oss", "hermes", "jamba", "kimi_k2", "llama3_1"),
    *("minimax_m2", "mistral_small", "mistral_v3", "phi4_mini", "qwen3", "smolvlm"),
)
"""Those with the most of their own: thoughts, channels, calls, documents, parts, ends of turns."""

# What a template's author can't have meant, and transformers does: each of these sets is checked below to be needed.
ASK_NONE = {"deepseek_v3", "deepseek_r1", "kimi_k2", "minimax_m2"}
"""A null content beside calls is none; transformers takes it away, which these templates do not expect."""
JOIN = {"deepseek_v3", "deepseek_r1"}
"""Arguments are joined to text."""
PARTS: Mapping[str, frozenset[str]] = {
    "gemma3": frozenset(("user", "assistant")),
    "glm4_5": frozenset(("user", "assistant", "system")),
    "gpt_oss": frozenset(("tool",)),
    "kimi_k2": frozenset(("user", "assistant", "system", "tool")),
    "llama3_1": frozenset(("tool",)),
    "minimax_m2": frozenset(("user", "assistant", "system", "tool")),
    "mistral_small": frozenset(("user",)),
    "smolvlm": frozenset(("user", "assistant", "system", "tool")),
    "whole_message": frozenset(("user", "assistant", "system", "tool")),
}
"""Roles whose contents may be lists of parts."""
TYPED = {"smolvlm"}
"""Contents have to be lists of parts."""
LEARNED: Sequence[tuple[str, str, Sequence[str], int]] = (
    # Only what ends the text differs.
    ("phi3", "turns", ["b<|end|>", "d<|end|>", "f<|end|>\n<|end|>"], 0),
    ("phi4_mini", "system turns", ["b<|end|>", "d<|end|><|end|>"], 0),
    ("gpt_oss", "system turns", ["<|channel|>final<|message|>b", "<|channel|>final<|message|>d<|return|>"], 0),
    # The result of a tool is written otherwise where it is the last turn.
    ("hermes", "reasoning of a call", ['<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call><|im_end|>\n', "c<|im_end|>\n"], 0),
    ("mistral_v3", "system", [" e\n\nf<|end|>"], 0),
    ("deepseek_v3", "late system", ["b<|end|>", "e<|end|>"], 0),
    # Documents behind the answer are not its own.
    ("jamba", "documents", [" b<|eom|>"], 0),
    # A prompt begins a thought that the conversation lacks.
    ("deepseek_r1", "turns", ["b<|end|>", "d<|end|>", "f<|end|>"], 3),
    ("deepseek_r1", "thought in text", ["\n\nb<|end|>", "d<|end|>"], 2),
    ("deepseek_r1", "call without tools", ['<|calls|><|call|>function<|sep|>weather\n```json\n{"city": "Zürich", "days": 2}\n```<|endcall|><|endcalls|><|end|>', "Seven degrees.<|end|>"], 1),
    ("deepseek_r1", "answer first", ["c<|end|>"], 1),
    ("minimax_m2", "system turns", ["b[e~[\n", "d[e~[\n"], 2),
    # Written otherwise than as the last turn: without its thought.
    ("qwen3", "system turns", ["<think>\n\n</think>\n\nd<|im_end|>\n"], 0),
    ("glm4_5", "reasoning", ["\n<think>so</think>\nd"], 0),
)  # fmt: skip
"""Of a form and a conversation what is learned, and how many answers lack words of their prompt."""
DEVELOPER = {"gpt_oss"}
"""Name that role."""


@pytest.fixture(scope="module", autouse=True)
def same_day() -> Any:
    """The day of training for all, which serving and transformers take from the clock."""

    class Day(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(DATE.year, DATE.month, DATE.day)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", Day)
        patch.setattr(environment, "datetime", Day)
        yield


@cache
def _folder(root: Path, name: str) -> Path:
    folder = root / name
    made = folders.tokenizer()
    texts = {"default": (FORMS / f"{name}.jinja").read_text()}
    tools = FORMS / f"{name}.tool_use.jinja"
    made.chat_template = texts["default"]
    if tools.is_file():
        made.chat_template = {**texts, "tool_use": tools.read_text()}
    made.save_pretrained(folder)
    return folder


def meant(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the author of a template wants them from transformers."""
    made = []
    for message in messages:
        one = dict(message)
        if one["role"] == "developer" and name not in DEVELOPER:
            one["role"] = "system"
        if name in ASK_NONE and one["role"] == "assistant":
            empty = one.get("content") == "" and one.get("tool_calls")
            one["content"] = None if empty else one.get("content")
        content = one.get("content")
        if isinstance(content, list) and one["role"] not in PARTS.get(name, ()):
            one["content"] = "".join(part["text"] for part in content)
        if isinstance(content, str) and name in TYPED:
            one["content"] = [{"type": "text", "text": content}]
        if one.get("tool_calls"):
            one["tool_calls"] = [_decoded(name, one) for one in one["tool_calls"]]
        made.append(one)
    return made


def _decoded(name: str, call: dict[str, Any]) -> dict[str, Any]:
    given = call["function"]["arguments"]
    if name in JOIN:
        given = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    elif isinstance(given, str):
        given = json.loads(given)
    return {**call, "function": {**call["function"], "arguments": given}}


def theirs(name: str, tokenizer: Any, asked: Mapping[str, Any], *, answer: bool) -> str | None:
    """The text of transformers; None where it, or the template, refuses."""
    messages = meant(name, asked["messages"])
    more = {
        "tools": asked.get("tools"),
        "documents": asked.get("documents"),
        "add_generation_prompt": answer,
        **asked.get("chat_template_kwargs", {}),
    }
    try:
        if name in ASK_NONE:
            # Its renderer alone, which keeps a content that is none; other nulls are left out before.
            kept = [
                {k: v for k, v in one.items() if v is not None or k == "content"}
                for one in messages
            ]
            found, _ = chat_template_utils.render_jinja_template(
                [kept],
                chat_template=tokenizer.get_chat_template(tools=asked.get("tools")),
                **tokenizer.special_tokens_map,
                **more,
            )
            return found[0]
        return tokenizer.apply_chat_template(messages, tokenize=False, **more)
    except Exception:
        return None


def served(folder: Path) -> ServedText:
    tokenizer = Tokenizer(path=folder)
    return ServedText(
        name="m", engine=EchoEngine(tokenizer), tokenizer=tokenizer, template=find_template(folder)
    )


def as_served(model: ServedText, asked: Mapping[str, Any]) -> str:
    """The text of a request, as the server makes it."""
    body = json.dumps({"model": "m", **asked}).encode()
    fields = msgspec.json.decode(body, type=ChatFields)
    fields.check()
    return rendered(
        model,
        checked_messages(fields.messages, model),
        tools=fields.used_tools(model),
        documents=fields.documents or (),
        names=fields.chat_template_kwargs,
    )


def as_trained(model: ServedText, file: Path, row: Mapping[str, Any]) -> list[int]:
    file.write_text(json.dumps(row) + "\n")
    assert model.template is not None
    (made,) = tokenized(list(read(file)), model.template, model.tokenizer)
    return made.ids.tolist()


def tried(make: Callable[[], Any]) -> tuple[Any, str]:
    """What is made, or None and the one line of its refusal."""
    try:
        return make(), ""
    except (DataError, ProblemError) as error:
        refused = str(error)
    assert "\n" not in refused
    return None, refused


@pytest.mark.parametrize("name", some(NAMES, SEVERAL))
def test_texts_and_tokens_are_those_of_transformers(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = _folder(tmp_path_factory.getbasetemp(), name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, count = served(folder), Counter[str]()
    assert model.template is not None
    for title, row in CONVERSATIONS.items():
        # What the template takes none of is refused by name in both, and is no matter of its text.
        asked = {
            key: value
            for key, value in row.items()
            if (key != "tools" or model.template.takes_tools)
            and (key != "documents" or model.template.takes_documents)
        }
        expected = theirs(name, tokenizer, asked, answer=False)
        ids, refused = tried(lambda asked=asked: as_trained(model, folder / "row.jsonl", asked))
        if ids is None:
            # What can't be learned is not learned, though transformers has a text for it.
            left_out = "leaves the call out" in refused and "weather" not in (expected or "")
            empty = "an empty answer" in refused or "an empty question" in refused
            assert expected is None or empty or left_out, (title, refused)
        else:
            assert expected is not None, title
            assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"], title
        count["trained"] += ids is not None
        for stop in range(1, len(row["messages"])):
            if row["messages"][stop]["role"] != "assistant":
                continue
            part = {**asked, "messages": row["messages"][:stop]}
            expected = theirs(name, tokenizer, part, answer=True)
            found, refused = tried(lambda part=part: as_served(model, part))
            assert found == expected, (title, stop, refused)
            count["served"] += found is not None
    assert count["served"] >= 12
    assert count["trained"] >= 12


@pytest.mark.parametrize(("name", "title", "learned", "unopened"), LEARNED)
def test_answers_are_learned_with_their_own_ends(
    name: str,
    title: str,
    learned: Sequence[str],
    unopened: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = _folder(tmp_path_factory.getbasetemp(), name)
    template, tokenizer = find_template(folder), Tokenizer(path=folder)
    assert template is not None
    (folder / "row.jsonl").write_text(json.dumps(CONVERSATIONS[title]) + "\n")
    lines = list(read(folder / "row.jsonl"))
    (made,) = tokenized(lines, template, tokenizer)
    assert tokenizer.shown(made.ids[made.learned].tolist()) == "".join(learned)
    answers = sum(map(is_learned, lines[0].messages))
    assert made.counts["missing"] == answers - len(learned)
    assert (made.counts["unopened"], bool(made.opening)) == (unopened, unopened > 0)
    dropped = {"thought in text": 2, "reasoning of a call": 2, "reasoning": 1}
    assert made.counts["unreasoned"] == dropped.get(title, 0)


def test_special_tokens_of_an_answer_do_not_end_it(tmp_path: Path) -> None:
    """Of GLM 4.5, whose thoughts are between special tokens and whose answers end with none."""
    tokens = folders.tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokens.chat_template = (FORMS / "glm4_5.jinja").read_text()
    tokens.save_pretrained(tmp_path)
    template, tokenizer = find_template(tmp_path), Tokenizer(path=tmp_path)
    assert template is not None
    (made,) = tokenized([Line("here", CONVERSATIONS["turns"]["messages"], 0.0)], template, tokenizer)  # fmt: skip
    said = [f"\n<think></think>\n{one}" for one in "bdf"]
    assert tokenizer.shown(made.ids[made.learned].tolist()) == "".join(said)
    assert closing(template, tokenizer) is None
    # Nor does the one before the arguments of a call.
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}<think>{{ c.function.arguments | tojson }}{% endfor %}"
    text = f"{{% for m in messages %}}[{{{{ m.role }}}}]{{{{ m.content or '' }}}}{calls}{{% endfor %}}{{% if add_generation_prompt %}}[assistant]{{% endif %}}"
    (made,) = tokenized([Line("here", LOOP, 0.0)], replace(template, text=text), tokenizer)
    wanted = 'weather<think>{"city": "Zürich", "days": 2}Seven degrees.'
    assert tokenizer.shown(made.ids[made.learned].tolist()) == wanted


def test_there_are_as_many_as_promised() -> None:
    assert len(NAMES) >= 30
    assert len(CONVERSATIONS) >= 40


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_a_call_without_a_content_stays_in_the_prompt(
    content: dict[str, Any], tmp_path: Path
) -> None:
    """Of DeepSeek V3, whose template asks whether the content is none; transformers 5.24 takes it away."""
    folder = _folder(tmp_path, "deepseek_v3")
    asked = dict(CONVERSATIONS["call of no content"])
    asked["messages"] = [{**one, **content} if "tool_calls" in one else one for one in asked["messages"]]  # fmt: skip
    text = as_served(served(folder), {**asked, "messages": asked["messages"][:3]})
    assert '<|call|>function<|sep|>weather\n```json\n{"city": "Zürich", "days": 2}\n```' in text
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if content.get("content") is None:
        with pytest.raises(jinja2.UndefinedError, match="content"):
            tokenizer.apply_chat_template(meant("", asked["messages"])[:3], tokenize=False)
    ids = as_trained(served(folder), tmp_path / "row.jsonl", asked)
    assert "weather" in tokenizer.decode(ids)


CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
EITHER = f"{CALLS}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
"""Writes calls, or else a content."""


@pytest.mark.parametrize(
    ("body", "absent", "fills"),
    [
        # By another name, of a variable and of a macro's parameter, and with any test.
        ("{% set t = m.content %}{% if t is none %}" + EITHER, {"content": None}, True),
        ("{% macro f(t) %}{% if t is none %}" + EITHER + "{% endmacro %}{{ f(m['content']) }}", {"content": None}, True),
        ("{% if m.content in [none] %}" + EITHER, {"content": None}, True),
        ("{% if m.content is sameas none %}" + EITHER, {"content": None}, True),
        ("{% if m.get('content', 'x') == None %}" + EITHER, {"content": None}, True),
        ("{% if m.content in [none, ''] %}" + EITHER, {"content": None}, False),
        ("{% if m.content is none or m.content == '' %}" + EITHER, {"content": None}, False),
        # All show the call, and one is treated in a way of its own.
        ("{% if m.content is not none %}{{ m.content }}\n{% endif %}" + CALLS, {"content": None}, True),
        ("{% if m.content is defined and m.content is not none %}{{ m.content }}\n{% endif %}" + CALLS, {}, True),
        ("{% if 'content' in m %}[{{ m.content or '' }}]{% endif %}" + CALLS, {}, False),
        ("{% if m.content is not defined %}" + EITHER, {}, True),
        ("{% if not m.content %}" + EITHER, {}, False),
        # One that is none would be written as such, or refused.
        ("{{ m.content }}" + CALLS, {}, False),
        ("{{ m.content | trim }}" + CALLS, {}, False),
        ("{{ m.content + '\n' }}" + CALLS, {"content": ""}, False),
        ("{{ m.content | tojson }}" + CALLS, {"content": None}, True),
    ],
)  # fmt: skip
def test_the_content_beside_calls_is_the_one_that_shows_them(
    body: str, absent: dict[str, Any], fills: bool
) -> None:
    text = f"{{% for m in messages %}}[{{{{ m.role }}}}]{{% if m.role == 'assistant' %}}{body}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
    takes = takes_of(text)
    assert (takes.absent, takes.fills_empty) == (absent, fills)
    template = ChatTemplate(text=text, origin=Path("t"))
    asked, called = LOOP[:2]
    for content in ({}, {"content": None}, {"content": ""}):
        made = template.render([asked, {**called, **content}], answer=False)
        assert made.endswith('<call>weather{"city": "Zürich", "days": 2}')
        assert "None" not in made


def test_ids_of_calls_are_such_as_the_template_takes_back() -> None:
    """Mistral's takes nine letters and digits; a client sends the server's own ids with the next request."""
    short = {name for name in NAMES if takes_of((FORMS / f"{name}.jinja").read_text()).short_ids}
    assert short == {"mistral_v3"}
    made = ToolCall(name="f", arguments="{}")
    ids = {made.body(short=True)["id"] for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch(r"[a-z0-9]{9}", one) for one in ids)
    assert made.body(0)["id"].startswith("call")


def test_named_templates_and_their_files(tmp_path: Path) -> None:
    """As transformers saves several: one file each, which go before those of the config."""
    folder = _folder(tmp_path, "hermes")
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    found = find_template(folder)
    assert found is not None
    assert found.with_tools
    # The older form, a list in the config.
    texts = {"default": found.text, "tool_use": found.with_tools, "rag": "no"}
    listed = tmp_path / "listed"
    listed.mkdir()
    made = [{"name": name, "template": text} for name, text in texts.items()]
    (listed / "tokenizer_config.json").write_text(json.dumps({"chat_template": made}))
    again = find_template(listed)
    assert again is not None
    assert (again.text, again.with_tools) == (found.text, found.with_tools)


@pytest.mark.parametrize(
    ("template", "line", "says"),
    [
        ("a\n{{ messages[0].content + 1 }}", 2, "TypeError"),
        ("a\nb\n{{ undefined_name.field.more }}", 3, "undefined"),
        ("a\n{{ 1 // 0 }}", 2, "ZeroDivisionError"),
        ("{{ raise_exception('no\nno') }}", 1, "no no"),
        ("\n\n{% if %}", 3, "Expected an expression"),
        ("\n{{ messages | tojson(nothing=1) }}", 2, "TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}\n{{ m() }}", 1, "RecursionError"),
        ("\n{{ namespace(_a=1) }}", 2, "SecurityError|attribute"),
        ("\n{{ ().__class__.__bases__ }}", 2, "unsafe"),
        ("\n{% for i in range(10**9) %}{% endfor %}", 2, "OverflowError"),
        ("\n{{ strftime_now(1) }}", 2, "TypeError"),
        ("{% generation %}{{ messages.nothing() }}{% endgeneration %}", 1, "no attribute"),
    ],
)
def test_any_failure_of_a_template_is_one_line_with_its_line(
    template: str, line: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    found = find_template(tmp_path)
    assert found is not None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for render in (
        lambda: found.render(messages, answer=True),
        lambda: found.conversation(messages),
    ):
        with pytest.raises(SystolicError, match=says) as caught:
            render()
        assert f"at line {line}" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    ["", "ensure_ascii=False", "ensure_ascii=True", "true", "indent=2", "false, 2", "separators=(',', ':')", "sort_keys=True", "false, none, (', ', '='), true"],
)  # fmt: skip
def test_tojson_has_the_signature_of_transformers(options: str, tmp_path: Path) -> None:
    tokenizer = folders.tokenizer()
    tokenizer.chat_template = f"{{{{ messages | tojson({options}) }}}}"
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "é<&>", "a": [1, {"z": None}]}]
    found = find_template(tmp_path)
    assert found is not None
    expected = tokenizer.apply_chat_template(messages, tokenize=False)
    assert found.render(messages, answer=False) == expected
