"""JSON of the routes: bodies of requests as typed records, answers, and the error body of each protocol."""

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request

from systolic.core.errors import DataError, NotFoundError, OptionError, SystolicError
from systolic.inference.grammar import (
    Matcher,
    Rule,
    Vocabulary,
    choice_rule,
    json_rule,
    regex_rule,
    written_rule,
)
from systolic.serving.request import ExpiredError, RefusedError
from systolic.serving.text.request import SamplingParams, TextRequest

KINDS: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""Status to ``error.type`` of OpenAI's body; all others are ``invalid_request_error``."""
FINAL = (500, 504)
"""Statuses after which the official client would try again by itself, and gets the same answer."""
T = TypeVar("T")
SHOWN = 40
"""Characters of a value that an error shows."""
_WHERE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_BOUND = re.compile(r"Expected `(?:int|float)(?: \| null)?` (>=|<=|>|<) (\S+)")
_KIND = re.compile(r"Expected `([^`]+)`, got `[^`]+`")
_STEP = re.compile(r"([^.\[\]]+)|\[([0-9]+|\.\.\.)\]")
_BOUNDS = {
    ">=": "{} or more",
    "<=": "{} or less",
    ">": "more than {}",
    "<": "less than {}",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
"""Types as msgspec names them, in the words of this server's messages."""
_OF_KIND: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_IN_BOUND: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Top = Annotated[int, Meta(ge=0, le=20)]
Truncation = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""Tokens of a prompt that are kept; -1 keeps as many as the model takes."""
STOPS = 16
"""Stop strings of a request."""
LONGEST_STOP = 1024
"""Characters of a stop string; so much of a stream can be held back."""
UNSUPPORTED = (
    "suffix",
    "prompt_embeds",
    "allowed_token_ids",
    "bad_words",
    "use_beam_search",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "logits_processors",
    "chat_template",
    "continue_final_message",
    "audio",
    "prediction",
    "web_search_options",
    "functions",
    "function_call",
    "reasoning_effort",
    "verbosity",
)
"""Fields that this server knows and does not carry out."""


FORMS: Mapping[str, Callable[[Any], Rule]] = {
    "json": lambda value: json_rule(json.loads(value) if isinstance(value, str) else value),
    "regex": regex_rule,
    "choice": choice_rule,
    "grammar": written_rule,
    "json_object": lambda _: json_rule({"type": "object"}),
}
"""Forms that an answer can follow, as vLLM's ``structured_outputs`` names it, and its grammar."""


class Dialect(Enum):
    """Whose error body a path has."""

    openai = "openai"
    plain = "plain"
    """``{"error": "text"}``: the Open Inference Protocol and TensorFlow Serving."""

    @classmethod
    def of(cls, path: str) -> "Dialect":
        """The dialect of a path."""
        if path == "/v2" or (path.startswith("/v2/") and path != "/v2/rerank"):
            return cls.plain
        rest = path.removeprefix("/v1/models/")
        own = rest != path and (":" in rest or "/versions/" in rest or "/labels/" in rest)
        return cls.plain if own or path.endswith("/metadata") else cls.openai


@dataclass(kw_only=True, eq=False)
class ProblemError(Exception):
    """A request that gets an error.

    Attributes:
        status: HTTP status.
        message: One line.
        param: Field of the request that is to blame.
        code: OpenAI's short name of the error.
        retry_seconds: When to come back.
        allow: Methods that the path takes, for status 405.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_seconds: float | None = None
    allow: str | None = None

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """The JSON object of the answer."""
        if dialect is Dialect.plain:
            return {"error": self.message}
        kind = KINDS.get(self.status, "invalid_request_error")
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def headers(self) -> dict[str, str]:
        """Headers of the answer, ``Retry-After`` in whole seconds."""
        headers = {}
        if self.retry_seconds is not None:
            headers["retry-after"] = str(max(math.ceil(self.retry_seconds), 1))
            headers["x-should-retry"] = "true"
        elif self.status in FINAL:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.allow is not None:
            headers["allow"] = self.allow
        return headers


def bad(message: str, param: str | None = None, code: str | None = None) -> ProblemError:
    """A request that is wrong: 400."""
    return ProblemError(status=400, message=message, param=param, code=code)


def problem_of(error: SystolicError) -> ProblemError:
    """HTTP error for a model's refusal or a user's mistake."""
    text = str(error)
    if isinstance(error, RefusedError):
        if error.retry_seconds is None:
            return bad(text, error.parameter)
        return ProblemError(
            status=429, message=text, code="queue_full", retry_seconds=error.retry_seconds
        )
    if isinstance(error, ExpiredError):
        return ProblemError(status=504, message=text, code="deadline")
    if isinstance(error, NotFoundError):
        return ProblemError(status=404, message=text, param="model", code="model_not_found")
    if isinstance(error, OptionError | DataError):
        return bad(text)
    return ProblemError(status=500, message=text)


async def read(request: Request, kind: type[T]) -> T:
    """The body of a request as a record.

    Raises:
        ProblemError: it is no JSON, or a field has the wrong type.
    """
    return decode(await request.body(), kind)


def decode(raw: bytes, kind: type[T]) -> T:
    """Some JSON as a record; errors as :func:`read`."""
    try:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            raise _judged(str(error), raw) from error
    except RecursionError as error:
        raise bad("the body is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise bad(f"the body is not JSON ({error}); send a JSON object") from error


def _judged(text: str, raw: bytes) -> ProblemError:
    """The answer to a body of another type than asked for, by msgspec's message."""
    at = _WHERE.search(text)
    path = at[1] if at else ""
    reason = _WHERE.sub("", text)
    if missing := _MISSING.fullmatch(reason):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return bad(f"{param} is missing; send it", param)
    bound, kind = _BOUND.fullmatch(reason), _KIND.fullmatch(reason)
    kinds = kind[1].split(" | ") if kind else ()
    path, value = _located(msgspec.json.decode(raw), path, lambda value: _fits(value, bound, kinds))
    sent = f"{path or 'the body'} is {_shown(value)}"
    if bound:
        limit = bound[2] if bound[2].lstrip("-").isdigit() else f"{float(bound[2]):.15g}"
        return bad(f"{sent}; ask for {_BOUNDS[bound[1]].format(limit)}", path)
    if kind:
        names = [_KINDS.get(name, name) for name in kinds if name != "null"]
        return bad(f"{sent}; send {' or '.join(names)}", path or None)
    if reason.startswith("Invalid enum value"):
        return bad(f"{sent}, which is not supported; leave it out", path)
    return bad(f"{path or 'the body'}: {reason}", path or None)


def _located(value: Any, path: str, fits: Callable[[Any], bool]) -> tuple[str, Any]:
    """A path of msgspec's with the key that it leaves out, as in ``logit_bias[...]``, and the value there; the first that does not fit."""
    for step in _STEP.finditer(path):
        name, index = step.groups()
        if index != "...":
            value = value[int(index)] if index else value[name]
            continue
        head, rest = path[: step.start()], path[step.end() :]
        for key, entry in value.items():
            try:
                below, inner = _located(entry, rest, fits)
            except (LookupError, TypeError):  # an entry without that part
                continue
            if not fits(inner):
                return f"{head}[{msgspec.json.encode(key).decode()}]{below}", inner
    return path, value


def _fits(value: Any, bound: re.Match[str] | None, kinds: Sequence[str]) -> bool:
    """Whether a value passes the bound or is of one of the kinds that msgspec says it fails."""
    if bound:
        return type(value) in (int, float) and _IN_BOUND[bound[1]](value, float(bound[2]))
    return any(type(value) in _OF_KIND.get(kind, ()) for kind in kinds)


def _shown(value: Any) -> str:
    """A value as JSON, cut to a few characters."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def encode(value: Any) -> bytes:
    """A value as JSON; numbers that JSON has no form for become null."""
    return msgspec.json.encode(value)


def with_infinities(value: Any, written: bytes) -> Any:
    """A value of lists, objects, texts and numbers that :func:`encode` writes with its infinities, which JSON has no form for.

    Args:
        value: The value.
        written: Infinity as its readers take it: ``Infinity``, or ``1e999``, a number of JSON beyond all floats.
    """
    if isinstance(value, float) and math.isinf(value):
        return msgspec.Raw(written if value > 0 else b"-" + written)
    if isinstance(value, list):
        return [with_infinities(part, written) for part in value]
    if isinstance(value, dict):
        return {name: with_infinities(part, written) for name, part in value.items()}
    return value


class StreamOptions(Struct, kw_only=True):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFields(Struct, kw_only=True):
    """Fields that completions and chats have in common.

    Unknown fields are ignored, since clients send extras. Known ones that this server does not carry out are refused
    by :meth:`check` unless they ask for nothing.
    """

    model: str | None = None
    max_tokens: Whole | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    user: str | None = None
    # As vLLM names them.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop_token_ids: list[Whole] | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = None
    truncate_prompt_tokens: Truncation | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether ``logprobs`` name tokens by their ids, which no two of them share."""
    # What the answer follows, as OpenAI and vLLM have it.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Known and not carried out.
    best_of: int | None = None
    prompt_embeds: Any = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    use_beam_search: bool | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logits_processors: Any = None

    def check(self) -> None:
        """Refuses what is not carried out.

        Raises:
            ProblemError: the first such field.
        """
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad("best_of is not supported; ask for n answers", "best_of")
        for name in UNSUPPORTED:
            if name in self.__struct_fields__ and (value := getattr(self, name)):
                refuse(name, value)
        if self.skip_special_tokens is False:
            refuse("skip_special_tokens", False)
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options go with stream: true", "stream_options")

    @property
    def stops(self) -> list[str]:
        """Stop strings.

        Raises:
            ProblemError: there are too many, or one is empty or too long.
        """
        several = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(several) > STOPS:
            raise bad(f"stop has {len(several)} strings; at most {STOPS} are taken", "stop")
        if any(not 0 < len(stop) <= LONGEST_STOP for stop in several):
            raise bad(
                f"stop has a string that is empty or longer than {LONGEST_STOP} characters", "stop"
            )
        return several

    def rule(self) -> tuple[str, Rule] | None:
        """The field that says what the answer follows, with its grammar; None where the answer is free.

        Raises:
            ProblemError: several fields do, or it is of another form.
        """
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        wanted = {f"guided_{f}": (f, value) for f, value in guided.items() if value is not None}
        if self.structured_outputs is not None:
            wanted["structured_outputs"] = _form_of(self.structured_outputs)
        if self.response_format is not None and self.response_format.get("type") != "text":
            wanted["response_format"] = _format_of(self.response_format)
        if len(wanted) > 1:
            raise bad(f"{' and '.join(wanted)} say what the answer follows; send one", [*wanted][1])
        for name, (form, value) in wanted.items():
            try:
                return name, FORMS[form](value)
            except (OptionError, ValueError, TypeError, RecursionError) as error:
                raise bad(f"{name}: {error}", name) from error
        return None

    def written(self, words: Vocabulary) -> Callable[[int], str]:
        """How ``logprobs`` name a token: by its text, or as vLLM writes ids."""
        return "token_id:{}".format if self.return_tokens_as_token_ids else words.text

    def sampling(self, number: int, vocab_size: int) -> SamplingParams:
        """How the tokens of the choice of a number are picked.

        Raises:
            ProblemError: ``logit_bias`` names no token.
        """
        return SamplingParams(
            temperature=_given(self.temperature, 1.0),
            top_k=max(_given(self.top_k, 0), 0),
            top_p=_given(self.top_p, 1.0),
            min_p=_given(self.min_p, 0.0),
            presence_penalty=_given(self.presence_penalty, 0.0),
            frequency_penalty=_given(self.frequency_penalty, 0.0),
            repetition_penalty=_given(self.repetition_penalty, 1.0),
            logit_bias=self._bias(vocab_size),
            # Choices of a request differ; the devices count in 32 bits.
            seed=None if self.seed is None else (self.seed + number) % 2**31,
        )

    def _bias(self, vocab_size: int) -> dict[int, float]:
        bias = {}
        for name, value in (self.logit_bias or {}).items():
            if not (
                name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size
            ):
                raise bad(
                    f"logit_bias names {name[:40]!r}, which is no token of the model; ids are 0 to {vocab_size - 1}",
                    "logit_bias",
                )
            bias[int(name)] = value
        return bias

    @property
    def counts_usage(self) -> bool:
        """Whether a stream ends with the numbers of its tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_events(self) -> bool:
        """Whether every event of a stream has the numbers of tokens so far."""
        options = self.stream_options
        return self.counts_usage and options is not None and bool(options.continuous_usage_stats)

    def truncated(self, tokens: list[int], wanted: int | None, context: int) -> list[int]:
        """The last tokens of a prompt, as many as the request keeps.

        Args:
            tokens: Of the whole prompt.
            wanted: New tokens; None takes what is left, at least one.
            context: Tokens of prompt and answer together.

        Raises:
            ProblemError: the request keeps more than the model takes.
        """
        kept = self.truncate_prompt_tokens
        if kept is None:
            return tokens
        most = max(context - max(wanted or 1, 1), 0)
        if kept > most:
            raise bad(
                f"truncate_prompt_tokens is {kept}, and {most} tokens fit beside {max(wanted or 1, 1)} new ones; ask for {most} or less",
                "truncate_prompt_tokens",
            )
        kept = most if kept < 0 else kept
        return tokens[-kept:] if kept else []

    def least(self, max_tokens: int) -> int:
        """New tokens before which no text ends by itself.

        Raises:
            ProblemError: it may not have as many.
        """
        if (self.min_tokens or 0) > max_tokens:
            raise bad(
                f"min_tokens is {self.min_tokens}, and the answer has at most {max_tokens}; ask for {max_tokens} or less",
                "min_tokens",
            )
        return self.min_tokens or 0

    def text_request(
        self,
        tokens: list[int],
        *,
        number: int,
        vocab_size: int,
        max_tokens: int,
        logprobs: int | None,
        deadline_seconds: float | None,
        grammar: Matcher | None,
    ) -> TextRequest:
        """The engine's request for one choice."""
        return TextRequest(
            tokens=tokens,
            max_tokens=max_tokens,
            sampling=self.sampling(number, vocab_size),
            stop=self.stops,
            stop_tokens=self.stop_token_ids or (),
            min_tokens=self.least(max_tokens),
            priority=self.priority or 0,
            ignore_ends=bool(self.ignore_eos),
            logprobs=logprobs,
            deadline_seconds=deadline_seconds,
            grammar=grammar,
        )


def _form_of(outputs: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and value of what vLLM's ``structured_outputs`` asks for."""
    forms = [(form, outputs[form]) for form in FORMS if outputs.get(form) not in (None, False)]
    if len(forms) != 1 or outputs.get("structural_tag") is not None:
        raise bad(f"structured_outputs takes one of {', '.join(FORMS)}", "structured_outputs")
    ((form, value),) = forms
    texts = value if form == "choice" and isinstance(value, list) else [value]
    kind = dict if form == "json" and not isinstance(value, str) else str
    if form != "json_object" and (not texts or any(not isinstance(text, kind) for text in texts)):
        raise bad(f"structured_outputs.{form} is {_shown(value)}", f"structured_outputs.{form}")
    return form, value


def _format_of(wanted: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and value of what OpenAI's ``response_format`` asks for."""
    if wanted.get("type") == "json_object":
        return "json_object", None
    if wanted.get("type") != "json_schema":
        raise bad(
            f"response_format.type is {_shown(wanted.get('type'))}; it takes text, json_object or json_schema",
            "response_format",
        )
    described = wanted.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise bad(
            "response_format.json_schema has no schema; send {name, schema}", "response_format"
        )
    return "json", schema


def refuse(name: str, value: object) -> None:
    """Refuses a field.

    Raises:
        ProblemError: always.
    """
    shown = msgspec.json.encode(value).decode()[:40]
    raise bad(
        f"{name} is {shown} and not supported here; leave it out", name, "unsupported_parameter"
    )


def room(prompt: int, max_tokens: int | None, context: int, param: str, field: str) -> int:
    """New tokens that a request may have.

    Args:
        prompt: Tokens of the prompt.
        max_tokens: Most new tokens; None takes what is left.
        context: Tokens of prompt and answer together.
        param: Field of the prompt.
        field: Field of the number of new tokens.

    Raises:
        ProblemError: they do not fit.
    """
    if prompt == 0:
        raise bad(f"{param} has no tokens; send some text", param)
    wanted = 1 if max_tokens is None else max_tokens
    if wanted >= context > prompt:
        raise bad(
            f"{field} is {wanted} and the model's context is {context} tokens, of which {param} takes {prompt}; ask for {context - prompt} or fewer",
            field,
            "context_length_exceeded",
        )
    if prompt + wanted > context:
        counts = f"{prompt} tokens" + (f" and up to {max_tokens} new ones" if max_tokens else "")
        raise bad(
            f"the model's context is {context} tokens and the request has {counts}; shorten {param} or ask for fewer",
            param,
            "context_length_exceeded",
        )
    return context - prompt if max_tokens is None else max_tokens


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
