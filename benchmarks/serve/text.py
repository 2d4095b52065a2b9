"""A language model served beside transformers and llama.cpp: output tokens/s and time to first token by number of streams.

    python benchmarks/serve/text.py --model DIR [--guidellm PATH] [--llama-server PATH --gguf FILE] [--out FILE.json]

``DIR`` is a folder of transformers; the GGUF file holds the same weights in the same dtype. Each server is a process
of its own, one after the other, and answers ``/v1/completions``. guidellm drives them: so many requests at once, each
with ``--prompt`` random tokens and ``--answer`` tokens, for ``--seconds``. What is not installed is named and left out.

transformers runs twice: ``generate`` behind a plain FastAPI server, one request at a time, since two at once share
the same cores; and ``transformers serve --continuous-batching``. ``read_share`` is the bytes that a decode step has to
read (the weights once, keys and values of each text) over the median time between tokens, as a share of the machine's
memory bandwidth, which is measured by a sum over 1 GiB on all cores.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PEERS = ("systolic", "generate", "continuous", "llama.cpp")


def generate_server(model: str, dtype: str, port: int) -> None:
    """transformers' generate behind FastAPI."""
    import threading

    import torch
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse, StreamingResponse
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

    net = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    app, turn = FastAPI(), threading.Lock()

    def events(asked: dict[str, Any]) -> Any:
        ids = tokenizer(asked["prompt"], return_tensors="pt")
        count = asked.get("max_tokens", 16)
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        given = {**ids, "streamer": streamer, "do_sample": False}
        with turn, torch.inference_mode():
            lengths = {"min_new_tokens": count, "max_new_tokens": count}
            worker = threading.Thread(target=net.generate, kwargs={**given, **lengths})
            worker.start()
            for text in streamer:
                choice = {"index": 0, "text": text, "finish_reason": None}
                yield f"data: {json.dumps({'model': model, 'choices': [choice]})}\n\n"
            worker.join()
        size = ids["input_ids"].shape[1]
        usage = {
            "prompt_tokens": size,
            "completion_tokens": count,
            "total_tokens": size + count,
        }
        last = {"index": 0, "text": "", "finish_reason": "length"}
        yield f"data: {json.dumps({'model': model, 'choices': [last], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    def models() -> Any:
        return {"object": "list", "data": [{"id": model, "object": "model"}]}

    @app.post("/v1/completions")
    def complete(asked: dict[str, Any]) -> Any:
        if asked.get("stream"):
            return StreamingResponse(events(asked), media_type="text/event-stream")
        return JSONResponse({"choices": [{"text": "".join(events(asked))}]})

    uvicorn.run(app, port=port, log_level="error")


def continuous_server(words: list[str]) -> None:
    """``transformers serve``, which refuses a field that guidellm sends, and any load tool with answers of one length."""
    from transformers.cli.serving import completion
    from transformers.cli.transformers import main as transformers_main

    known = completion.TransformersTextCompletionCreateParams
    setattr(known, "__mutable_keys__", known.__mutable_keys__ | {"ignore_eos"})  # noqa: B010
    sys.argv = ["transformers", "serve", *words]
    transformers_main()


def command(peer: str, options: argparse.Namespace, port: int) -> list[str] | str:
    """The command of a server, or why there is none."""
    most, context = max(options.streams), options.prompt + options.answer + 64
    if peer == "systolic":
        found = [sys.executable, "-m", "systolic", "serve", f"m={options.model}"]
        found += ["--port", str(port), "--rows", str(most), "--context", str(context)]
        found += ["--precision", {"float32": "f32", "bfloat16": "bf16"}[options.dtype]]
        return [*found, "--log", "json"]
    if peer == "llama.cpp":
        if not options.llama_server or not options.gguf:
            return "give --llama-server and --gguf"
        kept = {"float32": "f32", "bfloat16": "bf16"}[options.dtype]
        found = [str(options.llama_server), "-m", str(options.gguf), "--port", str(port)]
        found += ["-np", str(most), "-c", str(most * context), "-ctk", kept, "-ctv", kept]
        return [*found, "-t", str(os.cpu_count())]
    try:
        import transformers  # noqa: F401
    except ImportError:
        return "pip install transformers torch fastapi uvicorn"
    if peer == "generate":
        return [sys.executable, __file__, "--generate", options.model, options.dtype, str(port)]
    found = [sys.executable, __file__, "--continuous", options.model, "--continuous-batching"]
    return [*found, "--device", "cpu", "--dtype", options.dtype, "--port", str(port)]


def answers(port: int, model: str) -> bool:
    """Whether a server continues a text."""
    asked = {"model": model, "prompt": "The sea", "max_tokens": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def load(options: argparse.Namespace, port: int, model: str, streams: int) -> dict[str, Any]:
    """Figures of so many streams, as guidellm measures them."""
    spec = {
        "backend": {
            "kind": "openai_http",
            "target": f"http://127.0.0.1:{port}",
            "model": model,
            "request_format": "/v1/completions",
        },
        "profile": {"kind": "concurrent", "streams": [streams]},
        "tokenizer": {"kind": "huggingface_auto", "model": options.model},
        "data": [
            {
                "kind": "synthetic_text",
                "prompt_tokens": options.prompt,
                "output_tokens": options.answer,
            }
        ],
        "constraints": [{"kind": "max_duration", "seconds": options.seconds}],
    }
    with tempfile.TemporaryDirectory() as folder:
        scenario, out = Path(folder, "load.json"), Path(folder, "found.json")
        about = {"name": "text", "description": "concurrent streams"}
        scenario.write_text(json.dumps({"metadata": about, "spec": spec}))
        called = [options.guidellm, "run", "-c", str(scenario), "--disable-console"]
        called += ["--output", f"kind=json,path={out}"]
        # One process of the tool: more would take the cores that are measured.
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
        run = subprocess.run(
            called, env=env, capture_output=True, text=True, timeout=options.seconds + 240
        )
        if not out.exists():
            return {"streams": streams, "failed": run.stderr.strip().splitlines()[-1:]}
        found = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    if not found["request_totals"]["successful"]:
        told = f"no request of {found['request_totals']['total']} was answered in {options.seconds:g} s"
        return {"streams": streams, "failed": told}
    first = found["time_to_first_token_ms"]["successful"]
    between = found["inter_token_latency_ms"]["successful"]
    return {
        "streams": streams,
        "output_tokens_per_second": round(
            found["output_tokens_per_second"]["successful"]["mean"], 1
        ),
        "first_token_ms": round(first["median"], 1),
        "first_token_p99_ms": round(first["percentiles"]["p99"], 1),
        "between_tokens_ms": round(between["median"], 2),
        "requests": found["request_totals"]["successful"],
        "errors": found["request_totals"]["errored"],
        "load_average": round(os.getloadavg()[0], 1),
    }


def step_bytes(options: argparse.Namespace, streams: int) -> float:
    """Bytes that a decode step has to read, of a decoder with keys and values in the dtype of its weights."""
    config = json.loads(Path(options.model, "config.json").read_text())
    size = 2 if options.dtype == "bfloat16" else 4
    stored = 2 if config.get("dtype", config.get("torch_dtype")) == "bfloat16" else 4
    weights = sum(file.stat().st_size for file in Path(options.model).glob("*.safetensors"))
    heads = config["num_attention_heads"]
    wide = config.get("num_key_value_heads", heads) * config.get(
        "head_dim", config["hidden_size"] // heads
    )
    text = 2 * config["num_hidden_layers"] * wide * size * (options.prompt + options.answer / 2)
    return weights / stored * size + streams * text


def measured(peer: str, options: argparse.Namespace, memory_rate: float) -> list[dict[str, Any]]:
    """A server's figures at each number of streams."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    called = command(peer, options, port)
    if isinstance(called, str):
        print(f"{peer}: left out; {called}", flush=True)
        return []
    model = "m" if peer == "systolic" else options.model
    log = Path(tempfile.gettempdir(), f"text-{peer}.log")
    begin = time.perf_counter()
    child = subprocess.Popen(called, stdout=log.open("w"), stderr=subprocess.STDOUT)
    try:
        while not answers(port, model):
            if child.poll() is not None or time.perf_counter() - begin > options.start_seconds:
                print(f"{peer}: left out; it did not start, see {log}", flush=True)
                return []
            time.sleep(0.2)
        ready = round(time.perf_counter() - begin, 1)
        rows = []
        for streams in options.streams:
            about = {"server": peer, "ready_seconds": ready}
            row = load(options, port, model, streams)
            if row.get("between_tokens_ms"):
                rate = step_bytes(options, streams) / row["between_tokens_ms"] * 1e3
                row["read_share"] = round(rate / memory_rate, 3)
            rows.append({**about, **row})
            print(json.dumps(rows[-1]), flush=True)
        return rows
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()


def bandwidth() -> float:
    """Bytes a second that all cores read together: the best of ten sums over 1 GiB."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((1 << 28,), jnp.float32)
    total = jax.jit(jnp.sum)
    total(x).block_until_ready()
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        total(x).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return x.nbytes / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder of transformers")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--guidellm", default=shutil.which("guidellm"))
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--servers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument(
        "--start-seconds", type=float, default=1800, help="longest wait for a server"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--generate", nargs=3, help=argparse.SUPPRESS)
    if sys.argv[1:2] == ["--continuous"]:
        continuous_server(sys.argv[2:])
        return
    options = parser.parse_args()
    if options.generate:
        model, dtype, port = options.generate
        generate_server(model, dtype, int(port))
        return
    if not options.model or not options.guidellm:
        sys.exit("needs --model DIR, and guidellm (pip install guidellm) or --guidellm PATH")
    found: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "dtype": options.dtype,
        "memory_bytes_per_second": bandwidth(),
        "rows": [],
    }
    for peer in options.servers:
        found["rows"] += measured(peer, options, found["memory_bytes_per_second"])
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
