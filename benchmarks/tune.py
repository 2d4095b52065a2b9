"""Best value over trials: ``systolic tune`` with TPE and pruning, with random search, and Optuna called directly with our trainer.

    python benchmarks/tune.py run digits tpe out.jsonl      # one study; a line of JSON is appended
    python benchmarks/tune.py kills digits out.jsonl        # 4 workers of two commands, killed at random
    python benchmarks/tune.py table out.jsonl

The direct use (``hand``) is ``study.optimize`` with ``systolic.train`` in the objective, TPE, no pruning. All trials run one
after another in one process, with the same search, steps and evaluations. Times are wall-clock times. The overhead per trial is
drawing, claiming, reporting and ending; opening the study, done once, is listed separately.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

RATE_AND_DECAY = [
    "--search=optimizer.learning-rate=log:1e-5..1e-1",
    "--search=optimizer.weight-decay=log:1e-3..1",
]
SEARCH = {
    "digits": RATE_AND_DECAY,
    "digits-loss": RATE_AND_DECAY,
    "bytes": [
        "--search=optimizer.learning-rate=log:1e-4..3e-1",
        "--search=optimizer.adam-learning-rate=log:1e-5..1e-1",
    ],
}
WORDS = {
    "digits": ["--steps=150", "--evaluation.every=30"],
    "digits-loss": ["--steps=150", "--evaluation.every=30", "--objective=loss"],
    "bytes": [
        *("--steps=40", "--evaluation.every=10", "--evaluation.batches=8", "--batch=8"),
        *("--model.layers=1", "--model.d-model=64", "--model.d-ff=128", "--model.heads=1"),
        *("--model.kv-heads=1", "--model.ngrams=0", "--evaluation.final-batches=8"),
    ],
}
TRIALS = {"digits": 12, "digits-loss": 40, "bytes": 10}
ENDED = ("done", "stopped early")
KILLS, WORKERS, COMMANDS = 10, 4, 2
"""Several commands, since one has at most as many workers as the machine has cores."""


def searched(name: str) -> list[str]:
    """Arguments of a search; its recipe is the part of the name before the first dash."""
    return [name.partition("-")[0], *WORDS[name], *SEARCH[name]]


def tuned(recipe: str, way: str, seed: int, folder: Path) -> dict[str, Any]:
    """Runs a study with ``systolic tune``'s worker; returns its values and times."""
    from systolic.cli.tune import tuning_of
    from systolic.session import trials
    from systolic.tuning.results import rows_of

    line = [*searched(recipe), f"--study={folder}", f"--sampler-seed={seed}"]
    line += [f"--trials={TRIALS[recipe]}", f"--sampler={'random' if way == 'random' else 'tpe'}"]
    line += ["--pruner=none"] if way == "random" else ["--pruner=median"]
    tuning, training, reporting = tuning_of(line)[0], [], []
    trials.TrialWorker._train = timed(trials.TrialWorker._train, training)
    trials.TrialWatcher.see = timed(trials.TrialWatcher.see, reporting)
    began = time.perf_counter()
    with closing(tuning.open()) as shared:
        worker = trials.TrialWorker(tuning=tuning, shared=shared)
        # Once per process: imports, JAX's start-up, and the shapes of an evaluation.
        worker._check_metrics()
        worker._check_precision()
        opened = time.perf_counter() - began
        trials.TrialWorker._check_metrics = lambda _: None
        worker.work()
        rows = rows_of(shared, tuning.trials, tuning.searched, tuning.aims, tuning.runs)
    seconds = time.perf_counter() - began
    name = tuning.aims[0].name
    return {
        "values": [row.figures.get(name) if row.is_done else None for row in rows],
        "training": training,
        "reporting": sum(reporting),
        "opening": opened,
        "seconds": seconds,
    }


def timed(function: Any, seconds: list[float]) -> Any:
    """Wraps the function to append its time to ``seconds``."""

    def wrapped(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            seconds.append(time.perf_counter() - began)

    return wrapped


def by_hand(recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """Runs a study with Optuna's own ``optimize``; returns its values and times."""
    import optuna

    from systolic.cli.tune import tuning_of

    tuning = tuning_of([*searched(recipe), f"--study={folder / 'x'}"])[0]
    aim, training = tuning.aims[0], []
    from systolic.training.session import Audience, SessionOptions, start

    def objective(trial: Any) -> float:
        source = tuning.source({one.name: one.suggest(trial) for one in tuning.searched})
        began = time.perf_counter()
        run = folder / f"{trial.number}"
        result = start(source, SessionOptions(diagnose=0), Audience(), run=run)
        training.append(time.perf_counter() - began)
        return result.summary["final"]["metrics"][f"validation_{aim.name}"]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    began = time.perf_counter()
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'hand.db'}",
        direction=aim.direction,
        sampler=optuna.samplers.TPESampler(seed=seed),
    )
    opened = time.perf_counter() - began
    study.optimize(objective, n_trials=TRIALS[recipe], catch=(Exception,))
    seconds = time.perf_counter() - began
    values = [one.value for one in study.trials]
    return {
        "values": values,
        "training": training,
        "reporting": 0.0,
        "opening": opened,
        "seconds": seconds,
    }


def run(recipe: str, way: str, out: Path, seed: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = (
            by_hand(recipe, seed, folder)
            if way == "hand"
            else tuned(recipe, way, seed, folder / "s")
        )
    with out.open("a") as file:
        file.write(json.dumps({"recipe": recipe, "way": way, "seed": seed, **made}) + "\n")


def kills(recipe: str, out: Path, seed: int) -> None:
    """Kills workers at random; counts missing trials and runs with repeated or missing steps."""
    import psutil

    from systolic.runs.record import load_run

    chance, killed = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "s"
        line = [sys.executable, "-m", "systolic", "tune", *searched(recipe)]
        line += ["--checkpoints.every=10", f"--study={folder}", f"--trials={TRIALS[recipe]}"]
        began = time.perf_counter()
        said = [Path(name) / f"{number}.txt" for number in range(COMMANDS)]
        searches = []
        for path in said:
            with path.open("w") as file:
                words = [*line, f"--workers={WORKERS // COMMANDS}"]
                searches.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=file))
        while any(search.poll() is None for search in searches):
            time.sleep(chance.uniform(4, 16))
            # Only after the first checkpoint: a study whose workers all die before is given up.
            if killed < KILLS and [*folder.glob("trials/*/checkpoints/[0-9]*")]:
                running = [psutil.Process(one.pid) for one in searches if one.poll() is None]
                workers = [worker for one in running for worker in one.children()]
                if workers:
                    chance.choice(workers).kill()
                    killed += 1
        seconds = time.perf_counter() - began
        for search, path in zip(searches, said, strict=True):
            if search.returncode:
                print(path.read_text()[-4000:])
        study = json.loads((folder / "study.json").read_text())
        rows = study["trials"]
        uneven = 0
        for row in rows:
            if row["state"] in ("done", "stopped early"):
                steps = [record["step"] for record in load_run(Path(row["run"])).train]
                uneven += steps != list(range(1, row["step"] + 1))
        found = {
            "codes": [search.returncode for search in searches],
            "kills": killed,
            "seconds": seconds,
            "states": Counter(row["state"] for row in rows),
            "lost": TRIALS[recipe] - len({row["number"] for row in rows if row["state"] in ENDED}),
            "double": len(rows) - len({row["number"] for row in rows}) + uneven,
            "sessions": sum(load_run(Path(row["run"])).num_sessions for row in rows),
        }
    with out.open("a") as file:
        file.write(json.dumps({"recipe": recipe, "way": "kills", "seed": seed, **found}) + "\n")


def table(path: Path) -> None:
    """Prints the best value after N trials, and the overhead per trial."""
    for line in path.read_text().splitlines():
        one = json.loads(line)
        if one["way"] == "kills":
            print(line)
            continue
        best: list[float] = []
        better = max if one["recipe"] == "digits" else min
        for value in one["values"]:
            best.append(
                better([*best[-1:], *([value] if value is not None else [])], default=float("nan"))
            )
        count = len(one["training"])
        trained = sum(one["training"]) - one["reporting"]
        beside = one["seconds"] - one["opening"] - trained
        print(
            f"{one['recipe']:<7}{one['way']:<7}seed {one['seed']}  best after",
            *(f"{n}: {best[n - 1]:.4f}" for n in (3, 6, 9, 12) if n <= len(best)),
            f" {one['seconds']:.0f} s, median training {statistics.median(one['training']):.1f} s,"
            f" overhead {beside / count * 1e3:.0f} ms per trial ({beside / one['seconds']:.1%}),"
            f" {one['opening']:.1f} s once;"
            f" {sum(v is None for v in one['values'])} of {len(one['values'])} ended early",
        )


if __name__ == "__main__":
    if sys.argv[1] == "table":
        table(Path(sys.argv[2]))
    elif sys.argv[1] == "kills":
        kills(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    else:
        run(
            sys.argv[2],
            sys.argv[3],
            Path(sys.argv[4]),
            int(sys.argv[5]) if len(sys.argv) > 5 else 0,
        )
