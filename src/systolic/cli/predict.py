"""``systolic predict RUN|BUNDLE|DIR FILES...``: the model's answer for each file or text."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from systolic.cli.parse import parse
from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import check_writable, nearest_file, write_atomically
from systolic.report.figures import plural
from systolic.report.output import print_json, warn

if TYPE_CHECKING:
    from systolic.inference.model import TrainedModel

NPZ = ".npz"
OUT_ROWS = ".jsonl", ".csv", ".tsv"
SHOWN = 4
"""Numbers of a vector that are printed."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Labels files with a trained model; a language model scores texts in bits per byte, a model of embeddings turns them into vectors, Whisper writes down sound files.

    A file that can't be read is named, the others are answered, and the exit code is 1.

    Args:
        run: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file.
        files: Images or arrays for an image model, files of text for a language model, recordings for Whisper; for a model of embeddings texts, or their files; for an exported program .npz files with an array for each input; for a recipe whose data are arrays tables of new rows: CSV, TSV, JSONL or .npz.
        out: Of an exported program: write its outputs for one file as arrays into this .npz file. Of tables: write the answers of all rows into this .jsonl or .csv file.
        checkpoint: Of a run: best, last or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional]
    files: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    out: Path | None = None
    checkpoint: str = "best"
    trust: bool = False
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(PredictOptions, args, "systolic predict")
    files = options.files
    if not files:
        raise OptionError(
            f"systolic predict {options.run} needs files, or texts for a model of embeddings; name one or more after it"
        )
    if options.out is not None:
        _check_out(files, options.out)
    from systolic.formats.registry import in_files
    from systolic.inference.model import open_model

    if not in_files(options.run):
        _check(files)
    model = open_model(options.run, options.checkpoint, trust=options.trust, warn=warn)
    if not model.takes_texts:
        _check(files)
    if options.out is not None and options.out.suffix != NPZ:
        return _write_rows(model, options)
    if options.out is not None:
        return _write(model, options.run, files[0], options.out, options.json)
    found: list[dict[str, Any]] = []
    for file, answer in model.predictions(files):
        found.append({"file": str(file), **answer})
        if "error" in answer:
            warn(answer["error"])
        elif "rows" in answer and not options.json:
            for number, row in enumerate(answer["rows"], 1):
                print(f"{file} row {number}  {_told(row)}")
        elif not options.json:
            print(f"{file}  {_told(answer)}")
    if options.json:
        print_json({"run": str(options.run), "step": model.step, "predictions": found})
    failed = sum("error" in answer for answer in found)
    if failed:
        warn(
            f"no answer for {failed} of {len(found)} {'inputs' if model.takes_texts else 'files'}; see the lines above"
        )
    return 1 if failed else 0


def _check_out(files: Sequence[str], out: Path) -> None:
    if len(files) != 1 and out.suffix == NPZ:
        raise OptionError(
            f"--out is one file, and {len(files)} files were given; predict them one by one"
        )
    if out.suffix not in (NPZ, *OUT_ROWS):
        raise OptionError(
            f"--out is {out}; name a file that ends in .npz for the arrays of an exported program, or in {' or '.join(OUT_ROWS)} for the answers to rows"
        )
    check_writable(out)


def _write_rows(model: "TrainedModel", options: PredictOptions) -> int:
    """Writes the answers for all rows of tables."""
    from systolic.data.tables import write_rows

    assert options.out is not None
    if not model.takes_rows:
        raise OptionError(
            f"--out {options.out} takes the answers for rows of tables, and {options.run} answers for files; leave it out, or take --json"
        )
    several, failed = len(options.files) > 1, 0
    rows: list[dict[str, Any]] = []
    for file, answer in model.predictions(options.files):
        if "error" in answer:
            warn(answer["error"])
            failed += 1
        named = {"file": str(file)} if several else {}
        found = answer.get("rows", ())
        rows += [{**named, "row": number, **row} for number, row in enumerate(found, 1)]
    if not rows:
        raise DataError(f"no row was answered, and {options.out} is not written")
    write_atomically(options.out, write_rows(options.out, rows))
    record = {"run": str(options.run), "step": model.step, "out": str(options.out)}
    if options.json:
        print_json({**record, "rows": len(rows)})
    else:
        print(f"{options.out}: answers for {plural(len(rows), 'row')}")
    return 1 if failed else 0


def _told(answer: Mapping[str, Any]) -> str:
    """The values of an answer by name; one of several numbers that another name has already is not printed twice."""
    told, seen = [], dict[str, str]()
    for name, value in answer.items():
        text = _text(value)
        several = isinstance(value, list | dict) and len(value) > 1
        same = seen.setdefault(json.dumps(value), name) if several else name
        told.append(f"{name} {text}" if same == name else f"{name} as {same}")
    return "  ".join(told)


def _write(model: "TrainedModel", run: Path, file: str, out: Path, as_json: bool) -> int:
    """Writes the outputs for a file as arrays."""
    import numpy as np

    made, packed = model.outputs(file), io.BytesIO()
    np.savez(packed, **made)
    write_atomically(out, packed.getvalue())
    if as_json:
        shapes = {name: list(one.shape) for name, one in made.items()}
        print_json({"run": str(run), "step": model.step, "out": str(out), "outputs": shapes})
        return 0
    told = ", ".join(f"{name} {one.dtype}{list(one.shape)}" for name, one in made.items())
    print(f"{out}: {told}")
    return 0


def _check(files: Sequence[str]) -> None:
    if not any(Path(file).is_file() for file in files):
        raise NotFoundError(
            f"{files[0]} is not a file{nearest_file(Path(files[0]))}; check the path"
        )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list) and len(value) > SHOWN and isinstance(value[0], float):
        return (
            f"{' '.join(map(_text, value[:SHOWN]))} ... ({len(value)} numbers, --json prints all)"
        )
    return str(value)
