"""Fields of requests that other servers have, and parts of transcripts."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers

from systolic.data.text.chat import ChatTemplate
from systolic.data.text.tokenizer import Tokenizer
from systolic.serving.http.transcriptions import _events
from tests.serving.http.echo import EchoEngine
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


def test_tokens_with_the_same_text_in_log_probabilities(tmp_path: Path) -> None:
    # As SentencePiece has it, a byte and a piece are both "A".
    pieces = [("<unk>", 0.0), ("<0x41>", -9.0), ("A", -1.0), ("B", -1.0)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, byte_fallback=True))
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    plain = echo_model()
    tokenizer = Tokenizer(path=tmp_path)
    model = replace(plain, engine=EchoEngine(tokenizer), tokenizer=tokenizer)
    with running([model]) as one, openai.OpenAI(base_url=f"{one.url}/v1", api_key="x") as http:
        asked: dict[str, Any] = {"model": "echo", "prompt": [1], "max_tokens": 1, "logprobs": 2}
        found = http.completions.create(**asked).choices[0].logprobs
        assert found is not None
        # The echo gives id 1 -1/2 and the next one -2.
        assert (found.tokens, found.top_logprobs) == (["A"], [{"A": -0.5}])
        ids = {"return_tokens_as_token_ids": True}
        found = http.completions.create(**asked, extra_body=ids).choices[0].logprobs
        assert found is not None
        assert found.tokens == ["token_id:1"]
        assert found.top_logprobs == [{"token_id:1": -0.5, "token_id:2": -2.0}]
        said = http.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "A"}],
            max_tokens=1, logprobs=True, top_logprobs=1, extra_body=ids,
        ).choices[0].logprobs  # fmt: skip
        assert said is not None
        assert said.content is not None
        assert said.content[0].top_logprobs[0].token.startswith("token_id:")


def test_new_tokens_are_by_default_as_many_as_fit() -> None:
    with running([echo_model(context=8)]) as one, one.client() as http:
        asked = {"model": "echo", "prompt": "hello"}
        assert http.post("/v1/completions", json=asked).json()["usage"]["total_tokens"] == 8
        found = http.post("/v1/completions", json={**asked, "max_tokens": 8}).json()["error"]
    told = "max_tokens is 8 and the model's context is 8 tokens, of which prompt takes 6; ask for 2 or fewer"
    assert (found["message"], found["code"]) == (told, "context_length_exceeded")
