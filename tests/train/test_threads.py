"""What runs beside the main thread of a training."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.train.children import RECIPE, ROOT

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
