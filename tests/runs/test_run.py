"""Run directories: made once, owned by one process, readable while and after."""

import datetime
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from systolic.core.errors import NotFoundError, RunError
from systolic.runs import Access, Run

JOB = {"recipe": "bytes", "job": {"name": "bytes", "steps": 5}}
NOON = datetime.datetime(2031, 2, 3, 12, 0, 5, tzinfo=datetime.UTC)


def train(step: int, loss: float = 1.0) -> dict:
    return {"kind": "train", "step": step, "loss": loss}


def test_the_default_directory_is_the_jobs_name_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with Run.create(None, JOB, now=NOON) as one, Run.create(None, JOB, now=NOON) as two:
        assert str(one.path) == "runs/bytes-20310203T120005Z"
        assert str(two.path) == "runs/bytes-20310203T120005Z-2"
        assert one.read_job() == JOB | {"directory": str(one.path.absolute())}
    with Run.create(None, {"job": {"name": "../a b"}}, now=NOON) as odd:
        assert odd.path.parent == Path("runs")
        assert odd.name == "a-b-20310203T120005Z"


def test_create_never_reuses_a_directory(tmp_path: Path):
    with Run.create(tmp_path / "a", JOB):
        pass
    with pytest.raises(
        RunError, match=r"already holds a run; continue it with systolic train --resume .*a or"
    ):
        Run.create(tmp_path / "a", JOB)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty and not a run; choose another folder"):
        Run.create(tmp_path / "b", JOB)
    with pytest.raises(RunError, match="not empty and not a run"):
        Run.create(tmp_path / "b" / "thesis.txt", JOB)
    with pytest.raises(RunError, match="could not be made"):
        Run.create(tmp_path / "b" / "thesis.txt" / "run", JOB)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    with Run.create(tmp_path / "empty", JOB) as run:
        assert run.read_job() == JOB | {"directory": str(run.path.absolute())}


def test_open_names_the_run_that_was_meant(tmp_path: Path):
    with Run.create(tmp_path / "bytes-one", JOB) as run:
        (run.path / "checkpoints").mkdir()
    for given, told in {
        "bytes-onw": f"does not exist; did you mean {tmp_path}/bytes-one?",
        "bytes-one/checkpoints": f"a part of one; did you mean {tmp_path}/bytes-one?",
        ".": f"holds 1; did you mean {tmp_path}/bytes-one?",
    }.items():
        with pytest.raises(NotFoundError) as caught:
            Run.open(tmp_path / given)
        assert str(caught.value).endswith(told)
        assert "\n" not in str(caught.value)


def test_records_come_back_as_they_went_in(tmp_path: Path):
    with Run.create(tmp_path / "run", JOB) as run:
        run.append(train(1, float("nan")))
        run.append({"kind": "eval", "step": 1, "metrics": {"a": [np.float32(0.5), -np.inf]}})
        run.append({"kind": "sample", "step": 1, "prompt": "NaN", "text": "Infinity\n☃"})
        reader = Run.open(run.path)
        one, two, three = reader.records()
        assert np.isnan(one["loss"])
        assert two["metrics"] == {"a": [0.5, -np.inf]}
        assert (three["prompt"], three["text"]) == ("NaN", "Infinity\n☃")
        assert [record["kind"] for record in reader.records("eval")] == ["eval"]
        lines = (run.path / "metrics.jsonl").read_text().splitlines()
        plain = [json.loads(line, parse_constant=pytest.fail) for line in lines]
        assert plain[0]["loss"] == "NaN"
        with pytest.raises(TypeError, match="set"):
            run.append({"kind": "train", "step": {1}})
        assert len(list(run.records())) == 3
        with pytest.raises(RunError, match="open for reading"):
            reader.append(train(2))


@pytest.mark.parametrize("torn", [b'{"kind": "train", "st', b'{"kind": "train", "step": 3}'])
def test_a_line_that_a_kill_cut_short(tmp_path: Path, torn: bytes):
    with Run.create(tmp_path / "run", JOB) as run:
        run.append(train(1))
        run.append(train(2))
    log = run.path / "metrics.jsonl"
    log.write_bytes(log.read_bytes() + torn)
    whole = torn.endswith(b"}")
    assert [r["step"] for r in Run.open(run.path).records()] == [1, 2] + [3] * whole
    with Run.open(run.path, access=Access.write) as again:
        again.append(train(4))
        assert [r["step"] for r in again.records()] == [1, 2] + [3] * whole + [4]


def test_a_damaged_line_is_named(tmp_path: Path):
    with Run.create(tmp_path / "run", JOB) as run:
        run.append(train(1))
        run.append(train(2))
        log = run.path / "metrics.jsonl"
        log.write_bytes(log.read_bytes().replace(b'{"kind"', b"\0\0\0", 1))
        with pytest.raises(RunError, match=r"line 1 of .*metrics.jsonl is damaged"):
            list(run.records())


def test_truncate_forgets_what_will_be_done_again(tmp_path: Path):
    with Run.create(tmp_path / "run", JOB) as run:
        run.append({"kind": "start", "step": 0})
        for step in (1, 2, 3):
            run.append(train(step))
            run.append_sample({"step": step, "prompt": "", "text": "x"})
        run.append({"kind": "event", "name": "checkpoint", "step": 3})
        run.append({"kind": "event", "name": "bad_step", "step": 3})
        run.append({"kind": "event", "name": "interrupt", "step": 3})
        run.append({"kind": "event", "name": "lost", "step": 3})
        run.append({"kind": "start", "step": 3})
        run.append({"kind": "end", "step": 2})
        assert run.truncate(2) == 3
        kept = [(r["kind"], r.get("name"), r["step"]) for r in run.records()]
        assert kept == [
            ("start", None, 0),
            ("train", None, 1),
            ("train", None, 2),
            ("event", "bad_step", 3),
            ("event", "interrupt", 3),
            ("event", "lost", 3),
            ("start", None, 3),
        ]
        assert [sample["step"] for sample in run.samples()] == [1, 2]
        run.append(train(3, 0.5))
        assert list(run.records())[-1]["loss"] == 0.5


def test_truncate_forgets_what_comes_again_at_the_step_itself(tmp_path: Path):
    def again(record: Mapping[str, Any]) -> bool:
        return record["step"] == 2 and record["kind"] in ("eval", "sample")

    with Run.create(tmp_path / "run", JOB) as run:
        for step in (1, 2):
            run.append(train(step))
            run.append({"kind": "eval", "step": step})
            run.append_sample({"step": step, "prompt": "", "text": "x"})
        assert run.truncate(2, again) == 1
        assert [(r["kind"], r["step"]) for r in run.records()] == [
            ("train", 1),
            ("eval", 1),
            ("train", 2),
        ]
        assert [sample["step"] for sample in run.samples()] == [1]


def test_one_process_owns_a_run(tmp_path: Path):
    script = f"""
import sys
from systolic.runs import Access, Run
from systolic.core.errors import RunError
try:
    Run.open({str(tmp_path / "run")!r}, access=Access.write).close()
    print("opened")
except RunError as error:
    print(error)
"""

    def other() -> str:
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()

    run = Run.create(tmp_path / "run", JOB)
    told = f"is in use by process {os.getpid()}; wait for it, stop it, or choose another folder"
    assert other().endswith(told)
    with pytest.raises(RunError, match="in use by this process"):
        Run.open(tmp_path / "run", access=Access.write)
    assert Run.open(tmp_path / "run").read_job()["recipe"] == JOB["recipe"]
    assert other().endswith(told), "reading must not release the lock"
    run.close()
    assert not (tmp_path / "run" / ".lock").exists()
    assert other() == "opened"
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_killed_owner_leaves_the_run_free(tmp_path: Path):
    script = f"""
import os, signal, sys
from systolic.runs import Run
run = Run.create({str(tmp_path / "run")!r}, {JOB!r})
run.append({{"kind": "train", "step": 1}})
if os.fork() == 0:
    os.closerange(0, 3)
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    assert process.wait() == -signal.SIGKILL
    try:
        with Run.open(tmp_path / "run", access=Access.write) as run:
            assert [r["step"] for r in run.records()] == [1]
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # The worker that outlived its trainer.


def test_a_full_disk_keeps_the_records_before(tmp_path: Path):
    script = f"""
import resource, signal
from systolic.runs import Run
from systolic.core.errors import RunError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = Run.create({str(tmp_path / "run")!r}, {JOB!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))
step = 0
try:
    while True:
        run.append({{"kind": "train", "step": step + 1, "text": "x" * 37}})
        step += 1
except RunError as error:
    print(step, error)
try:
    run.write_summary({{"run": "x" * 2000}})
except RunError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    metrics, summary = result.stdout.splitlines()
    step, told = metrics.split(" ", 1)
    assert told.endswith(
        f"could not be written (File too large); what it held is intact; free space and continue with --resume {tmp_path / 'run'}"
    )
    assert "summary.json could not be written (File too large)" in summary
    log = tmp_path / "run" / "metrics.jsonl"
    assert log.read_bytes().endswith(b"\n")
    assert [r["step"] for r in Run.open(tmp_path / "run").records()] == [*range(1, int(step) + 1)]
    assert not (tmp_path / "run" / "summary.json").exists()


def test_environment_says_where_it_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--one")
    monkeypatch.setenv("JAX_DEBUG_NANS", "0")
    monkeypatch.setenv("MY_API_TOKEN", "secret")
    with Run.create(tmp_path / "run", JOB) as run:
        run.write_environment(["TPU v5 lite"] * 2)
        text = (run.path / "environment.json").read_text()
        seen = json.loads(text)
        assert seen["devices"] == ["TPU v5 lite"] * 2
        assert seen["packages"]["jax"]
        assert seen["packages"]["orbax-checkpoint"]
        assert seen["variables"]["XLA_FLAGS"] == "--one"
        assert seen["variables"]["JAX_DEBUG_NANS"] == "0"
        assert seen["cores"] >= 1
        assert seen["memory_bytes"] > 1e6
        assert seen["argv"] == sys.argv
        assert "secret" not in text
        run.write_environment(["TPU v5 lite"] * 2)
        assert [path.name for path in run.path.glob("environment*")] == ["environment.json"]
        run.write_environment(["TPU v6 lite"])
        kept = json.loads((run.path / "environment-1.json").read_text())
        assert kept["devices"] == ["TPU v5 lite"] * 2


def test_environment_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from systolic.runs.run import git

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git() is None
    (tmp_path / "file").write_text("one")
    for arguments in (
        ["init", "-q"],
        ["add", "file"],
        ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *arguments], check=True)
    seen = git()
    assert seen is not None
    assert len(seen["commit"]) == 40
    assert seen["changed"] is False
    (tmp_path / "file").write_text("two")
    assert git() == {"commit": seen["commit"], "changed": True}


def test_what_else_a_run_keeps(tmp_path: Path):
    with Run.create(tmp_path / "run", JOB) as run:
        with pytest.raises(NotFoundError, match="has not ended; continue it with --resume"):
            run.read_summary()
        run.write_summary({"final": {"loss": np.float32("inf")}, "mfu": None})
        assert run.read_summary() == {"final": {"loss": np.inf}, "mfu": None}
        batch = {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3), "mask": np.ones(2, "f4")}
        path = run.write_bad(7, batch)
        assert path == run.path / "bad" / "step-7.npz"
        with np.load(path) as kept:
            assert set(kept) == set(batch)
            for name, array in batch.items():
                assert kept[name].dtype == array.dtype
                np.testing.assert_array_equal(kept[name], array)
        (run.path / "summary.json").write_text("{")
        with pytest.raises(RunError, match=r"summary.json is damaged"):
            run.read_summary()


def test_a_folder_without_a_file_that_says_what_it_is_says_which_file_lacks(tmp_path: Path) -> None:
    for name, said in (
        ("notes.txt", "is neither a run (no job.json) nor a Hugging Face folder (no config.json)"),
        ("model.safetensors", "it has model.safetensors and no config.json; copy that file"),
    ):
        folder = tmp_path / name.partition(".")[2]
        folder.mkdir()
        (folder / name).write_text("")
        with pytest.raises(NotFoundError) as refused:
            Run.open(folder)
        assert said in str(refused.value)
