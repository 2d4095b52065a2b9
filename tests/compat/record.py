"""Writes real files of this version for later ones to open: ``python -m tests.compat.record VERSION``.

Everything is made by the command line in ``/tmp/systolic-compat``, so that the paths that are recorded speak of no
machine, and packed by sample into ``tests/compat/VERSION/NAME.tar.xz``. ``made.json`` there has the commit, the
versions of packages, the commands, and what :mod:`tests.compat.reading` then reads from the files.
"""

import importlib.metadata
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.datasets

from tests.compat.reading import ADDED_STEPS, READINGS, environment, losses
from tests.formats import folders

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORK = Path("/tmp/systolic-compat")
LINKS = Path("/tmp/systolic-links")
"""The interpreter and the package, outside of the folder whose modules a run copies."""
MADE = "made.json"
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy", "optuna")
TEXT = "--path text.txt --validation held.txt --sequence 32 --batch 4"
SIZES = "--model.layers 1 --model.d-model 16 --model.d-ff 16 --model.heads 2 --model.kv-heads 1 --model.head-dim 8 --model.vocab 264"
RATES = "--schedule.kind constant --schedule.warmup 0 --optimizer.learning-rate 0.03"
RULES = "--evaluation.every 4 --evaluation.batches 2 --checkpoints.every 4 --checkpoints.keep-last 1 --log-every 1"
LM = f"train lm {TEXT} {SIZES} {RATES} {RULES}"
WIDE = f"lm {TEXT} --steps 8 --model.layers 1 --model.d-model 128 --model.d-ff 128 --model.heads 2 --model.kv-heads 1 --model.head-dim 64"
CHATS = "--data chats.jsonl --adapter lora --rank 2 --sequence 48 --batch 4 --schedule.kind constant --schedule.warmup 0"
SERVER = "--on v5e-1 --requests-per-second 1 --prompt-tokens 16 --output-tokens 8 --candidates 1 --finalists 1 --chunk 16"
STEPS = 8
TYPED = """
import systolic
from systolic.job import Checkpoints, Evaluation, Schedule
from systolic.job.optimizer import ScheduleKind
from systolic.models.encoder.config import Encoder
from systolic.recipes.mlm import mlm
model = Encoder(layers=1, d_model=8, d_ff=8, heads=2, positions=32)
job = mlm(path="text.txt", validation="held.txt", model=model, sequence=32, batch=4, steps=2,
          schedule=Schedule(kind=ScheduleKind.constant, warmup=0), evaluation=Evaluation(every=2, batches=1),
          checkpoints=Checkpoints(every=2, keep_last=1))
systolic.train(job, run="typed", log_every=1)
"""
"""A run that no recipe made: its job.json names the classes of its parts."""
SAMPLES: dict[str, tuple[str, ...]] = {
    "lm": (f"{LM} --steps {STEPS} --run lm",),
    "pictures": ("train pictures.py:job --log-every 1 --run pictures",),
    "tables": ("train tables.py:job --log-every 1 --run tables",),
    "bundle": ("export lm --to bundle --out bundle",),
    "int8": ("quantize lm --to int8 --repeats 0 --batches 1 --out int8",),
    "network": ("import torch_net.py:model --out network",),
    "imported": ("import llama --out imported",),
    "lora": (f"train sft --from imported {CHATS} --steps 4 --checkpoints.every 2 --log-every 1 --run lora",),
    "plan.json": (f"plan {WIDE} --on v5e-1,v5e-4 --goal cost --programs 3 --finalists 1 --out plan.json",),
    "server.json": (f"plan serve bundle {SERVER} --out server.json",),
    "study": ("tune pictures.py:job --search optimizer.learning-rate=0.001,0.01,0.1 --sampler random --trials 2 --study study",),
    "launches": (
        "launch tables.py:job --on cpu --via local --name done --run launched --submit",
        "launch tables.py:job --on cpu --via local --name waiting --run waiting",
        "launch tables.py:job --on v5e-4 --via gke --image registry/systolic:1 --run gs://bucket/run --name cluster",
    ),
    "kept": ("forecast --on v6e-1 --quick --keep kept --json -- python own_program.py > own.json",),
    "step": ("forecast tables.py:job --on cpu --save step",),
    "config": ("calibrate {chips}/v6e-8-allreduce-host-offload.xplane.pb --name of-v6e",),
}  # fmt: skip
"""Files by name to the commands that make them, in order."""
DATA = ("text.txt", "held.txt", "chats.jsonl", "digit.npy", "inputs.npz", "rows.jsonl")
"""What :func:`inputs` writes and readers need."""
TOGETHER = {
    "launches": ("launches", "state"),
    "kept": ("kept", "own.json"),
    "step": ("step", "step.json"),
}
"""Names of what a sample has, where it is more than the one of its name."""


def inputs() -> None:
    """Data and recipes of the commands."""
    for file in (HERE / "sources").iterdir():
        if file.is_file():
            shutil.copy(file, WORK / file.name)
    words = [f"def double_{n}(value):\n    return {n} * value\n" for n in range(60)]
    (WORK / "text.txt").write_text("\n".join(words[:50]))
    (WORK / "held.txt").write_text("\n".join(words[50:]))
    chats = [{"prompt": f"twice {n}", "completion": str(2 * n)} for n in range(30)]
    (WORK / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    folders.folder(WORK / "llama", folders.llama(**sizes))
    digits = sklearn.datasets.load_digits()
    np.save(WORK / "digit.npy", (digits.images[:1, ..., None] * 15).astype(np.uint8)[0])
    np.savez(WORK / "inputs.npz", input=np.ones((2, 3), np.float32))
    (WORK / "rows.jsonl").write_text('{"features": [1, 2, 3]}\n')


def systolic(command: str) -> None:
    """Runs ``systolic COMMAND`` in the working folder; ``> FILE`` at its end keeps the output."""
    words = shlex.split(command.replace("{chips}", str(LINKS / "chips")))
    out = WORK / words[-1] if words[-2] == ">" else WORK / "log.txt"
    words = words[:-2] if words[-2] == ">" else words
    print(f"systolic {shlex.join(words)}", file=sys.stderr)
    with out.open("w") as file:
        run([python(), "-m", "systolic", *words], stdout=file)


def python() -> str:
    """This interpreter by a path that is the same on every machine."""
    return str(LINKS / "environment" / "bin" / "python")


def run(words: Sequence[str], **more: Any) -> None:
    """Runs a process in the working folder."""
    subprocess.run(words, cwd=WORK, env=process_environment(), check=True, **more)


def process_environment() -> dict[str, str]:
    """Variables of a process: settings, states and caches are in the working folder, the package by a link."""
    own = {name: str(value) for name, value in environment(WORK).items()}
    path = f"{WORK / 'environment' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return os.environ | own | {"PYTHONPATH": str(LINKS / "src"), "PATH": path}


def interrupted() -> int:
    """A run that is told to stop as soon as it has trained: ``interrupted``; returns its last step."""
    words = shlex.split(f"{LM} --steps 100000 --run interrupted")
    metrics = WORK / "interrupted" / "metrics.jsonl"
    command = [python(), "-m", "systolic", *words]
    with subprocess.Popen(command, cwd=WORK, env=process_environment()) as process:
        while not metrics.is_file() or '"train"' not in metrics.read_text():
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
    return max(losses(WORK / "interrupted"))


def uninterrupted(steps: int) -> dict[int, float]:
    """Losses of a run of the same settings that nothing stopped."""
    systolic(f"{LM} --steps {steps} --run whole")
    return losses(WORK / "whole")


def without_machine(folder: Path) -> None:
    """Names the interpreter of a capture, which that resolves, by its path here."""
    for file in folder.glob("*.json*"):
        file.write_text(file.read_text().replace(sys.prefix, str(LINKS / "environment")))


def pack(name: str, target: Path) -> None:
    """``NAME.tar.xz`` of a sample."""
    with tarfile.open(target / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for part in TOGETHER.get(name, (name,)):
            for path in sorted([WORK / part, *(WORK / part).rglob("*")]):
                archive.add(path, path.relative_to(WORK).as_posix(), recursive=False, filter=plain)


def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """An entry without its user's name; locks are left out."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if entry.name.endswith(".lock") else entry


def main() -> None:
    """Makes, reads and packs everything."""
    (version,) = sys.argv[1:]
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    target = HERE / version
    target.mkdir()
    for folder in (WORK, LINKS):
        shutil.rmtree(folder, ignore_errors=True)
    WORK.mkdir()
    LINKS.mkdir()
    shutil.copytree(ROOT / "src", LINKS / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "recorded" / "chips", LINKS / "chips")
    venv.create(LINKS / "environment", symlinks=True)
    (packages,) = (LINKS / "environment").glob("lib/python*/site-packages")
    packages.rmdir()
    packages.symlink_to(sysconfig.get_path("purelib"))
    inputs()
    for commands in SAMPLES.values():
        for command in commands:
            systolic(command)
    run([python(), "-c", TYPED])
    time.sleep(15)  # the launch trains in the background
    last = interrupted()
    longest = max(last, STEPS) + ADDED_STEPS
    expected: dict[str, Any] = {"losses": uninterrupted(longest), "interrupted_at": last}
    assert {step: expected["losses"][step] for step in losses(WORK / "interrupted")} == losses(
        WORK / "interrupted"
    )
    without_machine(WORK / "kept")
    names = [*SAMPLES, "typed", "interrupted"]
    for name in names:
        pack(name, target)
    shutil.copytree(HERE / "sources", target / "sources", ignore=shutil.ignore_patterns("__py*"))
    for name in DATA:
        shutil.copy(WORK / name, target / "sources" / name)
    expected["read"] = {}
    for name, reading in READINGS.items():
        done = subprocess.run(
            [python(), "-m", "systolic", *shlex.split(reading.command)],
            cwd=WORK,
            env=process_environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        expected["read"][name] = reading.read(done.stdout)
    made = {
        "commit": commit,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "commands": {name: [f"systolic {each}" for each in SAMPLES[name]] for name in SAMPLES},
        **expected,
    }
    (target / MADE).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
