"""A child that is forked has all that one with an interpreter of its own has."""

import json
import os
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

CHILD = [sys.executable, "-m", "tests.aot.forked_child"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _forks() -> None:
    if not NURSERY:
        pytest.skip("children are started as usual here")


def begun(kind: Any, words: list[str], env: Mapping[str, str]) -> "subprocess.Popen[str]":
    return kind(
        [*CHILD, *words],
        env=env,
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_it_has_the_surroundings_of_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEFT_OUT", "1")
    more = {"TOLD": "yes", "JAX_ENABLE_X64": "1"}
    flags = "--xla_force_host_platform_device_count=3"
    env = {name: value for name, value in os.environ.items() if name != "LEFT_OUT"} | more
    told = []
    for kind in (subprocess.Popen, Popen):
        one = begun(kind, ["3", "a b"], env | {"XLA_FLAGS": flags})
        out, errors = one.communicate("asked", timeout=120)
        told.append((json.loads(out), errors, one.returncode))
    assert told[0] == told[1]
    found, errors, code = told[0]
    assert (errors, code) == ("ended\n", 3)
    assert (found["words"], found["asked"]) == (["3", "a b"], "asked")
    assert found["variables"] == {"TOLD": "yes", "LEFT_OUT": None}
    assert (found["devices"], found["wide"], found["leads"]) == (3, True, True)


def test_it_is_a_child_of_this_process_that_a_signal_ends() -> None:
    one = begun(subprocess.Popen, ["0"], os.environ)
    assert isinstance(one, forked.Forked)
    assert psutil.Process(one.pid).ppid() == os.getpid()
    assert one.poll() is None
    one.kill()
    one.communicate(timeout=60)
    assert one.returncode == -signal.SIGKILL


def test_other_programs_have_an_interpreter_of_their_own() -> None:
    assert fits(CHILD)
    assert fits([sys.executable, str(ROOT / "tests" / "sim" / "operations_child.py")])
    assert fits([sys.executable, "-m", "systolic.aot.child", "folder", "desk"])
    for words in (["-c", "pass"], ["-m", "systolic", "chips"], ["-W", "error", "-m", "tests.x"]):
        assert not fits([sys.executable, *words])
    assert not fits("python -m tests.x")
    assert not fits(["/usr/bin/python", "-m", "tests.x"])
