"""A job of a user's file reaches the process that compiles, which can't import that file."""

import subprocess
import sys
from pathlib import Path

import cloudpickle

from systolic import recipes
from systolic.compiling import JobProgram

OURS = """\
from dataclasses import replace
from systolic import recipes
from systolic.recipes.digits import digits
from beside_the_recipe import SIZE, Sorted

def job(steps: int = SIZE):
    \"\"\"Digits with a task of our own.\"\"\"
    made = digits()
    return replace(made, steps=steps, task=Sorted())
"""
BESIDE = """\
from dataclasses import dataclass
from systolic.steps.tasks import Classification

SIZE = 7

@dataclass(frozen=True)
class Sorted(Classification):
    def told(self):
        return SIZE
"""
READ = "import sys, cloudpickle; job = cloudpickle.load(sys.stdin.buffer); print(job.task.told(), job.steps)"


def test_the_file_and_what_lies_beside_it_travel(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OURS)
    (tmp_path / "beside_the_recipe.py").write_text(BESIDE)
    job = recipes.find(f"{tmp_path / 'mine.py'}:job")({})
    sent = cloudpickle.dumps(job)
    command = [sys.executable, "-c", READ]
    done = subprocess.run(command, input=sent, capture_output=True, check=True)
    assert done.stdout == b"7 7\n"
    # Its JSON does not tell its code, so that an answer of the compiler is not looked up by it.
    assert JobProgram(job=job).key() is None
    assert JobProgram(job=recipes.find("digits")({})).key() is not None
