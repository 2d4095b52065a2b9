"""Prompts: texts to continue and messages to answer, from words, files and standard input."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, NotFoundError, OptionError

Messages = Sequence[Mapping[str, Any]]
"""``role`` and ``content`` of each message of a chat."""


def several(prompts: str | Messages | Sequence[str | Messages]) -> list[Any]:
    """Prompts as a list; a list of messages is one prompt.

    Raises:
        OptionError: they are neither a text nor a list.
    """
    if not isinstance(prompts, str | Iterable) or isinstance(prompts, Mapping):
        raise OptionError(
            f"prompts is {prompts!r}; give a text or a list of texts, messages or a list of such lists"
        )
    listed: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    return [listed] if listed and isinstance(listed[0], Mapping) else listed


def read_prompts(
    prompts: str | Messages | Sequence[str | Messages], file: Path | None
) -> list[Any]:
    """Prompts with those of a file, texts or messages; ``-`` is standard input, and one that is empty stands for none.

    Raises:
        NotFoundError: no such file.
        DataError: it is no text, a line is no JSON object with a prompt or messages, or there is none in it.
    """
    listed = [
        sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        for prompt in several(prompts)
    ]
    return (listed or [""]) if file is None else listed + _lines(file)


def _lines(file: Path) -> list[Any]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except OSError as error:
        raise NotFoundError(f"{file} cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    # A byte order mark of some editors is no part of the first prompt.
    lines: list[Any] = [line for line in text.removeprefix("\ufeff").splitlines() if line.strip()]
    if file.suffix == ".jsonl":
        lines = [_prompt(line, file, number + 1) for number, line in enumerate(lines)]
    if not lines:
        raise DataError(f"{file} has no prompt; write one a line")
    return lines


def _prompt(line: str, file: Path, number: int) -> Any:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{file}: prompt {number} is not JSON ({error})") from error
    if isinstance(row, dict) and isinstance(row.get("messages"), list) and row["messages"]:
        return row["messages"]
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list):
        raise DataError(
            f"{file}: prompt {number} has neither a text in the field prompt nor a list of turns in messages"
        )
    return row["prompt"]


def turns_of(prompt: Any, *, chat: bool, system: str | None) -> str | Messages:
    """A prompt as the model is asked: a text to continue, or the messages of a chat.

    Raises:
        OptionError: it is neither, or the messages end with an answer or have a system's message beside the one that is given.
    """
    if isinstance(prompt, str):
        if not chat and system is None:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, Sequence) or not prompt:
        raise OptionError(f"the prompt is {prompt!r}; give a text, or a list of messages")
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise OptionError(
                f"message {number} of the prompt is {message!r}; give role and content"
            )
        if message.get("content") is None and not message.get("tool_calls"):
            raise OptionError(f"message {number} of the prompt has no content; give a text")
    if prompt[-1]["role"] == "assistant":
        raise OptionError(
            "the messages of the prompt end with an answer; end them with what the model shall answer"
        )
    if system is None:
        return prompt
    if prompt[0]["role"] == "system":
        raise OptionError(
            "the prompt has a system message and another one is given; leave one of them out"
        )
    return [{"role": "system", "content": system}, *prompt]
