"""Training into a bucket of a real server: killed, continued and used on other machines, which share nothing else."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from systolic.artifact.objects import Objects, in_bucket
from systolic.core.errors import RunError
from systolic.session.training import check_one_machine
from systolic.training import hosts
from tests.buckets import s3_server
from tests.training.children import RECIPE, ROOT, environment, finish, start, together
from tests.training.sessions import evaluations, losses

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


def test_several_hosts_are_told_to_mount_the_bucket(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "exchange", lambda text: [text, "other"])
    with pytest.raises(RunError, match=r"its copy would be on 2 hosts.*mount the bucket") as caught:
        check_one_machine(Path(URL))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_processes_of_one_machine_share_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with s3_server("runs") as server:
        for name, value in server.items():
            monkeypatch.setenv(name, value)
        words = ["systolic", "train", RECIPE, "--run", URL, "--continue", "--json"]
        told = together([*words, "--steps", "8"], environment(tmp_path / "a"), 2)
        assert json.loads(told[0])["steps"] == 8
        # Both have written arrays of the checkpoint, and another machine goes on from all of them.
        finish(start([*words[2:], "--steps", "12"], environment(tmp_path / "b", 2)))
        copy = tmp_path / "b" / "systolic" / "buckets" / "s3" / "runs" / "tiny"
        lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
        starts = [one["resumed_from"] for one in lines if one["kind"] == "start"]
        assert starts == [None, 8]
        assert sorted(losses(copy)) == list(range(1, 13))
