"""Searches by several processes that are killed, over SQLite and PostgreSQL: no trial is lost or runs twice."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("optuna")

from systolic.core.errors import RunError
from systolic.runs.record import load_run
from systolic.tuning.claims import this_worker
from systolic.tuning.study import SharedStudy, address
from systolic.tuning.trials import TrialWorker
from tests.tuning.searches import tuning_of

RECIPE = f"{Path(__file__).parents[1] / 'training' / 'tiny.py'}:job"
SEARCH = ["--search=learning-rate=log:1e-4..1e-1", "--search=scale=0.5,1.0"]
STEPS, TRIALS = 60, 8


def command(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    line = [sys.executable, "-m", "systolic", "tune", RECIPE, *SEARCH, f"--study={folder}", *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def workers(of: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    try:
        return [each for each in psutil.Process(of.pid).children() if each.status() != "zombie"]
    except psutil.NoSuchProcess:
        return []


def ended(folder: Path) -> int:
    """Number of runs with a summary."""
    return len([*folder.glob("trials/*/summary.json")])


def check(rows: list[dict[str, Any]]) -> None:
    """Checks that each trial is listed once and each run has every step once."""
    assert [row["number"] for row in rows] == list(range(TRIALS))
    assert {row["state"] for row in rows} <= {"done", "stopped early"}, rows
    assert Counter(row["run"] for row in rows).most_common(1)[0][1] == 1
    for row in rows:
        run = load_run(Path(row["run"]))
        assert run.job.options["learning_rate"] == row["values"]["learning-rate"]
        steps = [record.step for record in run.train]
        assert steps == list(range(1, (STEPS if row["state"] == "done" else row["step"]) + 1))


@pytest.mark.slow
def test_workers_and_commands_are_killed_at_random(tmp_path: Path) -> None:
    folder, chance = tmp_path / "study", random.Random(0)
    words = [f"--steps={STEPS}", f"--trials={TRIALS}", "--workers=2", "--evaluation.every=20"]
    both = [command(folder, *words) for _ in range(2)]
    for kill in range(6):
        begun = time.monotonic()
        while ended(folder) <= kill // 2 and time.monotonic() - begun < 60:
            time.sleep(chance.random())
        found = [each for one in both for each in workers(one)]
        if found:
            chance.choice(found).kill()
    both[1].send_signal(signal.SIGKILL)
    both[1].communicate()
    out, err = both[0].communicate()
    assert both[0].returncode in (0, 1), err.decode()
    last = command(folder, *words, "--json")
    out, err = last.communicate()
    assert last.returncode == 0, err.decode()
    study = json.loads(out)
    assert (study["finished"], study["total"]) == (TRIALS, TRIALS)
    check(study["trials"])
    assert (folder / "report.html").is_file()


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    words = ["--trials=2", "--steps=4000", "--repeats=0", "--pruner=none"]
    first = command(folder, *words)
    records = folder / "trials" / "0000" / "metrics.jsonl"
    while not records.exists() or '"kind":"train"' not in records.read_text().replace(" ", ""):
        assert first.poll() is None, first.communicate()
        time.sleep(0.2)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate()
    assert first.returncode == 130, err.decode()
    assert "interrupted; rerun to continue" in err.decode()
    made = tuning_of([RECIPE, *SEARCH, f"--study={folder}", *words])
    with closing(made.open()) as shared:
        (trial,) = shared.trials(2)
    assert trial.state.name == "WAITING"
    assert [*(folder / "trials" / "0000" / "checkpoints").glob("[0-9]*")]


@pytest.mark.slow
def test_a_worker_that_was_suspended_goes_on_with_its_trial(tmp_path: Path) -> None:
    """A suspended laptop: heartbeats are missing, and another worker leaves the trial to the process that trains it."""
    folder = tmp_path / "study"
    words = ["--trials=1", f"--steps={STEPS * 20}", "--pruner=none", "--evaluation.every=0"]
    words.append("--checkpoints.every=0")
    first = command(folder, *words)
    records = folder / "trials" / "0000" / "metrics.jsonl"
    while not records.exists() or '"train"' not in records.read_text():
        assert first.poll() is None, first.communicate()
        time.sleep(0.2)
    (worker,) = workers(first)
    worker.suspend()
    made = tuning_of([RECIPE, *SEARCH, f"--study={folder}", *words])
    with closing(made.open()) as shared:
        with closing(sqlite3.connect(folder / "study.db")) as connection, connection:
            connection.execute("UPDATE systolic_claims SET beat = beat - 3600")
        other = TrialWorker(tuning=made, shared=shared)
        assert shared.claim(1, this_worker(), other._is_busy) is None
        assert shared.trials(1)[0].state.name == "RUNNING"
        worker.resume()
        _, err = first.communicate()
        assert first.returncode == 0, err.decode()
        assert shared.trials(1)[0].state.name == "COMPLETE"
    assert load_run(folder / "trials" / "0000").num_sessions == 1


def postgresql_bin() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@pytest.fixture
def database() -> Iterator[str]:
    """URL of a new PostgreSQL server on a socket."""
    pytest.importorskip("psycopg")
    tools = postgresql_bin()
    if tools is None:
        pytest.skip("no PostgreSQL server is installed")
    user = "postgres" if os.geteuid() == 0 else None
    # A socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="pg") as name:
        os.chmod(name, 0o777)
        data = f"{name}/data"

        def run(*line: str) -> None:
            subprocess.run(
                line, check=True, user=user, cwd=name, stdout=subprocess.DEVNULL, timeout=100
            )

        run(str(tools / "initdb"), "-D", data, "-A", "trust", "-U", "tuner", "--no-sync")
        flags = f"-k {name} -c listen_addresses= -c fsync=off"
        run(str(tools / "pg_ctl"), "-D", data, "-w", "-l", f"{name}/log", "-o", flags, "start")
        try:
            yield f"postgresql://tuner@/postgres?host={name}"
        finally:
            run(str(tools / "pg_ctl"), "-D", data, "-m", "immediate", "stop")


CLAIMS = """
import sys
from pathlib import Path
from systolic.tuning import sampling
from systolic.tuning.study import SharedStudy, address
from systolic.tuning.claims import this_worker

shared = SharedStudy(address(sys.argv[1], Path(), "claims"), {}, ["minimize"], 4)
while (record := shared.claim(int(sys.argv[2]), this_worker())) is not None:
    sampler = sampling.build(sampling.Sampler.random, [], 0, record.number)
    trial = shared.drawn(record, sampler, sampling.pruner(sampling.Pruner.none, 1, 1))
    trial.suggest_float("x", 0, 1)
    assert shared.finish(trial, this_worker(), [1.0], "")
    print(record.number, flush=True)
"""


OPENS = """
import sys
from pathlib import Path
from systolic.tuning.search import optuna, sqlalchemy
from systolic.tuning.study import SharedStudy, address

optuna(), sqlalchemy()
print("ready", flush=True)
sys.stdin.readline()
for number in range(5):
    folder = Path(sys.argv[1]) / str(number)
    storage = sys.argv[2] if len(sys.argv) > 2 else None
    storage = storage and storage.replace("/postgres?", f"/study{number}?")
    SharedStudy(address(storage, folder, "s"), {"recipe": "r"}, ["minimize"]).close()
"""


def open_together(folder: Path, *storage: str) -> None:
    """Four processes create each of five studies at the same time."""
    for number in range(5):
        (folder / str(number)).mkdir()
    line = [sys.executable, "-c", OPENS, folder, *storage]
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(4)
    ]
    for each in running:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in running:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    told = [each.communicate()[1] for each in running]
    assert [each.returncode for each in running] == [0] * 4, told


@pytest.mark.slow
def test_processes_that_make_a_study_at_once_all_get_it(tmp_path: Path) -> None:
    open_together(tmp_path)


@pytest.mark.slow
def test_processes_that_make_tables_at_once_all_get_them(database: str, tmp_path: Path) -> None:
    import psycopg

    with psycopg.connect(database, autocommit=True) as connection:
        for number in range(5):
            connection.execute(f"CREATE DATABASE study{number}")
    open_together(tmp_path, database)


@pytest.mark.slow
def test_processes_share_a_study_in_postgresql(database: str, tmp_path: Path) -> None:
    import psycopg

    line = [sys.executable, "-c", CLAIMS, database, "24"]
    # The time zones of their sessions differ.
    running = [
        subprocess.Popen(
            line, stdout=subprocess.PIPE, env={**os.environ, "PGTZ": f"Etc/GMT{hours}"}
        )
        for hours in ("+9", "-9", "+0")
    ]
    assert running[0].stdout is not None
    first = [int(running[0].stdout.readline())]
    running[0].kill()
    printed = [each.communicate()[0].split() for each in running]
    running = [subprocess.Popen(line, stdout=subprocess.PIPE)]
    printed.append(running[0].communicate()[0].split())
    counted = Counter([*first, *(int(word) for words in printed for word in words)])
    assert max(counted.values()) == 1
    # Trials that the killed process ended without printing are in the database.
    assert set(range(24)) - set(counted) <= {max(first) + i for i in range(1, 24)}
    with closing(SharedStudy(address(database, Path(), "claims"), {}, ["minimize"])) as shared:
        assert {trial.state.name for trial in shared.trials(24)} == {"COMPLETE"}
        assert [trial.number for trial in shared.trials(24)] == list(range(24))

    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE ROLE guest LOGIN")
    guest = database.replace("tuner", "guest")
    with pytest.raises(RunError, match=r"refuses its user .*permission denied"):
        SharedStudy(address(guest, Path(), "claims"), {}, ["minimize"])

    made = tuning_of(
        [RECIPE, *SEARCH, f"--study={tmp_path / 's'}", f"--storage={database}", "--trials=1"]
    )
    with closing(made.open()) as shared:
        TrialWorker(tuning=made, shared=shared).work()
        (trial,) = shared.trials(1)
    assert trial.state.name == "COMPLETE"
    assert not (tmp_path / "s" / "study.db").exists()
