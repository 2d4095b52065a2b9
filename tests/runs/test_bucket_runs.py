"""Training into a bucket of a real server: killed, continued and used on machines that share only the bucket."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from systolic.runs.remote.store import Objects, in_bucket
from tests.buckets import s3_server
from tests.training.children import (
    PATIENCE_SECONDS,
    RECIPE,
    ROOT,
    environment,
    finish,
    finish_together,
    start,
    start_together,
    together,
)
from tests.training.sessions import evaluations, losses, records

URL = "s3://runs/tiny"
OPTIONS = [RECIPE, "--steps", "2400", "--checkpoints.every", "100", "--evaluation.every", "1200"]


def said(verb: str, environ: dict[str, str], *args: str) -> str:
    command = [sys.executable, "-m", "systolic", verb, URL, "--json", *args]
    done = subprocess.run(command, cwd=ROOT, env=environ, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_in_a_bucket_is_killed_and_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with s3_server("runs") as server:
        for name, value in server.items():
            monkeypatch.setenv(name, value)
        whole = tmp_path / "whole"
        finish(start([*OPTIONS, "--run", str(whole), "--json"], environment(tmp_path / "a")))

        folder = in_bucket(URL)
        assert folder is not None
        process = start([*OPTIONS, "--run", URL, "--json"], environment(tmp_path / "a"))
        objects = Objects(folder)
        while not any(name.endswith("/manifest.json") for name in objects.names("checkpoints/")):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()

        again = [*OPTIONS, "--run", URL, "--continue", "--json"]
        finish(start(again, environment(tmp_path / "b")))
        copy = tmp_path / "b" / "systolic" / "buckets" / "s3" / "runs" / "tiny"
        starts = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
        [_, resumed] = [record for record in starts if record["kind"] == "start"]
        assert resumed["resumed_from"] > 0
        assert losses(copy) == losses(whole)
        assert evaluations(copy) == evaluations(whole)

        elsewhere = environment(tmp_path / "c")
        assert json.loads(said("eval", elsewhere))
        assert json.loads(said("explain", elsewhere, "--quick"))
        assert {"report.html", "summary.json", "recipe.py"} <= set(objects.names())


TWO = [
    *("systolic", "train", RECIPE, "--json"),
    *("--checkpoints.every", "300", "--evaluation.every", "600", "--log-every", "10"),
]
"""Steps are short; checkpoints are far enough apart to be uploaded."""


@pytest.mark.slow
def test_hosts_that_share_nothing_are_killed_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def hosts(*caches: str) -> list[dict[str, str]]:
        return [environment(tmp_path / cache) for cache in caches]

    def killed_after(step: int, index: int, *caches: str) -> None:
        """Kills one of the hosts once the bucket has a checkpoint of a later step."""
        command = [*TWO, "--steps", "1800", "--run", URL, "--continue"]
        processes = start_together(command, hosts(*caches))
        while not any(found > step for found in complete()):
            assert [process.poll() for process in processes] == [None] * 2
            time.sleep(0.1)
        processes[index].send_signal(signal.SIGKILL)
        told = [process.communicate(timeout=PATIENCE_SECONDS) for process in processes]
        assert processes[index].returncode == -signal.SIGKILL
        assert processes[1 - index].returncode != 0, told

    with s3_server("runs") as server:
        for name, value in server.items():
            monkeypatch.setenv(name, value)
        folder = in_bucket(URL)
        assert folder is not None
        objects = Objects(folder)

        def complete() -> list[int]:
            there = objects.names("checkpoints/")
            return sorted(int(n.split("/")[1]) for n in there if n.endswith("/manifest.json"))

        whole = tmp_path / "whole"
        finish_together(
            start_together([*TWO, "--steps", "1800", "--run", str(whole)], hosts("a", "b"))
        )
        killed_after(0, 1, "a", "b")
        first = complete()[-1]
        killed_after(first, 0, "a", "b")
        second = complete()[-1]
        # Process 0 is now on another machine, and the previous one runs process 1.
        finish_together(
            start_together([*TWO, "--steps", "1800", "--run", URL, "--continue"], hosts("c", "a"))
        )
        copy = tmp_path / "c" / "systolic" / "buckets" / "s3" / "runs" / "tiny"
        starts = [record["resumed_from"] for record in records(copy, "start")]
        assert starts[0] is None
        assert starts[1] >= first
        assert starts[2] >= second
        assert losses(copy) == losses(whole)
        assert evaluations(copy) == evaluations(whole)
        there = objects.names("checkpoints/")
        assert {name.split("/")[1] for name in there} == {str(step) for step in complete()}

        # One machine with as many devices reads the whole checkpoint.
        more = [*TWO[2:], "--steps", "1810", "--run", URL, "--continue"]
        finish(start(more, environment(tmp_path / "d", 2)))
        assert json.loads(said("eval", environment(tmp_path / "e")))
        copy = tmp_path / "d" / "systolic" / "buckets" / "s3" / "runs" / "tiny"
        assert records(copy, "start")[-1]["resumed_from"] == 1800


@pytest.mark.slow
def test_hosts_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with s3_server("runs") as server:
        for name, value in server.items():
            monkeypatch.setenv(name, value)
        words = ["systolic", "train", RECIPE, "--run", URL, "--continue", "--json"]
        caches = [environment(tmp_path / cache) for cache in ("a", "b", "a", "b")]
        finish_together(start_together([*words, "--steps", "8"], caches))
        # Fewer hosts, and fewer processes.
        fewer = [environment(tmp_path / cache, 2) for cache in ("b", "c")]
        finish_together(start_together([*words, "--steps", "12"], fewer))
        copy = tmp_path / "b" / "systolic" / "buckets" / "s3" / "runs" / "tiny"
        assert [record["resumed_from"] for record in records(copy, "start")] == [None, 8]
        assert sorted(losses(copy)) == list(range(1, 13))


@pytest.mark.slow
def test_processes_of_one_machine_share_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with s3_server("runs") as server:
        for name, value in server.items():
            monkeypatch.setenv(name, value)
        words = ["systolic", "train", RECIPE, "--run", URL, "--continue", "--json"]
        told = together([*words, "--steps", "8"], environment(tmp_path / "a"), 2)
        assert json.loads(told[0])["steps"] == 8
        # Both wrote arrays of the checkpoint; another machine resumes from all of them.
        finish(start([*words[2:], "--steps", "12"], environment(tmp_path / "b", 2)))
        copy = tmp_path / "b" / "systolic" / "buckets" / "s3" / "runs" / "tiny"
        lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
        starts = [one["resumed_from"] for one in lines if one["kind"] == "start"]
        assert starts == [None, 8]
        assert sorted(losses(copy)) == list(range(1, 13))
