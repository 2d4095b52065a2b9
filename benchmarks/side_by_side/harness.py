"""Measures contenders in turn: each trains in a process of its own, and all but one are stopped.

A contender runs its own training loop without interruption but for SIGSTOP and SIGCONT, so that no
loop is bent to the harness. Each writes a record with the time at every finished step; a round is
a window for each contender, and a window's rate counts from its first finished step to its last.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import sizes as shared

HERE = Path(__file__).parent
SYSTOLIC = "systolic"
PEERS = ("torch", "compiled", "keras", "transformers")
LABELS = {
    "systolic": "Systolic",
    "torch": "PyTorch eager",
    "compiled": "PyTorch compiled",
    "keras": "Keras 3 on JAX",
    "transformers": "Hugging Face Trainer",
}
FIRST = 8
"""Steps that every contender makes before the rounds; their losses are compared."""

QUIET = 0.1
"""Cores that others may use in a window before it is measured again."""


@dataclass(kw_only=True)
class Contender:
    """A process group that trains and keeps records."""

    name: str
    records: Path
    command: list[str]
    log: Path
    environment: dict[str, str]
    preferred: bool = False
    """Whether the scheduler is told to put it before other programs; Linux, as root."""
    process: Any = None
    started: float = 0.0

    def start(self) -> None:
        """Starts it; it runs until :meth:`pause`."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.time()
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=out,
                env=self.environment,
                cwd=HERE.parents[1],
                start_new_session=True,
            )
        if self.preferred:
            # A session of its own is a scheduling group of its own, which "nice" says nothing about.
            Path(f"/proc/{self.process.pid}/autogroup").write_text("-19")

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kills it, stopped or not."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def read(self, kind: str) -> list[dict[str, Any]]:
        """Its records of a kind so far."""
        if self.process.poll() is not None:
            sys.exit(f"{self.name} ended early:\n{self.log.read_text()[-3000:]}")
        if not self.records.exists():
            return []
        lines = self.records.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in found if record["kind"] == kind]

    def cpu_seconds(self) -> float:
        """Processor time of its processes."""
        first = psutil.Process(self.process.pid)
        times = [p.cpu_times() for p in (first, *first.children(recursive=True))]
        return sum(t.user + t.system for t in times)


@dataclass(kw_only=True)
class Measured:
    """What is known of one contender."""

    num_parameters: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    first_step_seconds: float = 0.0
    """From the start of the process to the end of its first step: imports, compiling, one step."""
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Tokens or images a second, by round."""
    cores: list[float] = field(default_factory=list)
    other_cores: list[float] = field(default_factory=list)
    """Cores that processes outside the benchmark used, by round."""


def prepare(kind: str, made: Any, folder: Path) -> None:
    """Writes what the contenders share: Systolic's order of the data and its first weights."""
    import recipes

    from systolic.job import Read, Split
    from systolic.setup import first_state, set_up

    job = getattr(recipes, kind)(**asdict(made))
    setup = set_up(job)
    source = job.data.open(Read(split=Split.train, batch=made.batch, seed=job.seed))
    batches = [next(source) for _ in range(shared.BATCHES)]
    source.close()
    arrays = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    if kind == "language":
        named = {"tokens": arrays["tokens"]}
        targets = arrays["targets"]
        named["targets"] = np.where(targets < 0, shared.IGNORED, targets)
    else:
        named = {"image": arrays["image"], "label": arrays["label"]}
    np.savez(folder / "batches.npz", **named)
    weights = first_state(setup.steps, job.seed).params
    np.savez(folder / "weights.npz", **(by_block(weights) if kind == "language" else weights))
    (folder / "sizes.json").write_text(json.dumps(shared.to_json(kind, made)))


NORMS = {"norm1": "attention_norm", "norm2": "mlp_norm"}
"""Norms of a block as the peers call them, and as Systolic does."""
PRODUCTS = {"out": "out", "up": "mlp/up", "down": "mlp/down"}
"""Matrices of a block, likewise."""


def by_block(weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A decoder's weights under the names that the peers read: those of each block apart, matrices [inputs, outputs]."""
    stacked = {name: np.asarray(value) for name, value in weights.items()}
    blocks = {name: stacked.pop(name) for name in list(stacked) if name.startswith("blocks/")}
    count, width = blocks["blocks/query_bias"].shape
    for block in range(count):
        own = {name.removeprefix("blocks/"): value[block] for name, value in blocks.items()}
        into = f"blocks/{block}"
        parts = ("query", "key", "value")
        kernels = [own[part].reshape(width, width) for part in parts]
        stacked[f"{into}/qkv/kernel"] = np.concatenate(kernels, axis=1)
        stacked[f"{into}/qkv/bias"] = np.concatenate([own[f"{part}_bias"] for part in parts])
        for name, mine in PRODUCTS.items():
            outputs = own[f"{mine}_bias"].shape[0]
            stacked[f"{into}/{name}/kernel"] = own[mine].reshape(-1, outputs)
            stacked[f"{into}/{name}/bias"] = own[f"{mine}_bias"]
        for name, mine in NORMS.items():
            stacked[f"{into}/{name}/scale"] = own[f"{mine}/scale"]
            stacked[f"{into}/{name}/bias"] = own[f"{mine}/bias"]
    return stacked


def contenders(kind: str, made: Any, peers: Path, names: list[str], work: Path) -> list[Contender]:
    """The processes, not yet started; caches are empty, so that start-up is a first one."""
    cores = str(psutil.cpu_count())
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": cores,
        "MKL_NUM_THREADS": cores,
        "XDG_CACHE_HOME": str(work / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "cache" / "inductor"),
        "HF_HUB_OFFLINE": "1",
    }
    found = []
    for name in names:
        folder = work / name
        records = folder / "metrics.jsonl"
        if name == SYSTOLIC:
            target = f"{HERE / 'recipes.py'}:{kind}"
            command = [sys.executable, "-m", "systolic", "train", target, "--json"]
            command += ["--run", str(folder)]
            for key, value in asdict(made).items():
                command += [f"--{key.replace('_', '-')}", str(value)]
        else:
            folder.mkdir()
            command = [str(peers), str(HERE / "contender.py"), name, str(work)]
        found.append(
            Contender(
                name=name,
                records=records,
                command=command,
                log=work / "logs" / name,
                environment=environment,
            )
        )
    return found


def warm_up(contender: Contender) -> Measured:
    """Starts a contender, lets it make its first steps and stops it."""
    contender.start()
    while len(steps := contender.read("train")) < FIRST:
        time.sleep(0.2)
    contender.pause()
    start = contender.read("start")[0]
    return Measured(
        num_parameters=start["num_parameters"],
        versions=start.get("versions", {}),
        first_step_seconds=steps[0]["time"] - contender.started,
        losses=[record["loss"] for record in steps[:FIRST]],
    )


def window(contender: Contender, units: int, seconds: float) -> tuple[float, float, float]:
    """Rate, cores it used and cores that others used while it ran for ``seconds``."""
    own, others, start = contender.cpu_seconds(), busy_seconds(), time.time()
    contender.go_on()
    while True:
        time.sleep(0.1)
        steps = [r["time"] for r in contender.read("train") if r["time"] > start]
        if time.time() - start >= seconds and len(steps) >= 4:
            break
    contender.pause()
    wall = time.time() - start
    own = contender.cpu_seconds() - own
    others = busy_seconds() - others - own
    rate = units * (len(steps) - 1) / (steps[-1] - steps[0])
    return rate, own / wall, max(others, 0.0) / wall


def busy_seconds() -> float:
    """Processor time of everything on the machine so far."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def wait_for_quiet(limit_seconds: float) -> float:
    """Waits until others leave the processors alone; the cores they used last."""
    deadline = time.time() + limit_seconds
    while True:
        share = psutil.cpu_percent(interval=1.0) / 100 * (psutil.cpu_count() or 1)
        if share < QUIET or time.time() > deadline:
            return share


def measure(asked: argparse.Namespace, kind: str, made: Any, work: Path) -> dict[str, Measured]:
    """All contenders warmed up, then rounds."""
    processes = contenders(kind, made, asked.peers, asked.contenders, work)
    for process in processes:
        process.preferred = asked.preferred
    found: dict[str, Measured] = {}
    try:
        for process in processes:
            wait_for_quiet(asked.patience)
            found[process.name] = warm_up(process)
            say(f"{process.name}: first step after {found[process.name].first_step_seconds:.1f} s")
        for index in range(asked.rounds):
            for process in processes:
                wait_for_quiet(asked.patience)
                tries = [window(process, made.units_per_step, asked.seconds)]
                while tries[-1][2] > QUIET and len(tries) < asked.tries:
                    tries.append(window(process, made.units_per_step, asked.seconds))
                rate, cores, others = min(tries, key=lambda one: one[2])
                measured = found[process.name]
                measured.rates.append(rate)
                measured.cores.append(cores)
                measured.other_cores.append(others)
                say(f"round {index + 1} {process.name}: {rate:.1f}/s, others {others:.2f} cores")
    finally:
        for process in processes:
            process.end()
    return found


def ratios(found: dict[str, Measured]) -> dict[str, dict[str, Any]]:
    """Systolic's rate over each peer's, paired by round."""
    own = found[SYSTOLIC].rates
    pairs = {
        name: [a / b for a, b in zip(own, peer.rates, strict=True)]
        for name, peer in found.items()
        if name != SYSTOLIC
    }
    return {name: {"median": statistics.median(r), "rounds": r} for name, r in pairs.items()}


def table(found: dict[str, Measured], unit: str) -> str:
    """Markdown."""
    lines = [
        f"| contender | {unit}/s (median) | Systolic's ratio (median; rounds) | first step after | parameters | loss, steps 1 to {FIRST} |",
        "|---|---|---|---|---|---|",
    ]
    compared = ratios(found) if SYSTOLIC in found else {}
    for name, one in found.items():
        ratio = "1"
        if name in compared:
            each = compared[name]
            ratio = f"{each['median']:.2f}; " + " ".join(f"{r:.2f}" for r in each["rounds"])
        losses = " ".join(f"{loss:.4f}" for loss in one.losses)
        lines.append(
            f"| {LABELS[name]} | {statistics.median(one.rates):,.0f} | {ratio} | {one.first_step_seconds:.1f} s | {one.num_parameters:,} | {losses} |"
        )
    return "\n".join(lines) + "\n"


def machine() -> dict[str, Any]:
    """Where it was measured."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(kind: str, unit: str) -> None:
    """The command line of ``language.py`` and ``vision.py``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=Path, required=True, help="the peers' python")
    parser.add_argument("--contenders", nargs="+", default=[SYSTOLIC, *PEERS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window")
    parser.add_argument("--tries", type=int, default=2, help="of a window that others disturbed")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for quiet")
    parser.add_argument("--preferred", action="store_true", help="before other programs; as root")
    parser.add_argument("--tiny", action="store_true", help="to try the harness")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    parser.add_argument("--note", default="", help="kept with the results")
    asked = parser.parse_args()
    # An end from outside must end the contenders, too, which may be stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    made = shared.TINY[kind] if asked.tiny else shared.KINDS[kind]()
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(kind, made, work)
        found = measure(asked, kind, made, work)
    if SYSTOLIC in found:
        libraries = ("systolic", "jax", "jaxlib", "flax", "optax")
        found[SYSTOLIC].versions = {name: version(name) for name in libraries}
    now = datetime.now(UTC)
    result = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "sizes": shared.to_json(kind, made),
        "optimizer": asdict(shared.ADAMW),
        "precision": "f32",
        "unit": f"{unit} per second",
        "note": asked.note,
        "contenders": {name: asdict(one) for name, one in found.items()},
        "ratios": ratios(found) if SYSTOLIC in found else {},
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    stem = asked.out / f"{now:%Y-%m-%d}-side-by-side-{kind}{'-tiny' if asked.tiny else ''}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    text = table(found, unit)
    stem.with_suffix(".md").write_text(text)
    print(text)
