"""Fields of requests that other servers have, and parts of transcripts."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from systolic.data.text.chat import ChatTemplate
from systolic.serving.http.transcriptions import _events
from tests.serving.http.running import CHAT, echo_model, running
from tests.serving.http.test_openai import HELLO


def test_names_of_a_template_are_given_to_it() -> None:
    text = CHAT.replace("<assistant>", "<assistant>{% if not enable_thinking %}quiet{% endif %}")
    template = ChatTemplate(text=text, origin=Path("test"))
    with running([replace(echo_model(), template=template)]) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        used = []
        for thinks in (True, False):
            names = {"chat_template_kwargs": {"enable_thinking": thinks}}
            asked: dict[str, Any] = {"model": "echo", "messages": HELLO, "max_tokens": 2}
            found = client.chat.completions.create(**asked, extra_body=names)
            used.append(found.usage.prompt_tokens)
        assert used[1] - used[0] == len("quiet")
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs has messages"):
            client.chat.completions.create(
                **asked, extra_body={"chat_template_kwargs": {"messages": []}}
            )


@pytest.mark.parametrize(
    ("name", "value"),
    [("allowed_token_ids", [5]), ("bad_words", ["a"]), ("use_beam_search", True), ("prompt_logprobs", 1), ("include_stop_str_in_output", True), ("skip_special_tokens", False), ("logits_processors", ["x"]), ("chat_template", "x"), ("add_generation_prompt", False), ("continue_final_message", True)],
)  # fmt: skip
def test_fields_of_other_servers_that_would_change_the_answer_are_refused(
    client: openai.OpenAI, name: str, value: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="echo", messages=HELLO, extra_body={name: value})
    assert found.value.param == name


def test_parts_of_a_transcript_are_its_text() -> None:
    said = [{"text": text} for text in ("", " Hello.", "", " World.")]

    async def parts() -> list[Any]:
        made = _events("Hello. World.", said)
        return [json.loads(one.removeprefix(b"data: ")) async for one in made]

    events = asyncio.run(parts())
    assert "".join(one["delta"] for one in events[:-1]) == events[-1]["text"] == "Hello. World."
