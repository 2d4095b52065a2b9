"""Converts, quantizes and runs, in a process of its own: ``python -m systolic.formats.litert.child FOLDER``.

The converter is a C++ library with its own messages on stderr, and can end the process that it is in.
"""

import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import SystolicError
from systolic.formats.litert.convert import dynamic_range, flatbuffer, full_integer
from systolic.formats.litert.run import LiteProgram

PROGRAM, REQUEST, OUTCOME = "program.bin", "request.json", "outcome.json"
CALIBRATION, INPUTS, OUTPUTS = "calibration.npz", "inputs.npz", "outputs.npz"
MODEL, STAGE = "model.tflite", "stage.txt"


def main() -> int:
    """Does what a folder's request asks for; a mistake is told in its outcome."""
    folder = Path(sys.argv[1])
    try:
        outcome = _work(folder, json.loads((folder / REQUEST).read_bytes()))
    except SystolicError as error:
        outcome = {"error": type(error).__name__, "told": str(error)}
    except Exception as error:
        traceback.print_exc()
        told = " ".join(str(error).split())[:300]
        outcome = {
            "error": "RunError",
            "told": f"the export to LiteRT failed: {type(error).__name__}: {told}",
        }
    (folder / OUTCOME).write_text(json.dumps(outcome))
    return 0


def _work(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    # A process that dies says nothing more: its parent reads how far it came.
    stage = folder / STAGE
    stage.write_text("converting")
    content = flatbuffer((folder / PROGRAM).read_bytes(), request["inputs"], request["outputs"])
    sizes = {"float_bytes": len(content)}
    stage.write_text("quantizing")
    if request["quantization"] == "dynamic":
        content = dynamic_range(content)
    elif request["quantization"] == "int8":
        rows = _calls(folder, request["batch"])
        content = full_integer(content, rows, request["ranges"], one_scale=request["one_scale"])
    (folder / MODEL).write_bytes(content)
    stage.write_text("running the file")
    with np.load(folder / INPUTS) as inputs:
        made = LiteProgram(content, request["threads"]).rows(dict(inputs))
    outputs: dict[str, Any] = dict(made)
    np.savez(folder / OUTPUTS, **outputs)
    return sizes


def _calls(folder: Path, batch: int) -> Iterator[dict[str, np.ndarray]]:
    """Whole calls of the representative rows."""
    with np.load(folder / CALIBRATION) as found:
        rows = dict(found)
    count = min(map(len, rows.values()))
    for start in range(0, count - batch + 1, batch):
        yield {name: one[start : start + batch] for name, one in rows.items()}


if __name__ == "__main__":
    raise SystemExit(main())
