"""Fields of requests for text, as OpenAI names them, and the requests of an engine that they make."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from systolic.serving.http.problems import bad
from systolic.serving.http.vocabulary import Vocabulary
from systolic.serving.text.request import TextRequest, TokenChoice

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Top = Annotated[int, Meta(ge=0, le=20)]
STOPS = 16
"""Stop strings of a request."""
LONGEST_STOP = 1024
"""Characters of a stop string; so much of a stream can be held back."""


class StreamOptions(Struct, kw_only=True):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFields(Struct, kw_only=True):
    """What completions and chats have in common.

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
    return_tokens_as_token_ids: bool | None = None
    """Whether ``logprobs`` name tokens by their ids, which no two of them share."""
    # Known and not carried out.
    response_format: dict[str, Any] | None = None
    min_tokens: int | None = None
    best_of: int | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    truncate_prompt_tokens: int | None = None
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
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise bad(
                "response_format other than text is not supported; leave it out", "response_format"
            )
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
        if any(not 0 < len(one) <= LONGEST_STOP for one in several):
            raise bad(
                f"stop has a string that is empty or longer than {LONGEST_STOP} characters", "stop"
            )
        return several

    def written(self, words: Vocabulary) -> Callable[[int], str]:
        """How ``logprobs`` name a token: by its text, or as vLLM writes ids."""
        return "token_id:{}".format if self.return_tokens_as_token_ids else words.text

    def choice(self, number: int, vocab_size: int) -> TokenChoice:
        """How the tokens of the choice of a number are picked.

        Raises:
            ProblemError: ``logit_bias`` names no token.
        """
        return TokenChoice(
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
        found = {}
        for name, value in (self.logit_bias or {}).items():
            if not (
                name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size
            ):
                raise bad(
                    f"logit_bias names {name[:40]!r}, which is no token of the model; ids are 0 to {vocab_size - 1}",
                    "logit_bias",
                )
            found[int(name)] = value
        return found

    def text_request(
        self,
        tokens: list[int],
        *,
        number: int,
        vocab_size: int,
        max_tokens: int,
        logprobs: int | None,
        deadline_seconds: float | None,
    ) -> TextRequest:
        """The engine's request for one choice."""
        return TextRequest(
            tokens=tokens,
            max_tokens=max_tokens,
            choice=self.choice(number, vocab_size),
            stop=self.stops,
            stop_tokens=self.stop_token_ids or (),
            ignore_ends=bool(self.ignore_eos),
            logprobs=logprobs,
            deadline_seconds=deadline_seconds,
        )


UNSUPPORTED = (
    "suffix",
    "min_tokens",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "truncate_prompt_tokens",
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


def refuse(name: str, value: object) -> None:
    """Refuses a field.

    Raises:
        ProblemError: always.
    """
    shown = msgspec.json.encode(value).decode()[:40]
    raise bad(
        f"{name} is {shown} and not supported here; leave it out", name, "unsupported_parameter"
    )


def room(prompt: int, asked: int | None, context: int, param: str, field: str) -> int:
    """New tokens that a request may have.

    Args:
        prompt: Tokens of the prompt.
        asked: Most new tokens; None takes what is left.
        context: Tokens of prompt and answer together.
        param: Field of the prompt.
        field: Field of the number of new tokens.

    Raises:
        ProblemError: they do not fit.
    """
    if prompt == 0:
        raise bad(f"{param} has no tokens; send some text", param)
    wanted = 1 if asked is None else asked
    if wanted >= context > prompt:
        raise bad(
            f"{field} is {wanted} and the model's context is {context} tokens, of which {param} takes {prompt}; ask for {context - prompt} or fewer",
            field,
            "context_length_exceeded",
        )
    if prompt + wanted > context:
        told = f"{prompt} tokens" + (f" and up to {asked} new ones" if asked else "")
        raise bad(
            f"the model's context is {context} tokens and the request has {told}; shorten {param} or ask for fewer",
            param,
            "context_length_exceeded",
        )
    return context - prompt if asked is None else asked


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
