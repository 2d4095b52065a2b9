"""A peer, in a process of its own: trains until it is killed and writes a record a step.

    python contender.py NAME WORK

Runs in the environment of requirements.txt; knows nothing of Systolic but the names of its weights.
"""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from sizes import Work, from_json

MODULES = {"torch": "with_torch", "compiled": "with_torch", "transformers": "with_transformers"}


class Log:
    """Lines of JSON in the form of Systolic's metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._step = 0

    def start(self, num_parameters: int, versions: dict[str, str]) -> None:
        """Before the first step."""
        self._write(kind="start", num_parameters=num_parameters, versions=versions)

    def step(self, loss: float) -> None:
        """A step whose result is known."""
        self._step += 1
        self._write(kind="train", step=self._step, loss=loss)

    def _write(self, **record: Any) -> None:
        self._file.write(json.dumps({"time": time.time(), **record}) + "\n")
        self._file.flush()


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    plain = json.loads((folder / "sizes.json").read_text())
    log = Log(folder / name / "metrics.jsonl")
    if name == "keras":
        os.environ["KERAS_BACKEND"] = "jax"
    module = import_module(MODULES.get(name, f"with_{name}"))
    module.run(name, from_json(plain), Work(folder), log)


if __name__ == "__main__":
    main()
