"""`kill -9` at random moments of training, each followed by a resume: is the run, bit for bit, the run that was not killed?

    python benchmarks/kills.py FOLDER [--kills 120 --pairs 80] [--minutes 60] [--seed 0] [--json FILE]

FOLDER holds the runs and `kills.jsonl`; the same command continues where an earlier one stopped. `--kills`
are of runs in one process, `--pairs` of runs in two processes, both of which die, one shortly after the other.
A tiny language model is trained: 390 steps, a checkpoint every 15, an evaluation every 50. Moments are drawn for
each phase in turn and counted by the phase that the run's files show when the signal is sent. A run takes up
to 20 kills, is then left to finish, and compared with the run that nobody killed: loss, gradient norm and
learning rate of every step, every evaluation, every array of the last checkpoint, and the data's position.
"""

import argparse
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS, SAVE, EVALUATE, KILLS_OF_A_RUN = 390, 15, 50, 20
PHASES = ("start", "compile", "step", "save", "evaluation", "replace")
SEEN = (*PHASES, "end")
"""The end is hit by chance: metrics of the last checkpoint, sample, summary, report."""
PATIENCE_SECONDS = 300.0
"""For a moment to come; a run that takes longer hangs."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where it works and in how many processes a run trains."""

    folder: Path
    processes: int

    @property
    def whole(self) -> Path:
        """The run that nobody kills."""
        return self.folder / f"whole-{self.processes}"

    def options(self, run: Path) -> list[str]:
        """Of a new run."""
        sizes = "--model.layers 1 --model.d-model 16 --model.d-ff 16 --model.heads 2 --model.kv-heads 1 --model.head-dim 8 --sequence 32 --batch 4 --schedule.warmup 10 --optimizer.learning-rate 3e-3"
        when = f"--steps {STEPS} --checkpoints.every {SAVE} --evaluation.every {EVALUATE} --evaluation.batches 120"
        path = ["--path", str(self.folder / "text"), "--validation", str(self.folder / "held-out")]
        return ["lm", *path, *sizes.split(), *when.split(), "--run", str(run)]

    def start(self, run: Path) -> "Session":
        """A session that begins the run, or goes on with it."""
        begun = (run / "job.json").exists()
        if not begun:  # Killed before the run was a run.
            shutil.rmtree(run, ignore_errors=True)
        args = ["--resume", str(run)] if begun else self.options(run)
        environ = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [sys.executable, "-m", "systolic", "train", *args, "--json"]
        session = Session(run=run, starts=count(run, '"kind": "start"'))
        address = f"127.0.0.1:{free_port()}"
        for number in range(self.processes):
            job = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(self.processes),
                "JAX_PROCESS_ID": str(number),
                "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            }
            log = (self.folder / f"stderr-{self.processes}-{number}").open("w")
            session.processes.append(
                subprocess.Popen(
                    command,
                    env=environ | (job if self.processes > 1 else {}),
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                )
            )
            log.close()
        return session

    def told(self) -> str:
        """What the last session printed."""
        files = [self.folder / f"stderr-{self.processes}-{n}" for n in range(self.processes)]
        return " | ".join(file.read_text()[-2000:] for file in files)


@dataclass(kw_only=True)
class Session:
    """The processes of one start, and what the run's files say of them."""

    run: Path
    starts: int
    """Sessions on record before this one."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def over(self) -> bool:
        """Whether a process has ended."""
        return any(process.poll() is not None for process in self.processes)

    def signal(self, number: signal.Signals, moments: random.Random | None = None) -> None:
        """Sends it to all, in any order, the second up to 0.1 s after the first."""
        order = list(self.processes)
        if moments is not None:
            moments.shuffle(order)
        for process in order:
            process.send_signal(number)
            if moments is not None and process is not order[-1]:
                time.sleep(moments.uniform(0.0, 0.1))

    def wait(self) -> list[int]:
        """Their exit codes. One that fails leaves the other waiting, so that one is ended."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while any(process.poll() is None for process in self.processes):
            failed = any(process.poll() not in (None, 0, 143) for process in self.processes)
            if time.monotonic() > ends or (failed and time.monotonic() > ends - 270):
                self.signal(signal.SIGKILL)
            time.sleep(0.05)
        return [process.wait() for process in self.processes]

    def phase(self) -> str:
        """By the run's files."""
        if count(self.run, '"kind": "start"') <= self.starts:
            return "start"
        saves = self.run / "checkpoints"
        if (saves / "replacing").exists():
            return "replace"
        if any(saves.glob("*.orbax-checkpoint-tmp*")):
            return "save"
        kind, step = last(self.run)
        if kind == "start":
            return "compile"
        if kind == "train" and (step % EVALUATE == 0 or step == STEPS):
            return "evaluation"
        return "end" if step == STEPS else "step"


def records(run: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a log that another process writes."""
    log = run / "metrics.jsonl"
    for line in log.read_text().splitlines(keepends=True) if log.exists() else []:
        if line.endswith("\n"):
            yield json.loads(line)


def count(run: Path, text: str) -> int:
    """How often a text is in the log."""
    log = run / "metrics.jsonl"
    return log.read_text().count(text) if log.exists() else 0


def last(run: Path) -> tuple[str, int]:
    """Kind and step of the newest start, train or eval record; of the log's end, to be quick."""
    log, kind, step = run / "metrics.jsonl", "start", 0
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        for line in file.read().split(b"\n")[:-1]:
            found = re.match(rb'{"kind": "(start|train|eval)", "step": (\d+)', line)
            if found:
                kind, step = found[1].decode(), int(found[2])
    return kind, step


def until(session: Session, seen: Callable[[], bool]) -> bool:
    """Waits for something in the run's files; False where the session ended before."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while not seen():
        if session.over():
            return False
        if time.monotonic() > ends:
            raise TimeoutError(f"{session.run} has hung in {session.phase()}")
        time.sleep(0.002)
    return not session.over()


def moment(session: Session, phase: str, moments: random.Random) -> bool:
    """Waits for a random moment of a phase; False where the run ended before it came."""
    if phase == "start":
        time.sleep(moments.uniform(0.1, 4.0))
        return not session.over()
    if not until(session, lambda: count(session.run, '"kind": "start"') > session.starts):
        return False
    if phase == "compile":
        time.sleep(moments.uniform(0.0, 1.0))
        return not session.over()
    if phase == "step":
        target = last(session.run)[1] + moments.randint(1, 12)
        found = until(session, lambda: last(session.run)[1] >= target)
        time.sleep(moments.uniform(0.0, 0.02))
        return found and not session.over()
    saves = session.run / "checkpoints"
    quick = {
        "save": lambda: any(saves.glob("*.orbax-checkpoint-tmp*")),
        "replace": (saves / "replacing").exists,
    }
    found = until(session, quick.get(phase, lambda: session.phase() == phase))
    time.sleep(moments.uniform(0.0, 0.05))
    return found and not session.over()


def owe(bench: Bench, run: Path) -> bool:
    """Stops the run politely during an evaluation, so that the next session replaces its checkpoint."""
    session = bench.start(run)
    try:
        if until(session, lambda: session.phase() == "evaluation"):
            session.signal(signal.SIGTERM)
    except TimeoutError:
        session.signal(signal.SIGKILL)
        raise
    return all(code == 143 for code in session.wait())


def kill(bench: Bench, run: Path, wanted: str, moments: random.Random) -> str | None:
    """One session that is killed; the phase it was in, ``None`` where it ended before.

    Raises:
        RuntimeError: the session failed by itself.
    """
    if wanted == "replace" and not ((run / "job.json").exists() and owe(bench, run)):
        wanted = "step"
    session = bench.start(run)
    try:
        came = moment(session, wanted, moments)
    except TimeoutError:
        session.signal(signal.SIGKILL)
        raise
    if came:
        phase = session.phase()
        session.signal(signal.SIGKILL, moments)
        session.wait()
        return phase
    codes = session.wait()
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {bench.told()}")
    return None


def finish(bench: Bench, run: Path) -> None:
    """Lets the run go on to its end.

    Raises:
        RuntimeError: it does not.
    """
    codes = bench.start(run).wait()
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {bench.told()}")


def differences(one: Path, other: Path) -> list[str]:
    """Where two runs are not the same, bit for bit."""
    found = [
        name
        for name, of in (("steps", steps_of), ("evaluations", evaluations_of), ("state", state_of))
        if of(one) != of(other)
    ]
    left = [path.name for path in (other / "checkpoints").iterdir() if not path.name.isdigit()]
    return found + ([f"left behind: {', '.join(left)}"] if left else [])


def steps_of(run: Path) -> dict[int, Any]:
    """Every number of every step that does not depend on the clock."""
    found: dict[int, Any] = {}
    for r in records(run):
        if r["kind"] == "train":
            assert r["step"] not in found, f"{run}: step {r['step']} is there twice"
            found[r["step"]] = (r["loss"], r["grad_norm"], r["learning_rate"])
    assert sorted(found) == list(range(1, STEPS + 1)), run
    return found


def evaluations_of(run: Path) -> list[Any]:
    """Every evaluation."""
    return [(r["step"], r["split"], r["metrics"]) for r in records(run) if r["kind"] == "eval"]


def state_of(run: Path) -> dict[str, Any]:
    """Every array of the last checkpoint as bytes, and what was saved beside them."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    newest = run / "checkpoints" / str(STEPS)
    found: dict[str, Any] = {
        file.name: file.read_text() for file in (newest / "_extra").glob("process_*.json")
    }
    found["metrics"] = json.loads((newest / "manifest.json").read_text())["metrics"]
    for item in sorted(path for path in newest.iterdir() if path.is_dir()):
        if item.name == "_extra":
            continue
        with ocp.PyTreeCheckpointer() as reader:
            metadata = reader.metadata(item).item_metadata.tree
            kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
            tree = reader.restore(item, restore_args=kinds)
        for keys, array in jax.tree_util.tree_leaves_with_path(tree):
            name = item.name + jax.tree_util.keystr(keys)
            found[name] = (str(array.dtype), array.shape, np.asarray(array).tobytes())
    return found


def free_port() -> int:
    """For the coordinator of a run in two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def write_text(folder: Path, documents: int) -> None:
    """A corpus of made-up code."""
    if folder.exists():
        return
    words, moments = ["def", "return", "if", "x", "y", "=", "+", "\n"], random.Random(documents)
    folder.mkdir(parents=True)
    for number in range(documents):
        chosen = moments.choices(words, k=moments.randint(20, 120))
        (folder / f"{number}.txt").write_text(" ".join(chosen))


def rounds(bench: Bench, done: list[dict[str, Any]], wanted: int, seed: int) -> Iterator[Any]:
    """Runs that are killed, finished and compared: the records of one run at a time."""
    number = 1 + max((r["run"] for r in done), default=-1)
    kills = sum(len(r["phases"]) for r in done)
    while kills < wanted:
        moments = random.Random(f"{seed} {bench.processes} {number}")
        run, phases = bench.folder / f"cut-{bench.processes}-{number}", []
        shutil.rmtree(run, ignore_errors=True)
        order = list(PHASES) * KILLS_OF_A_RUN
        wrong: list[str] = []
        try:
            while len(phases) < min(KILLS_OF_A_RUN, wanted - kills):
                phase = kill(bench, run, order[len(phases)], moments)
                if phase is None:
                    break
                phases.append(phase)
            finish(bench, run)
            wrong = differences(bench.whole, run)
        except (RuntimeError, TimeoutError, AssertionError) as error:
            wrong = [str(error)]
        if not wrong:
            shutil.rmtree(run)
        kills += len(phases)
        yield {"processes": bench.processes, "run": number, "phases": phases, "wrong": wrong}
        number += 1


def table(done: list[dict[str, Any]]) -> str:
    """Kills by phase and number of processes, and how many were resumed bit for bit."""
    lines = [
        "| phase | in one process | in two processes | resumed bit for bit |",
        "|---|---|---|---|",
    ]
    all_, good = Counter[tuple[str, int]](), Counter[str]()
    for record in done:
        for phase in record["phases"]:
            all_[phase, record["processes"]] += 1
            good[phase] += not record["wrong"]
    for phase in SEEN:
        ones, twos = all_[phase, 1], all_[phase, 2]
        lines.append(f"| {phase} | {ones} | {twos} | {good[phase]} of {ones + twos} |")
    ones, twos = (sum(n for (_, p), n in all_.items() if p == count) for count in (1, 2))
    lines.append(f"| all | {ones} | {twos} | {sum(good.values())} of {ones + twos} |")
    lines += [f"\n{r['processes']}-{r['run']}: {w}" for r in done for w in r["wrong"]]
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=120)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    write_text(folder / "text", 600)
    write_text(folder / "held-out", 120)
    log, ends = folder / "kills.jsonl", time.monotonic() + asked.minutes * 60
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for processes, wanted in ((1, asked.kills), (2, asked.pairs)):
        bench = Bench(folder=folder, processes=processes)
        if wanted and not (bench.whole / "summary.json").exists():
            shutil.rmtree(bench.whole, ignore_errors=True)
            finish(bench, bench.whole)
        mine = [record for record in done if record["processes"] == processes]
        for record in rounds(bench, mine, wanted, asked.seed):
            done.append(record)
            with log.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(record, flush=True)
            if time.monotonic() > ends:
                break
    print(table(done))
    if asked.json:
        asked.json.write_text(json.dumps(done, indent=1) + "\n")
    sys.exit(any(record["wrong"] for record in done))


if __name__ == "__main__":
    main()
