"""The whole journey of a server: requests of every kind at once, clients that leave, deadlines, and models opened again in the middle.

    python benchmarks/serve/journey.py --requests 10000 --seed 0 [--speculate 4] [--threads 16] [--folder DIR]

One ``systolic serve`` in a process of its own has a language model with two adapters, an encoder and a model of pictures, all of random weights. It
is asked for chats, completions and responses (streams and not, ``n``, log-probabilities, stop strings), structured output of every
form, tools, embeddings, scores and pictures. Chats share beginnings, and the pages are too few for all texts. Half of the requests
are of a pool whose answers were asked before, each alone; they are greedy or have a seed, and have to be the same again.

The report (JSON) has counts, rates, quantiles of the latency and what is left when all requests have ended: pages, requests, threads,
files and memory after each quarter. ``faults`` is empty where all is well; otherwise the exit code is 1. ``masks`` compares the
server's CPU time for texts with and without a schema, in turns, so that what else runs on the machine matters little.
"""

import argparse
import base64
import io
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import httpx
import jsonschema
import numpy as np
import psutil
from PIL import Image

from tests.serving.http.schemas import random_schema

ROOT = Path(__file__).parents[2]
ADAPTERS = ("support", "legal")
"""Adapters of ``chat``."""
CHATS = ("chat", *ADAPTERS)
"""Names that requests for text are sent to."""
POOL_SHARE = 0.5
LEAVING_SHARE, DEADLINE_SHARE = 0.12, 0.05
QUARTERS = 4
SETTLING_SECONDS = 120.0
QUARTER_MIB = 30
"""Memory that the last quarter of the requests may add, as in ``tests/serving/text/test_storm.py``."""
POOLED_THREADS = min(32, (os.cpu_count() or 1) + 4) + 2 * 4
"""Threads that start when they are first needed: of the event loop's executor, and of readers of two models."""
WORDS = [
    "the",
    "capital",
    "of",
    "France",
    "is",
    "Paris",
    "and",
    "a",
    "question",
    "has",
    "an",
    "answer",
    "yes",
    "or",
    "no",
]
BEGINNINGS = [" ".join(WORDS[n:] + WORDS[:n]) * 3 for n in (0, 5, 9)]
"""Of chats, several pages long."""
PATTERN = "[a-f]{2,4}(-[0-9]{1,3})?"
CHOICES = ["yes", "no", "maybe later"]
GRAMMAR = 'start: "{" pair ("," pair)? "}"\npair: /[a-z]{1,3}/ "=" /[0-9]{1,2}/\n'
RULE = re.compile(r"\{[a-z]{1,3}=[0-9]{1,2}(,[a-z]{1,3}=[0-9]{1,2})?\}")
ENDLESS = {"type": "array", "minItems": 400, "items": {"enum": ["x", 7, True, {"a": None}]}}
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content or '' }}<|stop|>\n{% endfor %}"
    "{% for tool in tools or [] %}(tool {{ tool.function.name }}){% endfor %}{# <tool_call> #}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
KEPT = ("num_requests_running", "num_requests_waiting", "kv_cache_pages_in_use", "batch_examples_waiting")  # fmt: skip
"""Metrics that are 0 where no request is under way."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request and what is known of its answer.

    Attributes:
        schema: That the answer, or the arguments of each call, fulfil.
        pattern: That an answer which ended by itself matches.
    """

    kind: str
    path: str
    body: dict[str, Any]
    schema: dict[str, Any] | None = None
    pattern: str | None = None


def folders(root: Path) -> dict[str, Path]:
    """Models by name, small and of random weights."""
    import torch

    from tests.formats import folders as texts
    from tests.formats.foreign_images import resnet
    from tests.formats.test_sentences import folder as encoder

    names = {name: root / name for name in ("chat", "words", "pictures")}
    if all(path.exists() for path in [*names.values(), *(root / name for name in ADAPTERS)]):
        return names
    model = texts.llama(num_hidden_layers=2, max_position_embeddings=512)
    torch.nn.init.normal_(model.lm_head.weight)  # so that two tokens are seldom as likely
    texts.folder(names["chat"], model)
    (names["chat"] / "chat_template.jinja").write_text(TEMPLATE)
    from tests.serving.text.test_adapters import peft_folder

    for seed, name in enumerate(ADAPTERS):
        peft_folder(root / name, names["chat"], seed, 2 + seed, ["q_proj", "down_proj"])
    encoder(names["words"])
    resnet(names["pictures"])
    return names


def picture(draw: random.Random) -> str:
    """A picture of noise, base64."""
    pixels = np.random.default_rng(draw.randrange(2**32)).integers(0, 256, (48, 64, 3))
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def sentence(draw: random.Random, longest: int = 12) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randrange(1, longest)))


def sampling(draw: random.Random) -> dict[str, Any]:
    """Settings for a text: greedy, or drawn with a seed."""
    if draw.random() < 0.6:
        return {"temperature": 0}
    more = draw.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"presence_penalty": 0.5}])
    return {"temperature": 1, "seed": draw.randrange(1000), **more}


def chat(draw: random.Random) -> Question:
    messages = [{"role": "user", "content": sentence(draw)}]
    if draw.random() < 0.7:
        messages.insert(0, {"role": "system", "content": draw.choice(BEGINNINGS)})
    body = {"messages": messages, "max_tokens": draw.randrange(1, 40), **sampling(draw)}
    body |= draw.choice([{}, {"n": 3}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["e", "q"]}])
    return Question(kind="chat", path="/v1/chat/completions", body=body)


def completion(draw: random.Random) -> Question:
    prompts = [f"{draw.choice(BEGINNINGS)} {sentence(draw)}" for _ in range(draw.choice((1, 1, 4)))]
    body = {"prompt": prompts, "max_tokens": draw.randrange(1, 40), **sampling(draw)}
    body |= draw.choice([{}, {"logprobs": 2, "echo": True}, {"min_tokens": 1}, {"priority": -1}])
    return Question(kind="completion", path="/v1/completions", body=body)


def response(draw: random.Random) -> Question:
    body = {"input": sentence(draw), "max_output_tokens": draw.randrange(1, 40), **sampling(draw)}
    return Question(kind="response", path="/v1/responses", body=body)


def structured(draw: random.Random) -> Question:
    """A chat whose answer follows a schema, an expression, a choice or a grammar."""
    body = {**chat(draw).body, "max_tokens": draw.choice((20, 250))}
    body = {name: value for name, value in body.items() if name != "stop"}
    schema = pattern = None
    kind = draw.choice(("schema", "schema", "regex", "choice", "grammar"))
    if kind == "schema":
        schema = random_schema(draw)
        form = {"name": "s", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    elif kind == "regex":
        body["guided_regex"] = pattern = PATTERN
    elif kind == "choice":
        body["structured_outputs"] = {"choice": CHOICES}
        pattern = "|".join(CHOICES)
    else:
        body["guided_grammar"], pattern = GRAMMAR, RULE.pattern
    path = "/v1/chat/completions"
    return Question(kind=kind, path=path, body=body, schema=schema, pattern=pattern)


def tools(draw: random.Random) -> Question:
    schema = random_schema(draw)
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    body = {**chat(draw).body, "max_tokens": 250, "tools": [tool], "tool_choice": "required"}
    body = {name: value for name, value in body.items() if name not in ("stop", "logprobs", "top_logprobs")}  # fmt: skip
    return Question(kind="tools", path="/v1/chat/completions", body=body, schema=schema)


def embeddings(draw: random.Random) -> Question:
    body = {"model": "words", "input": [sentence(draw, 5) for _ in range(draw.randrange(1, 4))]}
    return Question(kind="embeddings", path="/v1/embeddings", body=body)


def scores(draw: random.Random) -> Question:
    body = {"model": "words", "query": sentence(draw, 5), "documents": [sentence(draw, 5)] * 2}
    return Question(kind="scores", path="/v1/rerank", body=body)


def pictures(draw: random.Random) -> Question:
    body = {"instances": [{"b64": picture(draw)} for _ in range(draw.randrange(1, 3))]}
    return Question(kind="pictures", path="/v1/models/pictures:predict", body=body)


KINDS = {chat: 30, completion: 15, response: 5, structured: 30, tools: 5, embeddings: 6, scores: 3, pictures: 6}  # fmt: skip
"""Kinds of requests to their share."""


def question(draw: random.Random) -> Question:
    (kind,) = draw.choices([*KINDS], [*KINDS.values()])
    drawn = kind(draw)
    if "model" not in drawn.body and kind is not pictures:
        drawn.body["model"] = draw.choice(CHATS)
    return drawn


def essence(body: dict[str, Any]) -> Any:
    """What of an answer is the same each time: neither ids nor times."""
    if "choices" in body:
        return [_essence_of_choice(choice) for choice in body["choices"]]
    if "output" in body:
        return [[part["text"] for part in item.get("content", [])] for item in body["output"]]
    if "predictions" in body:
        return [[row["name"], *row["probability"]] for row in body["predictions"]]
    if "results" in body:
        return [[row["index"], row["relevance_score"]] for row in body["results"]]
    return [row["embedding"] for row in body["data"]]


def _essence_of_choice(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {"content": choice["text"]}
    calls = [call["function"] for call in message.get("tool_calls") or []]
    kept = {"text": message.get("content") or "", "finish": choice["finish_reason"], "calls": [[call["name"], call["arguments"]] for call in calls]}  # fmt: skip
    scored = choice.get("logprobs") or {}
    if scored.get("content"):
        kept["logprobs"] = [token["logprob"] for token in scored["content"]]
    elif scored.get("token_logprobs"):
        kept["logprobs"] = [value for value in scored["token_logprobs"] if value is not None]
    return kept


def same(answer: Any, other: Any) -> bool:
    """Equal texts, and numbers as far as the rounding of another batch goes."""
    if isinstance(answer, float) and isinstance(other, float):
        return abs(answer - other) <= 2e-3 + 1e-3 * abs(other)
    if isinstance(answer, list) and isinstance(other, list):
        return len(answer) == len(other) and all(map(same, answer, other))
    if isinstance(answer, dict) and isinstance(other, dict):
        return answer.keys() == other.keys() and all(same(answer[k], other[k]) for k in answer)
    return answer == other


def joined(question: Question, lines: list[str]) -> dict[str, Any]:
    """The answer that the events of a stream add up to.

    Raises:
        ValueError: an event is an error.
    """
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for event in events:
        if event.get("error"):
            raise ValueError(event["error"])
    if question.kind == "response":
        return events[-1]["response"]
    choices: dict[int, dict[str, Any]] = {}
    for part in (choice for event in events for choice in event["choices"]):
        blank = {"text": "", "finish_reason": None, "calls": {}, "logprobs": {}}
        choice = choices.setdefault(part["index"], blank)
        delta = part.get("delta") or {"content": part.get("text")}
        choice["text"] += delta.get("content") or ""
        choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
        for name, values in (part.get("logprobs") or {}).items():
            choice["logprobs"].setdefault(name, []).extend(values or [])
        for call in delta.get("tool_calls") or []:
            function = choice["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
            for name, value in call["function"].items():
                function[name] += value or ""
    for choice in choices.values():
        calls = [{"function": call} for call in choice.pop("calls").values()]
        if question.path.endswith("chat/completions"):
            choice["message"] = {"content": choice.pop("text"), "tool_calls": calls}
    return {"choices": [choices[index] for index in sorted(choices)]}


def fault_of(question: Question, answer: Any) -> str | None:
    """What is wrong with an answer by itself."""
    if question.schema is None and question.pattern is None:
        return None
    for choice in answer:
        if choice["finish"] == "length":
            continue
        texts = [arguments for _, arguments in choice["calls"]] or [choice["text"]]
        for text in texts:
            try:
                if question.schema is not None:
                    jsonschema.validate(json.loads(text), question.schema)
            except (ValueError, jsonschema.ValidationError):
                return f"does not fulfil its schema: {text!r}"
            if question.pattern is not None and not re.fullmatch(question.pattern, text):
                return f"does not match: {text!r}"
    return None


class Server:
    """``systolic serve`` in a process of its own, with what it holds."""

    def __init__(self, models: dict[str, Path], folder: Path, words: list[str]) -> None:
        self.models, self.log = models, folder / "server.log"
        sizes = "--rows 8 --context 512 --chunk 64 --page-size 16 --pages 40 --strict --model-control --adapters 3 --log json --port 0 --json"
        line = [sys.executable, "-m", "systolic", "serve", *sizes.split(), *words]
        line += [f"{name}={path}" for name, path in models.items()]
        for name in ADAPTERS:
            line += ["--adapter", f"{name}={models['chat'].parent / name}"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=self.log.open("w"), env=environment, text=True)  # fmt: skip
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]
        self.http = httpx.Client(base_url=self.url, timeout=300)
        while self.http.get("/health").status_code != 200:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        """Sums over models by metric; causes of compiles apart."""
        sums: Counter[str] = Counter()
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith("systolic:"):
                name, _, value = line.removeprefix("systolic:").rpartition(" ")
                sums[name.partition("{")[0] + (" late" if 'cause="late"' in name else "")] += float(value)  # fmt: skip
        return sums

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def held(self) -> dict[str, float]:
        """What the process holds when every request has ended."""
        end = time.monotonic() + SETTLING_SECONDS
        while time.monotonic() < end:
            metrics = self.metrics()
            # The request for the metrics is one.
            if metrics["http_requests_in_flight"] <= 1 and not any(metrics[name] for name in KEPT):
                break
            time.sleep(0.2)
        process = psutil.Process(self.process.pid)
        counts = {name: metrics[name] for name in (*KEPT, "http_requests_in_flight")}
        return {
            **counts,
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "resident_mib": round(process.memory_info().rss / 2**20, 1),
            "compiles after ready": metrics["recompile_after_ready_total"] + metrics["compile_total late"],
        }  # fmt: skip

    def change(self, name: str) -> None:
        """Other contents of a model's folder that mean the same."""
        file = self.models[name] / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "note": config.get("note", 0) + 1}))

    def events(self) -> Counter[str]:
        """Lines of the log by event."""
        lines = self.log.read_text().splitlines()
        return Counter(json.loads(line)["event"] for line in lines if line.startswith("{"))


@contextmanager
def serving(models: dict[str, Path], folder: Path, words: list[str]) -> Iterator[Server]:
    server = Server(models, folder, words)
    try:
        yield server
    finally:
        server.http.close()
        server.process.kill()
        server.process.wait()


@dataclass
class Journey:
    """Requests to a server, and what came of them."""

    server: Server
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """At most 1,000 characters each."""
    away: bool = False
    """Whether the model of pictures is unloaded."""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.pool: list[tuple[Question, Any]] = []

    def ask_alone(self, count: int) -> None:
        """Fills the pool with questions and their answers while nothing else runs."""
        draw = random.Random(f"pool {self.seed}")
        while len(self.pool) < count:
            asked = question(draw)
            answer = self.server.http.post(asked.path, json=asked.body)
            if answer.status_code == 400 and asked.schema is not None:
                continue  # a random schema that cannot be followed
            assert answer.status_code == 200, (answer.text, asked)
            self.pool.append((asked, essence(answer.json())))

    def run(self, numbers: range, threads: int) -> None:
        """Asks all, so many at once, and returns when all have ended."""
        left = iter(numbers)

        def work() -> None:
            with httpx.Client(base_url=self.server.url, timeout=300) as http:
                while True:
                    with self.lock:
                        number = next(left, None)
                    if number is None:
                        return
                    try:
                        self.ask(http, random.Random(f"{self.seed} {number}"))
                    except Exception as error:
                        self.fault(f"request {number}: {type(error).__name__}: {error}")

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def fault(self, line: str) -> None:
        with self.lock:
            self.outcomes["fault"] += 1
            self.faults.append(line[:1000])

    def count(self, outcome: str) -> None:
        with self.lock:
            self.outcomes[outcome] += 1

    def ask(self, http: httpx.Client, draw: random.Random) -> None:
        """One request, read to its end or not."""
        pooled = draw.random() < POOL_SHARE
        asked, alone = draw.choice(self.pool) if pooled else (question(draw), None)
        with self.lock:
            self.kinds[asked.kind] += 1
        body, headers, way = {**asked.body}, {}, draw.random()
        if asked.path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            body["stream"] = draw.random() < 0.5 and not body.get("echo")
        if way < LEAVING_SHARE:
            return self.leave(http, asked.path, body, draw)
        hurried = way < LEAVING_SHARE + DEADLINE_SHARE
        if hurried:
            headers["X-Request-Timeout"] = str(draw.choice([0.001, 0.02, 0.2]))
        begin, lines = time.monotonic(), []
        with http.stream("POST", asked.path, json=body, headers=headers) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 1:
                    first = time.monotonic() - begin
        with self.lock:
            self.seconds.append(time.monotonic() - begin)
            if body.get("stream") and lines:
                self.first_bytes.append(first)
        self.judge(asked, answer, lines, alone, hurried=hurried)

    def leave(self, http: httpx.Client, path: str, body: dict[str, Any], draw: random.Random) -> None:  # fmt: skip
        """Closes the connection after some lines of the answer, or before its first byte."""
        lines = draw.randrange(8) if body.get("stream") else 0
        patience = draw.choice((0.002, 0.05, 0.3)) if lines == 0 else 300
        with suppress(httpx.ReadTimeout):
            with http.stream("POST", path, json=body, timeout=patience) as answer:
                for number, _ in enumerate(answer.iter_lines()):
                    if number >= lines:
                        return self.count("left")
            return self.count("left too late")
        return self.count("left before the first byte")

    def judge(self, asked: Question, answer: httpx.Response, lines: list[str], alone: Any, *, hurried: bool) -> None:  # fmt: skip
        """Counts what became of a request."""
        status, text = answer.status_code, "\n".join(lines)
        if hurried and (status == 504 or '"code":"deadline"' in text):
            return self.count("deadline")
        if asked.kind == "pictures" and status in (404, 503) and self.away:
            return self.count(f"{status} of the model that is unloaded, or loaded again")
        if status == 400 and alone is None and asked.schema is not None and "cannot be" in text:
            return self.count("400 of a schema that cannot be followed")
        if status != 200:
            return self.fault(f"{status} {text} of {asked}")
        streamed = answer.headers["content-type"].startswith("text/event-stream")
        found = essence(joined(asked, lines) if streamed else json.loads(text))
        if line := fault_of(asked, found):
            return self.fault(f"{line} of {asked}")
        if alone is None:
            return self.count("answered")
        if streamed and asked.kind == "completion":
            alone = [{**choice, "logprobs": found[n].get("logprobs")} if "logprobs" in choice else choice for n, choice in enumerate(alone)]  # fmt: skip
        if not same(found, alone):
            return self.fault(f"{found} in place of {alone}, stream {streamed}, of {asked}")
        return self.count("answered as alone")

    def reload(self) -> None:
        """Reloads; what fails is a fault, since nobody waits for a thread's exception."""
        try:
            self._reload()
        except Exception as error:
            self.fault(f"reloading: {type(error).__name__}: {error}")

    def _reload(self) -> None:
        """Opens every model again while requests run: asked for, at a signal, and unloaded in between."""
        server = self.server
        with httpx.Client(base_url=server.url, timeout=300) as http:
            for name in ("chat", "words"):
                server.change(name)
            answer = http.post("/v2/repository/models/chat/load")
            if answer.status_code != 200 or answer.json()["loaded"] != ["1"]:
                self.fault(f"loading chat: {answer.status_code} {answer.text}")
            server.process.send_signal(signal.SIGHUP)
            about = {
                "lora_name": "support",
                "lora_path": str(server.models["chat"].parent / "support"),
            }
            answer = http.post("/v1/load_lora_adapter", json={**about, "load_inplace": True})
            if answer.status_code != 200:
                self.fault(f"loading support: {answer.status_code} {answer.text}")
            self.away = True
            for verb in ("unload", "load"):
                answer = http.post(f"/v2/repository/models/pictures/{verb}")
                if answer.status_code != 200:
                    self.fault(f"{verb}ing pictures: {answer.status_code} {answer.text}")
                time.sleep(0.5)
            self.away = False


def masks(server: Server, streams: int, tokens: int, turns: int) -> dict[str, float]:
    """CPU milliseconds of the server a token for texts without and with a schema, medians of turns."""
    body = {"model": "chat", "max_tokens": tokens, "temperature": 1, "ignore_eos": True, "prompt": "a question"}  # fmt: skip

    def spent(**more: Any) -> float:
        begin = server.cpu_seconds()
        asking = [
            threading.Thread(
                target=lambda seed=seed: server.http.post(
                    "/v1/completions", json={**body, **more, "seed": seed}
                )
            )
            for seed in range(streams)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        return 1e3 * (server.cpu_seconds() - begin) / (streams * tokens)

    pairs = [(spent(), spent(guided_json=ENDLESS)) for _ in range(turns + 1)][1:]
    free, bound = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(after / before for before, after in pairs)
    return {"streams": streams, "cpu_ms_free": round(free, 3), "cpu_ms_schema": round(bound, 3), "ratio": round(ratio, 3)}  # fmt: skip


def quantiles(seconds: list[float]) -> dict[str, float]:
    ranked = sorted(seconds) or [0.0]
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99, "largest": 1.0}
    return {name: round(ranked[min(int(share * len(ranked)), len(ranked) - 1)], 3) for name, share in shares.items()}  # fmt: skip


def leaks(held: list[dict[str, float]]) -> list[str]:
    """What is left after the last quarter that was not there before the first, or should not be at all."""
    first, last = held[0], held[-1]
    lines = [f"{name} is {last[name]:g} at the end" for name in (*KEPT, "compiles after ready") if last[name]]  # fmt: skip
    for name, more in (("threads", POOLED_THREADS), ("files", 0)):
        if last[name] > first[name] + more:
            lines.append(f"{name}: {first[name]:g} after the first quarter, {last[name]:g} after the last")  # fmt: skip
    more = last["resident_mib"] - held[-2]["resident_mib"]
    if more > QUARTER_MIB:
        lines.append(f"the last quarter added {more:.0f} MiB of memory")
    return lines


def travel(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """The journey's report."""
    journey = Journey(server, options.seed)
    journey.ask_alone(options.pool)
    held, begin = [], time.monotonic()
    for quarter in range(QUARTERS):
        each = options.requests // QUARTERS
        reloading = threading.Thread(target=journey.reload)
        if quarter in (1, 2):
            reloading.start()
        journey.run(range(quarter * each, (quarter + 1) * each), options.threads)
        if quarter in (1, 2):
            reloading.join()
        held.append(server.held())
        print(json.dumps({"quarter": quarter + 1, **held[-1], **journey.outcomes}), file=sys.stderr, flush=True)  # fmt: skip
    seconds = time.monotonic() - begin
    metrics = server.metrics()
    shown = ("generation_tokens_total", "num_preemptions_total", "prefix_cache_hits_total", "spec_decode_num_accepted_tokens_total")  # fmt: skip
    return {
        "requests": sum(journey.outcomes.values()),
        "seconds": round(seconds, 1),
        "requests_per_second": round(sum(journey.outcomes.values()) / seconds, 1),
        "outcomes": dict(sorted(journey.outcomes.items())),
        "kinds": dict(sorted(journey.kinds.items())),
        "latency_seconds": quantiles(journey.seconds),
        "first_byte_seconds": quantiles(journey.first_bytes),
        "counters": {name: metrics[name] for name in shown},
        "held": held,
        "log": dict(server.events()),
        "masks": masks(server, 8, 64, options.turns),
        "faults": [*journey.faults, *leaks(held)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument(
        "--pool", type=int, default=100, help="questions that are asked alone first"
    )
    parser.add_argument("--speculate", type=int, default=0)
    parser.add_argument("--turns", type=int, default=5, help="of the comparison of masks")
    parser.add_argument("--folder", type=Path, help="where models and log are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        words = ["--speculate", str(options.speculate)]
        with serving(folders(folder), folder, words) as server:
            report = travel(server, options)
            server.process.terminate()
            code = server.process.wait(60)
            if code:
                report["faults"].append(f"the server ended with {code}")
    print(json.dumps(report, indent=1))
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
