"""A child that is forked has all that one with an interpreter of its own has."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forked
from tests.forked import NURSERY, Popen, fits

CHILD = [sys.executable, "-m", "tests.compiling.forked_child"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _forks() -> None:
    if not NURSERY:
        pytest.skip("children are started as usual here")


def begun(
    kind: Any, words: list[str], env: Mapping[str, str], leads: bool = True
) -> "subprocess.Popen[str]":
    return kind(
        [*CHILD, *words],
        env=env,
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=leads,
    )


def test_it_has_the_surroundings_of_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEFT_OUT", "1")
    more = {"TOLD": "yes", "JAX_ENABLE_X64": "1"}
    flags = "--xla_force_host_platform_device_count=3"
    env = {name: value for name, value in os.environ.items() if name != "LEFT_OUT"} | more
    (found, errors, code), other = both(["3", "a b"], env | {"XLA_FLAGS": flags})
    assert (found.pop("group") == other[0].pop("group")) is False  # each leads its own
    assert (found, errors, code) == other
    assert (errors, code) == ("ended\n", 3)
    assert (found["words"], found["asked"]) == (["3", "a b"], "asked")
    assert found["variables"] == {"TOLD": "yes", "LEFT_OUT": None}
    assert (found["devices"], found["wide"], found["leads"]) == (3, True, True)


def both(words: list[str], env: Mapping[str, str], leads: bool = True) -> list[Any]:
    """What a forked child and one with an interpreter tell, their errors and their exit codes."""
    told = []
    for kind in (subprocess.Popen, Popen):
        one = begun(kind, words, env, leads)
        out, errors = one.communicate("asked", timeout=120)
        told.append((json.loads(out), errors, one.returncode))
    return told


def test_it_has_the_limits_of_this_process_and_stays_in_its_group() -> None:
    most, cores = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    mask = os.umask(0o027)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most[0] - 1, most[1]))
        os.sched_setaffinity(0, [min(cores)])
        env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
        forked, other = both(["0"], env, leads=False)
    finally:
        os.umask(mask)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        os.sched_setaffinity(0, cores)
    assert (forked[0], forked[2]) == (other[0], other[2])  # libtpu logs the time
    assert (forked[0]["mask"], forked[0]["cores"]) == (0o027, [min(cores)])
    assert (forked[0]["group"], forked[0]["platforms"]) == (os.getpgid(0), None)


def test_the_process_that_forks_begins_again_after_it_was_killed() -> None:
    begun(subprocess.Popen, ["0"], os.environ).communicate("", timeout=60)
    before = NURSERY[0].process
    assert before is not None
    before.kill()
    one = begun(subprocess.Popen, ["0"], os.environ)
    one.communicate("", timeout=60)
    assert one.returncode == 0
    assert NURSERY[0].process is not before


def test_it_is_a_child_of_this_process_that_a_signal_ends() -> None:
    one = begun(subprocess.Popen, ["0"], os.environ)
    assert isinstance(one, forked.Forked)
    assert psutil.Process(one.pid).ppid() == os.getpid()
    assert one.poll() is None
    one.kill()
    one.communicate(timeout=60)
    assert one.returncode == -signal.SIGKILL


def test_other_programs_have_an_interpreter_of_their_own() -> None:
    here = os.environ
    assert fits(CHILD, here)
    assert fits([sys.executable, str(ROOT / "tests" / "sim" / "operations_child.py")], here)
    assert fits([sys.executable, "-m", "systolic.compiling.child", "folder", "desk"], here)
    for words in (["-c", "pass"], ["-m", "systolic", "chips"], ["-W", "error", "-m", "tests.x"]):
        assert not fits([sys.executable, *words], here)
    assert not fits("python -m tests.x", here)
    assert not fits(["/usr/bin/python", "-m", "tests.x"], here)
    assert not fits(CHILD, {**here, "PYTHONHASHSEED": "7"})
    assert fits(CHILD, {**here, "PYTHONPATH": "elsewhere"})
