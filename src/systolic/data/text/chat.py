"""Chat templates of published tokenizers: messages to the text that the model was trained on.

The template is a program of whoever made the model, see :mod:`systolic.data.text.messages`; what it sees of the
messages is in :mod:`systolic.data.text.messages`. Serving and training have their texts from here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2.meta

from systolic.core.errors import DataError, NotFoundError
from systolic.data.text.messages import (
    ANSWERS,
    CLOSE,
    ONE,
    OPEN,
    TOKENS,
    Messages,
    arguments_of,
    check,
    environment,
    is_learned,
    prepared,
    rendered,
    text_of,
)
from systolic.data.text.tokenizer import CONFIG, Tokenizer, read_fields, token_config, token_text

TEMPLATE = "chat_template.jinja"
"""File of a template, which goes before the one in tokenizer_config.json."""
MORE = "additional_chat_templates"
"""Folder of templates with other names, beside that file."""
OLDER = "chat_template.json"
"""File of a processor with a template, of before there was :data:`TEMPLATE`."""
BOS, EOS = "bos_token", "eos_token"
KEPT = "chat_tokens.json"
"""File of a run with the special tokens of its chat template, which go before those of tokenizer_config.json."""
DEFAULT, TOOLS = "default", "tool_use"
"""Names of the template to use where there are several, and of the one to use with tools."""
TOOL_TEMPLATE = f"{MORE}/{TOOLS}.jinja"
"""File of the latter."""

DATE = date(2024, 7, 26)
"""Result of ``strftime_now`` in training, so that a run that resumes another day reads the same text; templates of Llama 3 have this default."""
PLAIN = (
    "{{ bos_token or '' }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "### Response:\n{% generation %}{{ message.content }}{{ eos_token or '' }}{% endgeneration %}{{ '\n\n' }}"
    "{% else %}### {{ 'System' if message.role == 'system' else 'Instruction' }}:\n{{ message.content }}{{ '\n\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
"""Template for a model without one."""

TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endofturn|>",
    "[|endofturn|]",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
    "<|eot|>",
    "<|end_of_text|>",
    "<|endoftext|>",
)
"""Tokens that end a turn or a text by what they say, as llama.cpp knows them (``llama-vocab.cpp``), whose files may name another end."""
SHORT: Messages = ({"role": "user", "content": "a"}, {"role": ANSWERS, "content": ONE})
"""A question with its answer."""
MARK = "\ue0f2"
"""Stands for the words of an answer that is looked for, of Unicode's private use."""
WORDS = 24
"""Characters of an answer's end that it is known by."""
CHANNEL_END, CHANNELS = "<|end|>", "<|channel|>"
"""A token that ends one channel of several in the answers of gpt-oss, which goes on behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Characters [start, stop) of each answer, with what the template puts behind it."""
    words: tuple[tuple[str, ...], ...] = ()
    """End of each answer's content, and the names and texts of its calls; none where generation blocks mark the answers."""
    missing: int = 0
    """Answers that the template writes otherwise where later turns follow than as the last turn, so that they can't be told from the rest."""
    unopened: tuple[str, ...] = ()
    """For each answer that lacks them, the words that the template begins an answer with in a prompt alone."""


class _AnswerPlace(NamedTuple):
    """Place of an answer in a text."""

    start: int
    stop: int
    unopened: str = ""
    """Words that begin it in a prompt and not here."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The chat template of a tokenizer.

    Raises (from :meth:`render`):
        DataError: the template is damaged, or refuses the messages.
    """

    text: str
    """The template, Jinja."""
    with_tools: str = ""
    """The template for conversations with tools, where the model has one for them; else ""."""
    tokens: tuple[tuple[str, str], ...] = ()
    """Special tokens by the names that the template has for them."""
    origin: Path
    """Its file, for messages."""

    @property
    def takes_tools(self) -> bool:
        """Whether it tells the model of tools."""
        return _reads(self.chosen(tools=True), "tools")

    @property
    def takes_documents(self) -> bool:
        """Whether it gives the model documents."""
        return _reads(self.text, "documents")

    def chosen(self, *, tools: bool) -> str:
        """The template for a conversation."""
        return self.with_tools if tools and self.with_tools else self.text

    def render(
        self,
        messages: Messages,
        *,
        answer: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] = (),
        names: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The text of a conversation, special tokens included.

        Args:
            messages: From the first to the last.
            answer: Whether the text ends where the model's next answer begins.
            tools: Descriptions of functions that the model may call, for a template that takes them.
            documents: Texts to answer from, for a template that takes them.
            names: What else the template may ask for, such as ``enable_thinking``.
        """
        variables = {**names, "tools": list(tools) or None, "documents": list(documents) or None}
        return self._text(messages, variables, answer=answer)

    def conversation(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] = (),
        names: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rendered:
        """A whole conversation for training, and where its answers are: the template's generation blocks, else what each answer adds to the text before it. Answers that are not to be learned are not among them.

        Args:
            messages: From the first to the last.
            tools: As for :meth:`render`.
            documents: As for :meth:`render`.
            names: As for :meth:`render`.

        Raises:
            DataError: also where no answer can be told from the rest.
        """
        variables = {
            "strftime_now": DATE.strftime,
            **names,
            "tools": list(tools) or None,
            "documents": list(documents) or None,
        }
        text = self._text(messages, variables, answer=False)
        learned = [number for number, message in enumerate(messages) if is_learned(message)]
        if "endgeneration" in self.chosen(tools=bool(tools)):
            marked = self._text(messages, variables, answer=False, marked=True)
            if OPEN in marked and (unmarked := _unmarked(marked))[0] == text:
                spans = unmarked[1]
                answers = [
                    number for number, message in enumerate(messages) if message["role"] == ANSWERS
                ]
                if learned == answers:
                    return Rendered(text=text, answers=tuple(spans))
                if len(spans) == len(answers):
                    kept = zip(answers, spans, strict=True)
                    return Rendered(text=text, answers=tuple(s for n, s in kept if n in learned))
        return self._told(messages, learned, variables, text)

    def _told(
        self, messages: Messages, learned: Sequence[int], variables: Mapping[str, Any], text: str
    ) -> Rendered:
        """A conversation with its answers told from the turns before them."""
        answers, missing, reason = [], 0, None
        for number in learned:
            try:
                place = self._answer(messages, number, variables, text)
            except DataError as error:  # It refuses the beginning of what it takes as a whole.
                missing, reason = missing + 1, error
                continue
            if place is None:
                missing += 1
            else:
                answers.append((place, _words_of(messages[number])))
        if missing and not answers:
            raise DataError(
                f"the chat template of {self.origin} does not put answers behind the turns before them, so that the loss can't be on the answers alone; mark them in it with generation blocks, or give another with --template"
            ) from reason
        return Rendered(
            text=text,
            answers=tuple((answer.start, answer.stop) for answer, _ in answers),
            words=tuple(words for _, words in answers),
            missing=missing,
            unopened=tuple(answer.unopened for answer, _ in answers if answer.unopened),
        )

    def _answer(
        self, messages: Messages, number: int, variables: Mapping[str, Any], text: str
    ) -> "_AnswerPlace | None":
        """Place of an answer in the text of its conversation; ``None`` where it is written otherwise there than as the last turn."""
        upto, behind = messages[:number], messages[: number + 1]
        after = self._text(behind, variables, answer=False)
        before = (
            self._text(upto, variables, answer=True)
            if number
            else self._header(messages[0], variables, after)
        )
        if before is None:
            return None
        if after.startswith(before) and text.startswith(after):
            return _AnswerPlace(len(before), len(after))
        same = _common(after, text)
        if after.startswith(before) and same >= len(before):
            ends = (
                after.find(word, len(before)) + len(word) for word in _words_of(messages[number])
            )
            if any(end > same for end in ends):  # Its own words are written otherwise there.
                return None
        # By its own words, as what stands around it is written otherwise there.
        last = self._place(behind, number, variables, after)
        here = self._place(messages, number, variables, text)
        if last is None or here is None:
            return None
        opened = self._start(upto, variables, before, after, last[0])
        calls = bool(messages[number].get("tool_calls"))
        if opened is None and calls:  # A call is known by its name, which does not begin it.
            return None
        spaces = last[0] - len(after[: last[0]].rstrip(" "))
        start, head, unopened = opened or (last[0] - spaces, "", "")
        whole = after[start - len(head) : last[1]]
        lead = last[0] - start
        if text[max(0, here[0] - lead - len(head)) : here[1]] != whole:
            return None
        ending = self._ending(messages[number], variables, after[last[1] :])
        tail = _tail(ending, text[here[1] :], [token for _, token in self.tokens])
        if not tail and calls:
            return None
        return _AnswerPlace(here[0] - lead, here[1] + tail, unopened)

    def _start(
        self, upto: Messages, variables: Mapping[str, Any], before: str, after: str, content: int
    ) -> tuple[int, str, str] | None:
        """Start of an answer in a text that ends with it, the words that begin it, and those of a prompt that it lacks; ``None`` where only its own words tell."""
        plain = self._text(upto, variables, answer=False) if upto else ""
        words = before.removeprefix(plain)
        if after.startswith(before):
            return len(before), words if before.startswith(plain) else "", ""
        if not before.startswith(plain):
            return None
        at = after.rfind(words, 0, content) if words else -1
        if at >= 0 and at + len(words) >= _common(before, after):
            return at + len(words), words, ""
        any_answer = self._text(
            [*upto, {"role": ANSWERS, "content": MARK}], variables, answer=False
        )
        header = any_answer.partition(MARK)[0].removeprefix(plain)
        if not any_answer.startswith(plain) or not after.startswith(plain + header):
            return None
        return len(plain + header), header, words[_common(words, header) :]

    def _ending(self, message: Mapping[str, Any], variables: Mapping[str, Any], behind: str) -> str:
        """End of an answer, from the text behind its words: without tools or documents that a template puts last."""
        tools = variables["tools"] if self.with_tools else None
        try:
            bare = self._text(
                [SHORT[0], message], {**variables, "tools": tools, "documents": None}, answer=False
            )
        except DataError:
            return behind
        return next(
            (behind[:n] for n in range(len(behind), 0, -1) if bare.endswith(behind[:n])), ""
        )

    def _place(
        self, messages: Messages, number: int, variables: Mapping[str, Any], text: str
    ) -> tuple[int, int] | None:
        """Characters [start, stop) that change with an answer's words; ``None`` where none do."""
        marked = [*messages[:number], _marked(messages[number]), *messages[number + 1 :]]
        other = self._text(marked, variables, answer=False)
        start = _common(text, other)
        stop = len(text) - _common(text[start:][::-1], other[start:][::-1])
        return (start, stop) if MARK in other and start < stop else None

    def _header(
        self, message: Mapping[str, Any], variables: Mapping[str, Any], text: str
    ) -> str | None:
        """Text before an answer that a conversation begins with: up to the end of the words that begin any answer, or up to its content."""
        question = SHORT[:1]
        plain = self._text(question, variables, answer=False)
        words = self._text(question, variables, answer=True).removeprefix(plain)
        if words and words in text:
            return text[: text.index(words) + len(words)]
        place = self._place([message], 0, variables, text)
        return text[: place[0]] if place and message.get("content") else None

    def _text(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        *,
        answer: bool,
        marked: bool = False,
    ) -> str:
        """The text of messages; the names given go before special tokens and the template's functions."""
        template = self.chosen(tools=variables["tools"] is not None)
        if not messages:
            raise DataError("the conversation has no message; give at least one")
        # transformers defines tools and documents for every template, which may ask whether they are none.
        values = {
            **dict(self.tokens),
            **variables,
            "messages": prepared(messages, template),
            "add_generation_prompt": answer,
        }
        return rendered(template, self.origin, values, marked=marked)


def _words_of(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The end of an answer's content, and the names and texts of its calls."""
    words = [text_of(message.get("content")).strip()[-WORDS:]]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = arguments_of(call)
        values = arguments.values() if isinstance(arguments, Mapping) else ()
        words += [word for word in (function.get("name"), *values) if isinstance(word, str)]
    return tuple(word for word in words if word)


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """An answer with :data:`MARK` as its words."""
    marked = dict(message)
    if message.get("content"):
        marked["content"] = MARK
    if calls := message.get("tool_calls"):
        last = calls[-1]
        inner = {**last.get("function", last), "name": MARK}
        marked["tool_calls"] = [*calls[:-1], {**last, "function": inner} if "function" in last else inner]  # fmt: skip
    return marked


def _common(text: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[:middle] == other[:middle] else (low, middle - 1)
    return low


def _tail(last: str, here: str, tokens: Sequence[str]) -> int:
    """How much of what stands behind an answer that is the last also stands behind it here: all, or all but the text's last token or white space."""
    cut = [last, *(last.removesuffix(token) for token in tokens if token and last.endswith(token))]
    for tail in (*cut, *(ending.rstrip() for ending in cut)):
        if tail and here.startswith(tail):
            return len(tail)
    return 0


@lru_cache(maxsize=32)
def _reads(template: str, name: str) -> bool:
    """Whether a template reads a name; not one that does not parse, as its rendering says."""
    try:
        return name in jinja2.meta.find_undeclared_variables(environment().parse(template))
    except jinja2.TemplateSyntaxError:
        return False


def find_template(folder: Path) -> ChatTemplate | None:
    """The chat template beside a tokenizer.json; ``None`` if there is none.

    Raises:
        DataError: tokenizer_config.json is no JSON.
    """
    named, origin = named_templates(folder)
    text = named.get(DEFAULT)
    if text is None and len(named) == 1:
        (text,) = named.values()
    if text is None:
        return None
    return ChatTemplate(
        text=text,
        with_tools=named.get(TOOLS, ""),
        tokens=special_tokens(folder),
        origin=origin,
    )


def named_templates(folder: Path) -> tuple[dict[str, str], Path]:
    """Templates beside a tokenizer.json by their names, and the file of the default one for messages.

    Raises:
        DataError: tokenizer_config.json is no JSON.
    """
    origin = folder / CONFIG
    templates = token_config(folder).get("chat_template")
    if isinstance(templates, list):
        templates = {
            template.get("name"): template.get("template")
            for template in templates
            if isinstance(template, Mapping)
        }
    elif isinstance(templates, str):
        templates = {DEFAULT: templates}
    several = templates if isinstance(templates, Mapping) else {}
    named = {str(name): text for name, text in several.items() if isinstance(text, str)}
    if not named and (folder / OLDER).is_file():
        older = read_fields(folder / OLDER).get("chat_template")
        named, origin = {DEFAULT: older} if isinstance(older, str) else {}, folder / OLDER
    if (folder / TEMPLATE).is_file():
        # As for transformers, files take the place of all that the config names.
        named, origin = {DEFAULT: _read(folder / TEMPLATE)}, folder / TEMPLATE
    for file in sorted((folder / MORE).glob("*.jinja")):
        named[file.stem] = _read(file)
    return named, origin


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8; copy it again") from error


def template_for(folder: Path | None, file: Path | None) -> ChatTemplate:
    """The chat template to train with: of a file, else the one beside a tokenizer.json, else :data:`PLAIN`; with the tokenizer's special tokens.

    Args:
        folder: The tokenizer's folder; None where there is none.
        file: A template.

    Raises:
        NotFoundError: the file can't be read.
        DataError: the template does not parse, or tokenizer_config.json is no JSON.
    """
    known = None if folder is None else find_template(folder)
    tokens = () if folder is None else special_tokens(folder)
    if file is not None:
        try:
            text = _read(file)
        except OSError as error:
            raise NotFoundError(
                f"{file} can't be read ({error.strerror}); check --template"
            ) from error
        known = ChatTemplate(text=text, tokens=tokens, origin=file)
    elif known is None:
        known = ChatTemplate(text=PLAIN, tokens=tokens, origin=Path("plain"))
    for text in filter(None, (known.text, known.with_tools)):
        check(text, known.origin)
    return known


def turn_ends(template: ChatTemplate | None, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end an answer: tokens that say so, and the one that the template writes behind an answer."""
    if tokenizer.path is None:
        return frozenset()
    texts = set(TURN_ENDS)
    if tokenizer.find(CHANNELS) is not None:
        texts.discard(CHANNEL_END)
    ends = {number for text in texts if (number := tokenizer.find(text)) is not None}
    return frozenset(ends if template is None else ends | _written_end(template, tokenizer))


def _written_end(template: ChatTemplate, tokenizer: Tokenizer) -> set[int]:
    try:
        text = template.render(SHORT, answer=False)
    except DataError:  # It takes no such conversation.
        return set()
    behind = text.rfind(ONE) + len(ONE)
    ((ids, starts, special),) = tokenizer.spans([text])
    ends = ids[(starts >= behind) & special] if ONE in text else ids[:0]
    return {int(number) for number in ends[:1]}


def special_tokens(folder: Path) -> tuple[tuple[str, str], ...]:
    """Special tokens beside a tokenizer.json, by the names that templates have for them; of a run those that it was trained with."""
    if kept := read_fields(folder / KEPT):
        return tuple((name, kept[name]) for name in TOKENS if name in kept)
    config = token_config(folder)
    tokens = {name: token_text(config.get(name)) for name in TOKENS}
    unsaid = [name for name in (BOS, EOS) if name not in config]
    if unsaid and (folder / "tokenizer.json").is_file():
        # Those that the tokenizer is used with, which are known by their names.
        tokenizer = Tokenizer(path=folder)
        ids = {BOS: tokenizer.start, EOS: tokenizer.end}
        tokens |= {
            name: tokenizer.token(number) for name in unsaid if (number := ids[name]) is not None
        }
    return tuple((name, text) for name, text in tokens.items() if text is not None)


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Text without the marks, and the characters that they enclosed."""
    first, *parts = text.split(OPEN)
    out, spans = first, []
    for part in parts:
        inside, _, rest = part.partition(CLOSE)
        if inside:
            spans.append((len(out), len(out) + len(inside)))
        out += inside + rest
    return out, spans
