"""One model in several runtimes, on the same inputs and in turn: this package's compiled program, LiteRT, ONNX Runtime, llama.cpp.

    python benchmarks/runtimes.py MODEL… --work DIR [--batches 1 8] [--sequence 128] [--rounds 7] [--float] [--llama-server PATH] [--out FILE.md]

A model is a run, a Bundle, a Hugging Face folder or a GGUF file; its files are made by ``systolic export`` in ``--work`` and
kept there. Each runtime is a process of its own with all cores, alive to the end. A round gives each of them a turn, in an order that
changes with each round: a pause, calls that are not counted until the cores are awake, and calls that are. The median of all
counted calls is quoted, their best and the median of their CPU time. ``call`` is a whole text, picture or batch of them, from numpy to numpy. Language models are also generated with: ``prefill`` is a prompt of ``--sequence`` tokens with
its keys and values kept, ``decode`` one token of the 16 after it; the files of LiteRT and ONNX keep no keys and have neither.
LiteRT's int8 file is calibrated on the recipe's training data, or on ``--data``; without both it is left out.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NEW_TOKENS = 16
SETTLED = 0.2
"""Seconds before a turn: threads of some runtimes look for work for a while after theirs."""
AWAKE = 0.1
"""Seconds of a turn's first calls, which are not counted: after a pause Linux runs all threads of a process on one core for 40 ms."""
COUNTED = 5
"""Most calls of a turn that are counted."""
ENOUGH = 1.0
"""Seconds after which a turn ends, with one counted call at least."""
Call = Callable[[], Mapping[str, float]]
"""Seconds of each stage of one call."""
CPU = "cpu"
"""All threads of a runtime's process during a call, in seconds of CPU time."""


class Program(NamedTuple):
    """A file that a runtime reads."""

    runtime: str
    path: Path
    words: tuple[str, ...] = ()
    """Of the export that makes it."""


# Workers


def inputs_for(folder: Path, batch: int, sequence: int) -> dict[str, np.ndarray]:
    """Random inputs of a model's first function, as the manifest of its StableHLO folder names them."""
    (function, *_) = json.loads((folder / "manifest.json").read_text())["functions"].values()
    random = np.random.default_rng(0)
    made = {}
    for name, one in function["inputs"].items():
        sizes = {"batch": batch, "sequence": sequence}
        shape = [sizes.get(dim, dim) for dim in one["shape"]]
        if name == "mask":
            made[name] = np.ones(shape, one["dtype"])
        elif np.dtype(one["dtype"]).kind == "i":
            made[name] = random.integers(0, 1000, shape).astype(one["dtype"])
        else:
            made[name] = random.uniform(0, 255, shape).astype(one["dtype"])
    return made


def timed(call: Callable[[], Any]) -> Mapping[str, float]:
    """Seconds of a call that ends with numpy arrays."""
    start = time.perf_counter()
    call()
    return {"call": time.perf_counter() - start}


def stablehlo(path: Path, inputs: dict[str, np.ndarray], sequence: int) -> Call:
    """The program that the exported folder holds, compiled by XLA here."""
    del sequence
    import jax
    import jax.export
    from safetensors.flax import load_file

    params: dict[str, Any] = {}
    for file in sorted(path.glob("weights*.safetensors")):
        params |= load_file(file)
    (name, *_) = json.loads((path / "manifest.json").read_text())["functions"]
    program = jax.export.deserialize(bytearray((path / f"{name}.bin").read_bytes()))
    step = jax.jit(program.call)
    return lambda: timed(lambda: jax.device_get(step(params, inputs)))


def litert(path: Path, inputs: dict[str, np.ndarray], sequence: int) -> Call:
    """The interpreter with XNNPACK."""
    del sequence
    from systolic.formats.litert.child import LiteProgram

    program = LiteProgram(path.read_bytes(), threads=cores())
    return lambda: timed(lambda: program.call(inputs))


def onnx(path: Path, inputs: dict[str, np.ndarray], sequence: int) -> Call:
    """ONNX Runtime's CPU provider."""
    del sequence
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = {one.name for one in session.get_inputs()}
    given = {name: array for name, array in inputs.items() if name in names}
    return lambda: timed(lambda: session.run(None, given))


def generate(path: Path, inputs: dict[str, np.ndarray], sequence: int) -> Call:
    """The steps of ``systolic serve``, which ``systolic generate`` runs too for one text of a large model on a CPU."""
    from systolic.comparing.speeds import server_call
    from systolic.formats.source import open_source
    from systolic.inference.latency import CallSizes
    from systolic.inference.model import from_source, keep_programs

    keep_programs()
    rows = len(next(iter(inputs.values())))
    sizes = CallSizes(rows=rows, prompt_tokens=sequence, output_tokens=NEW_TOKENS)
    call = server_call(from_source(open_source(path)), sizes)
    return lambda: call.seconds(time.perf_counter)


def predict(path: Path, inputs: dict[str, np.ndarray], sequence: int) -> Call:
    """The program of ``systolic predict``: as :func:`stablehlo`, made for this platform."""
    from systolic.inference.latency import CallSizes, timed_call
    from systolic.inference.model import keep_programs, prepare_model

    keep_programs()
    prepared = prepare_model(path)
    rows = len(next(iter(inputs.values())))
    sizes = CallSizes(rows=rows, prompt_tokens=sequence, output_tokens=1)
    call = timed_call(prepared.setup.steps, prepared.read(), sizes)
    return lambda: call.seconds(time.perf_counter)


def gguf(path: Path, inputs: dict[str, np.ndarray], sequence: int) -> Call:
    """llama.cpp's server, by its own times; the file's name has the server's path before it."""
    import socket

    server, _, file = str(path).partition("::")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "--ctx-size",
        "1024",
        "--parallel",
        "1",
        "--threads",
        str(cores()),
        "--port",
        str(port),
    ]
    quiet = subprocess.DEVNULL
    child = subprocess.Popen([server, "--model", file, *words], stdout=quiet, stderr=quiet)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health").close()
            break
        except OSError:
            if child.poll() is not None:
                raise SystemExit(f"{server} ended with exit code {child.returncode}") from None
            time.sleep(0.1)
    (tokens,) = next(iter(inputs.values()))[:1, :sequence].tolist()
    asked = {"prompt": tokens, "n_predict": NEW_TOKENS, "cache_prompt": False, "ignore_eos": True}

    def call() -> Mapping[str, float]:
        body = json.dumps(asked | {"temperature": 0}).encode()
        request = urllib.request.Request(
            f"{url}/completion", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)["timings"]
        return {
            "prefill": found["prompt_ms"] / 1000,
            "decode": found["predicted_ms"] / 1000 / found["predicted_n"],
        }

    return call


RUNTIMES = {one.__name__: one for one in (stablehlo, litert, onnx, predict, generate, gguf)}
SHOWN = {
    "stablehlo": "exported, XLA",
    "predict": "systolic predict",
    "litert": "LiteRT",
    "onnx": "ONNX Runtime",
    "generate": "systolic generate",
    "gguf": "llama.cpp",
}
OWN = ("predict", "generate")
"""What others are compared with."""
ROUNDED = {"dynamic", "int8", "q8_0"}
"""Precisions of files that ``--float`` leaves out."""
PACKAGES = {"litert": "litert", "onnx": "onnx"}
"""Of the cache, for runtimes whose packages are there."""


def cores() -> int:
    """Of this process."""
    return len(os.sched_getaffinity(0))


def turn(
    call: Call,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.process_time,
) -> list[dict[str, float]]:
    """Seconds of each stage of a turn's counted calls, and of :data:`CPU`."""
    start = clock()
    call()
    while clock() - start < AWAKE:
        call()
    start, counted = clock(), []
    while not counted or (len(counted) < COUNTED and clock() - start < ENOUGH):
        before = cpu_clock()
        stages = call()
        counted.append({**stages, CPU: cpu_clock() - before})
    return counted


def work(runtime: str, path: str, folder: str, batch: int, sequence: int) -> None:
    """Takes a turn for each line of stdin and prints its calls as one line."""
    call = RUNTIMES[runtime](Path(path), inputs_for(Path(folder), batch, sequence), sequence)
    call()
    print("[]", flush=True)
    for _ in sys.stdin:
        print(json.dumps(turn(call)), flush=True)


# The benchmark


def exported(model: Path, made: Program) -> str:
    """Writes the file unless it is there; what refused it, or ""."""
    if made.path.exists() or made.runtime in ("generate", "predict"):
        return ""
    to = {"stablehlo": "stablehlo", "litert": "litert", "onnx": "onnx", "gguf": "gguf"}
    line = [sys.executable, "-m", "systolic", "export", str(model), "--out", str(made.path)]
    asked = [*line, "--to", to[made.runtime], *made.words]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


class Worker:
    """A runtime's process."""

    def __init__(self, made: Program, folder: Path, batch: int, sequence: int) -> None:
        from systolic.formats.packages import package_folder

        env = dict(os.environ)
        if made.runtime in PACKAGES:
            env["PYTHONPATH"] = (
                f"{package_folder(PACKAGES[made.runtime])}:{env.get('PYTHONPATH', '')}"
            )
        words = [made.runtime, str(made.path), str(folder), str(batch), str(sequence)]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(
            [sys.executable, __file__, "--worker", *words],
            stdin=pipe,
            stdout=pipe,
            text=True,
            env=env,
            process_group=0,
        )
        self.seconds: list[Mapping[str, float]] = []
        self._answer()

    def _answer(self) -> list[Mapping[str, float]]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(f"exit code {self.child.wait()}")
        return json.loads(line)

    def turn(self) -> None:
        """One more, see :func:`turn`."""
        assert self.child.stdin is not None
        time.sleep(SETTLED)
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        self.seconds += self._answer()

    def over_calls(self, statistic: Callable[[Iterable[float]], float]) -> dict[str, float]:
        """Of each stage."""
        return {k: statistic(one[k] for one in self.seconds) for k in self.seconds[0]}


def programs(model: Path, batch: int, args: argparse.Namespace) -> list[Program]:
    """Files of a model for a batch, the first that of StableHLO, whose manifest names the inputs."""
    folder = args.work / model.stem
    folder.mkdir(parents=True, exist_ok=True)
    sizes = ("--batch", str(batch), "--sequence", str(args.sequence))
    lite = f"{batch}x{args.sequence}"
    data = () if args.data is None else ("--data", str(args.data))
    found = [
        Program("stablehlo", folder / "stablehlo"),
        Program("litert", folder / f"{lite}-f32.tflite", sizes),
        Program("litert", folder / f"{lite}-dynamic.tflite", (*sizes, "--precision", "dynamic")),
        Program("litert", folder / f"{lite}-int8.tflite", (*sizes, "--precision", "int8", *data)),
        Program("onnx", folder / "model.onnx"),
    ]
    if args.llama_server is None:
        found.append(Program("predict", model))
    elif batch == 1:
        found.append(Program("generate", model))
        found += [
            Program("gguf", folder / f"{name}.gguf", ("--precision", name))
            for name in ("f32", "q8_0")
        ]
    return [one for one in found if not args.float or ROUNDED.isdisjoint(one.words)]


def size_of(path: Path) -> int:
    """Bytes of a file, or of a folder's."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(one.stat().st_size for one in files if one.is_file())


def compared(ours: Mapping[str, float], stage: str, seconds: float) -> str:
    """Our seconds of a stage over a runtime's."""
    return f"{ours[stage] / seconds:.2f}" if stage in ours else ""


def measured(model: Path, batch: int, args: argparse.Namespace) -> list[str]:
    """Rows of the table."""
    refused, running = [], []
    folder = args.work / model.stem / "stablehlo"
    for made in programs(model, batch, args):
        why = exported(model, made)
        if why:
            refused.append(
                f"| {model.stem} | {batch} | {SHOWN[made.runtime]} | {made.path.name} | | {why} | | | | |"
            )
            continue
        started = made
        if made.runtime == "gguf":
            started = made._replace(path=Path(f"{args.llama_server}::{made.path}"))
        print(f"{model.stem}, batch {batch}: {made.runtime} {made.path.name}", file=sys.stderr)
        running.append((made, Worker(started, folder, batch, args.sequence)))
    for number in range(args.rounds):
        for _, worker in running if number % 2 == 0 else reversed(running):
            worker.turn()
    rows = []
    own = {
        one: worker.over_calls(statistics.median) for one, worker in running if one.runtime in OWN
    }
    ours = {stage: seconds for found in own.values() for stage, seconds in found.items()}
    for made, worker in running:
        stages, best = worker.over_calls(statistics.median), worker.over_calls(min)
        # Of stages, and of a server's process, the CPU time is not known.
        cpu_ms = stages.pop(CPU) * 1000
        cpu = f"{cpu_ms:.2f}" if "call" in stages else ""
        for stage, seconds in stages.items():
            each = seconds / (1 if stage == "decode" else batch)
            rows.append(
                f"| {model.stem} | {batch} | {SHOWN[made.runtime]} | {made.path.name} | {size_of(made.path) / 1e6:.1f} | {stage} {seconds * 1000:.2f} | {best[stage] * 1000:.2f} | {cpu} | {1 / each:.1f} | {compared(ours, stage, seconds)} |"
            )
        os.killpg(worker.child.pid, signal.SIGKILL)  # a server of its own too
    return [*rows, *refused]


def main(words: Sequence[str]) -> None:
    """Measures and writes the table."""
    if words[:1] == ["--worker"]:
        runtime, path, folder, batch, sequence = words[1:]
        work(runtime, path, folder, int(batch), int(sequence))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--float", action="store_true", help="leave files of 8 bits out")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    table = [
        "| model | rows | runtime | file | MB | ms | best | CPU ms | rows/s, or tokens/s of decode | systolic / this |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in args.models:
        for batch in args.batches:
            table += measured(model, batch, args)
            text = "\n".join(table) + "\n"
            if args.out is not None:
                args.out.write_text(text)
    print("\n".join(table))


if __name__ == "__main__":
    main(sys.argv[1:])
