"""What runs beside the main thread of a training."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.children import RECIPE, ROOT

WATCH = """
import json, sys, threading

class Watch:
    names = []

    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            self.names.append(name)

sys.meta_path.insert(0, Watch())
from systolic.cli.main import main

code = main(sys.argv[1:])
print(json.dumps({"code": code, "imported": [n for n in Watch.names if n in sys.modules]}))
"""


def test_only_the_main_thread_imports(tmp_path: Path):
    """Two threads that import the same modules can see them half made."""
    command = ["train", RECIPE, "--steps", "2", "--run", str(tmp_path / "run"), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", WATCH, *command],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)},
        text=True,
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {"code": 0, "imported": []}


FOR_EVER = """
import os, signal, sys, time
import jax

name = sys.argv.pop(1)
whole = jax.stages.Lowered.compile

def compile(self, *args, **options):
    if "module @jit_init" in self.as_text()[:2000]:
        os.kill(os.getpid(), signal.Signals[name])
        time.sleep(600)
    return whole(self, *args, **options)

jax.stages.Lowered.compile = compile
from systolic.cli.main import script

sys.argv[0] = "systolic"
script()
"""


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_signal_while_the_first_state_compiles_is_obeyed(tmp_path: Path, name: str):
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", FOR_EVER, name, "train", RECIPE, "--run", str(run), "--json"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 128 + signal.Signals[name], done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"systolic: stopped by {name} at the start; continue with systolic train --resume {run}"
    )
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["interrupted"], summary["checkpoint"]) == (0, name, None)
