"""Shared state of the routes, and the context of each request."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Message, Receive, Send

from systolic.core.errors import NotFoundError
from systolic.serving.http.keys import HttpLimits, TokenBucket
from systolic.serving.http.metrics import Metrics
from systolic.serving.http.protocol import Dialect, ProblemError, bad, encode
from systolic.serving.registry import (
    Key,
    ModelRegistry,
    Served,
    ServedBatch,
    ServedText,
)
from systolic.serving.text.request import TextOutput

if TYPE_CHECKING:
    from systolic.serving.http.process import Process

CONTEXT = "systolic.context"
"""Key of the context in a request's ASGI scope."""
ALIVE = 6
"""Times ``heartbeat_seconds`` after which a loop that does not turn is dead."""
DRAIN_RETRY_SECONDS = 5.0


@dataclass(kw_only=True, eq=False)
class RequestContext:
    """One HTTP request from its headers to the last byte of its answer."""

    id: str
    receive: Receive
    send: Send
    body_left: int
    """Bytes that the rest of its body may have."""
    body_seconds: float
    """Time in which its body has to arrive."""
    begun: float = field(default_factory=time.monotonic)
    key: str | None = None
    """Name of the API key."""
    rates: dict[str, TokenBucket] = field(default_factory=dict)
    """Rates of the key, by what is counted."""
    deadline_seconds: float | None = None
    model: str | None = None
    prompt: str | None = None
    """Kept for the log where prompts are asked for."""
    held: ExitStack = field(default_factory=ExitStack)
    """Closed when the answer has ended: streams are cancelled, models let go."""
    status: int = 0
    """HTTP status of the answer; 0 until it begins."""
    answer_id: str = ""
    """Id of an answer in OpenAI's form."""
    created: int = 0
    """Unix seconds of that answer."""
    prompt_tokens: int | None = None
    """None until tokens are counted, as the two below."""
    completion_tokens: int = 0
    cached_tokens: int = 0
    examples: int = 1
    """Prompts, or examples of a batch model."""
    choices: int = 1
    """Texts for each prompt."""
    finish: str | None = None
    ended: list[TextOutput] = field(default_factory=list)
    """Last outputs of its texts."""
    first_byte_seconds: float | None = None
    gone: bool = False
    """Whether the client left before the end."""
    whole: bool = False
    """Whether the body has arrived."""
    cut: bool = False
    """Whether the rest of the body is not read, so that the connection ends with the answer."""
    sent: bool = False
    """Whether the whole answer was sent; to leave then is no cancel."""

    @classmethod
    def of(cls, request: Request) -> "RequestContext":
        """The context of a request."""
        return request.scope[CONTEXT]

    def spend(self, tokens: int) -> None:
        """Counts tokens against the key's rate."""
        if (bucket := self.rates.get("tokens")) is not None:
            bucket.spend(tokens, time.monotonic())

    def at_end(self, work: Callable[[], object]) -> None:
        """Does something when the request ends, for whatever reason."""
        self.held.callback(work)

    def answer(self, prefix: str) -> None:
        """Begins an answer in OpenAI's form, whose id has a prefix."""
        self.answer_id, self.created = new_id(prefix), int(time.time())

    def body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The answer, or an event of it, in OpenAI's form."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def count(
        self, outputs: Sequence[TextOutput], choices: int, *, only_prompts: bool = False
    ) -> dict[str, object]:
        """Counts the tokens of all texts; ``usage`` as clients read it.

        Args:
            outputs: Last outputs, the choices of a prompt beside each other.
            choices: Texts for each prompt, which counts once.
            only_prompts: Whether no new tokens were asked for; the one that the engine made anyway does not count.
        """
        firsts = outputs[::choices]
        prompt = self.prompt_tokens = sum(output.prompt_tokens for output in firsts)
        self.cached_tokens = sum(output.cached_tokens for output in firsts)
        written = 0 if only_prompts else sum(output.completion_tokens for output in outputs)
        self.completion_tokens, self.examples, self.choices = written, len(firsts), choices
        details = {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
        return {**usage(prompt, written), **details}

    async def receive_body(self) -> Message:
        """The next part of the body, as long as it is not too large nor too slow; then the client's leaving."""
        if self.whole:
            message = await self.receive()
        else:
            try:
                async with asyncio.timeout(self.begun + self.body_seconds - time.monotonic()):
                    message = await self.receive()
            except TimeoutError as error:
                self.cut = True
                raise ProblemError(
                    status=408, message="the body did not arrive in time; send it at once"
                ) from error
        if message["type"] == "http.disconnect":
            self.gone |= not (self.sent or self.finish)
            return message
        self.body_left -= len(message.get("body", b""))
        if self.body_left < 0:
            self.cut = True
            raise too_large(None)
        self.whole = not message.get("more_body", False)
        return message

    async def send_answer(self, message: Message) -> None:
        """Hands a part of the answer on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = {"x-request-id": self.id}
            if self.cut:
                own["connection"] = "close"
            for what, bucket in self.rates.items():
                own.update(bucket.headers(what))
            pairs = [(name.encode(), value.encode()) for name, value in own.items()]
            message["headers"] = [*message.get("headers", []), *pairs]
        elif self.first_byte_seconds is None:
            self.first_byte_seconds = round(time.monotonic() - self.begun, 6)
        await self.send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.sent = True

    async def send_problem(self, problem: ProblemError, path: str) -> None:
        """Sends an error where nothing was sent before; else the answer stays cut off."""
        if self.status:
            return
        raw = encode(problem.body(Dialect.of(path)))
        headers: dict[str, Any] = {
            "content-type": "application/json",
            "content-length": str(len(raw)),
            **problem.headers(),
        }
        if not (self.whole or self.cut):
            headers["connection"] = "close"  # What is left of the body is not read.
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        with suppress(OSError):
            await self.send_answer(
                {"type": "http.response.start", "status": problem.status, "headers": pairs}
            )
            await self.send_answer({"type": "http.response.body", "body": raw})


def usage(prompt: int, written: int) -> dict[str, object]:
    """``usage`` of so many tokens, as clients read it."""
    total = prompt + written
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": total}


def too_large(most: int | None) -> ProblemError:
    """The answer to a body beyond the limit, in bytes."""
    limit = "" if most is None else f" of {most} bytes"
    return ProblemError(
        status=413, message=f"the body is larger than this server's limit{limit}; send less"
    )


class Phase(Enum):
    """State of a version of a model, in Triton's words for it."""

    ready = "READY"
    loading = "LOADING"
    stopped = "UNAVAILABLE"
    """It was ready and is not."""
    failed = "FAILED"
    """It could not be opened."""

    @property
    def triton(self) -> str:
        """Triton's word for it."""
        return "UNAVAILABLE" if self is Phase.failed else self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionState:
    """A version of a model and where it is."""

    name: str
    version: int
    phase: Phase
    reason: str = ""
    """Why it could not be opened; of one that is ready, why its newer contents could not."""


@dataclass(kw_only=True, eq=False)
class ServerState:
    """The models of a server and its state."""

    registry: ModelRegistry
    limits: HttpLimits
    metrics: Metrics
    log_prompts: bool = False
    draining: bool = False
    opened: bool = False
    """Whether every model was opened and has started."""
    opening: Sequence[Key] = ()
    """Versions that are opened, in this order."""
    failures: dict[Key, str] = field(default_factory=dict)
    """Why versions could not be opened."""
    failed: str | None = None
    """Why the models can't start."""
    in_flight: int = 0
    control: "Process | None" = None
    """None where clients may not load and unload."""
    unloaded: set[str] = field(default_factory=set)
    """Names of models that a client took out."""
    adapters: dict[str, Path] = field(default_factory=dict)
    """Folders of adapters by name; those that their model has when it is opened again."""
    begun: float = field(default_factory=time.monotonic)

    @property
    def ready(self) -> bool:
        """Whether every model answers and the server does not end."""
        models = self.registry.everything()
        limit = self.limits.heartbeat_seconds
        return (
            not self.draining
            and self.opened
            and all(model.ready and model.heartbeat_seconds < limit for model in models)
        )

    @property
    def alive(self) -> bool:
        """Whether no model failed and no loop hangs or has ended."""
        limit = self.limits.heartbeat_seconds * ALIVE
        return self.failed is None and all(
            model.heartbeat_seconds < limit for model in self.registry.everything()
        )

    def use(self, request: Request, name: str | None, version: int | None = None) -> Served:
        """The model of a request, held until the request ends; the only one where none is named.

        Raises:
            ProblemError: the model is not ready, or several are served and none is named.
            NotFoundError: there is no such model.
        """
        context = RequestContext.of(request)
        if name is None:
            names = self._names()
            if not self.opened and not names:
                raise self.not_ready("the server")
            if not names:
                raise NotFoundError(f"no model is loaded; {self._out(sorted(self.unloaded))}")
            if len(names) != 1:
                raise bad(f"model is missing; served are: {', '.join(names)}", "model")
            name = names[0]
        self._check(name, version)
        served = context.held.enter_context(self.registry.use(name, version))
        context.model = served.name
        if not served.ready:
            raise self.not_ready(name)
        return served

    def versions(self, name: str, version: int | None = None) -> list[Served]:
        """Versions of a model, oldest first, or the one of a number; errors as :meth:`use`."""
        self._check(name, version)
        versions = self.registry.versions(name)
        wanted = [served for served in versions if version in (None, served.version)]
        if not wanted:
            known = ", ".join(str(served.version) for served in versions)
            raise NotFoundError(f"{name} has no version {version}; served are: {known}")
        return wanted

    def states(self) -> list[VersionState]:
        """Versions that are served, opened or could not be opened."""
        phases: dict[Key, tuple[Phase, str]] = {}
        for served in self.registry.everything():
            phase = Phase.ready if served.ready else Phase.stopped
            phases[served.key] = phase, self.failures.get(served.key, "")
        for key in self.opening:
            phases.setdefault(key, (Phase.loading, ""))
        for key, reason in self.failures.copy().items():
            phases.setdefault(key, (Phase.failed, reason))
        return [
            VersionState(name=name, version=version, phase=phase, reason=reason)
            for (name, version), (phase, reason) in phases.items()
        ]

    def _check(self, name: str, version: int | None) -> None:
        """Refuses a model that the registry lacks because it is being opened, or was taken out.

        Raises:
            ProblemError: it is not ready yet.
            NotFoundError: a client took it out, or it is none of those that are opened.
        """
        held = [model.version for model in self.registry.everything() if model.name == name]
        if version in held or (held and version is None):
            return
        loading = [number for other, number in self.opening if other == name]
        if version in loading or (loading and version is None):
            raise self.not_ready(name)
        if not held and loading:
            raise NotFoundError(
                f"{name} has no version {version}; served are: {', '.join(map(str, sorted(loading)))}"
            )
        if not held and name in self.unloaded:
            raise NotFoundError(self._out([name]))
        if not held and self.opening:
            known = ", ".join(self._names())
            raise NotFoundError(f"there is no model {name!r}; served are: {known}")

    def _out(self, names: Sequence[str]) -> str:
        """How to load models again that a client took out."""
        several = len(names) > 1
        state = f"{', '.join(names)} {'are' if several else 'is'} unloaded"
        return (
            f"{state}; load with POST /v2/repository/models/{'NAME' if several else names[0]}/load"
        )

    def _names(self) -> list[str]:
        """Names of the models, those that are still opened included."""
        opened = [served.name for served in self.registry.newest() if not served.base]
        return list(dict.fromkeys([*opened, *(name for name, _ in self.opening)]))

    def text(self, request: Request, name: str | None) -> ServedText:
        """The language model of a request; errors as :meth:`use`.

        Raises:
            ProblemError: also where the model is no language model.
        """
        served = self.use(request, name)
        if not isinstance(served, ServedText):
            raise bad(
                f"{served.name} is a model of kind {served.model.kind.value} and does not write text; {_where(served)}",
                "model",
            )
        return served

    def batch(self, request: Request, name: str | None, version: int | None = None) -> ServedBatch:
        """The batch model of a request; errors as :meth:`use`.

        Raises:
            ProblemError: also where the model is a language model.
        """
        served = self.use(request, name, version)
        if isinstance(served, ServedText):
            raise bad(f"{served.name} is a language model; ask /v1/completions", "model")
        return served

    @staticmethod
    def not_ready(what: str) -> ProblemError:
        """The answer to requests for what can't answer yet."""
        return ProblemError(
            status=503,
            message=f"{what} is not ready; come back when /health answers 200",
            code="not_ready",
            retry_seconds=DRAIN_RETRY_SECONDS,
        )

    def ending(self) -> ProblemError:
        """The answer to requests that come while the server ends."""
        return ProblemError(
            status=503,
            message="the server is ending; ask another one",
            code="draining",
            retry_seconds=DRAIN_RETRY_SECONDS,
        )


def _where(served: ServedBatch) -> str:
    routes = {"embedding": "/v1/embeddings", "transcription": "/v1/audio/transcriptions"}
    kind = served.model.kind.value
    return f"ask {routes.get(kind, f'/v2/models/{served.name}/infer')}"


def new_id(prefix: str) -> str:
    """An id that no other request has, such as ``cmpl-5f...``."""
    return f"{prefix}-{secrets.token_hex(12)}"
