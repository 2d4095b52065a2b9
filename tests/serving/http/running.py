"""A server in a thread of the test, on a free port."""

import io
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from systolic.data.text.chat import ChatTemplate
from systolic.data.text.tokenizer import Tokenizer
from systolic.serving.http.keys import HttpLimits, Keys
from systolic.serving.http.metrics import BatchMetrics, Metrics, TextMetrics
from systolic.serving.http.process import Address, Process
from systolic.serving.http.state import ServerState
from systolic.serving.http.telemetry import EventLog
from systolic.serving.registry import ModelLoad, ModelRegistry, Served, ServedBatch, ServedText
from systolic.serving.request import ModelKind
from tests.serving.http.echo import EchoEngine, ToyModel

CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}={{ call.function.arguments.x }}]{% endfor %}"
    "{% endfor %}{% if tools %}{% for tool in tools %}(tool {{ tool.function.name }}){% endfor %}<tool_call>{% endif %}<assistant>"
)


@dataclass(kw_only=True)
class Running:
    """A server that answers."""

    process: Process
    port: int
    lines: io.StringIO

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def state(self) -> ServerState:
        return self.process.state

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **options)

    def log(self, event: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.lines.getvalue().splitlines()]
        return [one for one in found if one["event"] == event]


def echo_model(name: str = "echo", **options: Any) -> ServedText:
    tokenizer = Tokenizer()
    template = ChatTemplate(text=CHAT, origin=Path("test"))
    return ServedText(
        name=name, engine=EchoEngine(tokenizer, **options), tokenizer=tokenizer, template=template
    )


def toy_model(kind: ModelKind, name: str, version: int = 1) -> ServedBatch:
    return ServedBatch(name=name, version=version, model=ToyModel(kind, name))


def everything() -> list[Served]:
    metrics = [toy_model(kind, kind.value) for kind in ModelKind]
    return [echo_model(), *metrics]


def pending(served: Served) -> ModelLoad:
    return ModelLoad(key=served.key, open=lambda: served)


@contextmanager
def running(
    models: Sequence[Served],
    *,
    limits: HttpLimits | None = None,
    keys: Keys | None = None,
    grace_seconds: float = 5.0,
    log_prompts: bool = False,
    ready: bool = True,
) -> Iterator[Running]:
    """A server of some models, in a thread."""
    lines = io.StringIO()
    metrics = Metrics()
    texts, batches = TextMetrics(metrics), BatchMetrics(metrics)
    for one in models:
        if isinstance(one, ServedText) and isinstance(one.engine, EchoEngine):
            one.engine.watcher = texts.of(one.name)
        elif isinstance(one, ServedBatch):
            batches.of(one.name)
    state = ServerState(
        registry=ModelRegistry(),
        limits=limits or HttpLimits(),
        metrics=metrics,
        log_prompts=log_prompts,
    )
    found: list[int] = []
    process = Process(
        state,
        [pending(one) for one in models],
        Address(port=0, grace_seconds=grace_seconds),
        EventLog(lines),
        keys,
        listening=found.append,
    )
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    _wait(lambda: bool(found))
    if ready:
        _wait(lambda: state.ready)
    try:
        yield Running(process=process, port=found[0], lines=lines)
    finally:
        process.end()
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


def _wait(until: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)


wait = _wait
