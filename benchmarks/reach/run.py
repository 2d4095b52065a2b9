"""Trainers' own programs against their published step times: each row's command, captured, compiled and simulated.

``python benchmarks/reach/run.py --python maxtext=ENV/bin/python --out rows.jsonl`` runs the rows of ``rows.jsonl`` one after
the other through ``systolic forecast --on SLICE --json -- COMMAND`` and appends a line for each; run again, it goes on.
``--keep FOLDER`` keeps what was compiled, and ``--again FOLDER`` prices that anew, without the trainers.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from records import check_out, left_stale, lines, none_chosen, refuse

from systolic.capture import Captured
from systolic.capture.program import read_answer
from systolic.chips import slice
from systolic.core.files import write_atomically
from systolic.forecasting.captured import forecast_captured

HERE = Path(__file__).parent
ROWS = HERE / "rows.jsonl"
PROGRAMS = {
    "maxtext": ("-m", "maxtext.trainers.pre_train.train"),
    "maxtext-v0.1.3": ("-m", "MaxText.train", "MaxText/configs/base.yml"),
}
"""What is run of a trainer, by its name in ``rows.jsonl``."""
RUN = {
    "maxtext": ("tokenizer_path=", "log_config=False"),
    "maxtext-v0.1.3": (
        "tokenizer_path=assets/tokenizer.llama2",
        "enable_goodput_recording=False",
        "monitor_goodput=False",
    ),
}
"""Arguments of every row that the step does not depend on: tokens are synthetic."""
_COMMAND = re.compile(r"^systolic: .*? failed before its step was known: ")
SYSTOLIC = (sys.executable, "-m", "systolic", "forecast")
UNKNOWN = re.compile(r"Unknown command line flag '([\w-]+)'")
"""What libtpu prints before it ends the process."""
OF_THE_MACHINE = ("a step of ", "other jitted functions")
"""Beginnings of notes that name paths of the machine that the program ran on."""
LARGEST = 12
"""Ops that are kept."""


def key(row: Mapping[str, Any]) -> tuple[str, str]:
    """The name and the trainer of a row, or of a line of it."""
    return row["id"], row.get("trainer") or row["program"]


def name_of(row: Mapping[str, Any]) -> str:
    """Folder of a row's compiled text."""
    return row["id"] if row["program"] == "maxtext" else f"{row['id']}-{row['program']}"


def command(row: Mapping[str, Any], python: str, folder: str) -> list[str]:
    """The trainer's command line of a row."""
    program = row["program"]
    own = [f"base_output_directory={folder}", "run_name=reach", "steps=100", *RUN[program]]
    return [python, *PROGRAMS[program], *row["arguments"], *own]


def answer(
    row: Mapping[str, Any],
    python: str,
    options: Sequence[str],
    keep: Path | None = None,
    root: str | None = None,
) -> dict[str, Any]:
    """The line of a row: the answer's figures, or ``problem``.

    ``keep`` is a folder for the compiled text, ``root`` the folder that the program runs in.
    """
    flags, dropped = row["flags"].split(), []
    began = time.monotonic()
    if keep is not None:
        options = [*options, "--keep", str(keep)]
    while True:
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="reach-") as folder:
            words = command(row, python, folder)
            ran = subprocess.run(
                [*SYSTOLIC, "--on", row["on"], "--json", *options, "--", *words],
                env={**os.environ, "LIBTPU_INIT_ARGS": " ".join(flags)},
                cwd=root,
                capture_output=True,
                text=True,
                check=False,
            )
        unknown = [name for name in UNKNOWN.findall(ran.stderr) if _without(flags, name) != flags]
        if not unknown:
            break
        flags = _without(flags, unknown[0])
        dropped.append(unknown[0])
    made = {"id": row["id"], "trainer": row["program"], "on": row["on"], "dropped": dropped}
    made["seconds"] = round(time.monotonic() - began, 1)
    try:
        told = json.loads(ran.stdout)
    except ValueError:
        return made | {"problem": _reason(ran.stderr)}
    return made | _figures(told)


def priced_again(row: Mapping[str, Any], kept: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a row whose compiled text an earlier run kept, at today's prices; ``stale`` where none was kept."""
    folder = kept / name_of(row)
    if not before.get("forecast_seconds"):
        return dict(before)
    if not (folder / "answer.json").exists():
        return {**before, "stale": True}
    captured = Captured(command=row["program"], folder=folder, answer=read_answer(folder))
    made = forecast_captured(captured, slice(row["on"])).to_json()
    same = ("id", "trainer", "on", "dropped", "seconds")
    return {name: before[name] for name in same if name in before} | _figures(made)


def _without(flags: Sequence[str], name: str) -> list[str]:
    return [flag for flag in flags if flag.lstrip("-").split("=")[0] != name]


def _reason(text: str) -> str:
    """The message of ``systolic forecast``, its last line, without the command that it repeats."""
    found = [line for line in text.splitlines() if line.strip()]
    return _COMMAND.sub("", found[-1])[-600:] if found else "nothing was printed"


def _figures(told: Mapping[str, Any]) -> dict[str, Any]:
    compiler, hbm = told["compiler"], told["hbm"]
    return {
        "forecast_seconds": told["step_seconds"],
        "fits": told["fits"],
        "peak_bytes": hbm.get("peak_bytes"),
        "capacity_bytes": hbm.get("capacity_bytes"),
        "memory_origin": hbm.get("origin"),
        "calls": told["recipe"],
        "versions": {name: compiler.get(name) for name in ("jax", "libtpu")},
        "compile_seconds": compiler.get("seconds"),
        "bound": told["bound"],
        "time_by_resource": told["time_by_resource"],
        "executed_flops": told["executed_flops_by_format"],
        "rejected": (told.get("rejected") or {}).get("need_bytes"),
        "notes": [note for note in told["notes"] if not note.startswith(OF_THE_MACHINE)],
        "top_ops": [
            {name: op.get(name) for name in ("op", "seconds", "runs", "bound_by", "flops", "bytes")}
            for op in told.get("top_ops", [])[:LARGEST]
        ],
    }


def main() -> int:
    """Runs the rows that a file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "row", nargs="*", help="parts of names ($ is the end of a name); all rows by default"
    )
    parser.add_argument("--python", action="append", default=[], metavar="TRAINER=PYTHON")
    parser.add_argument(
        "--root", action="append", default=[], metavar="TRAINER=FOLDER", help="where it is run"
    )
    parser.add_argument("--out", type=Path, required=True, help="file that lines are appended to")
    parser.add_argument("--full", action="store_true", help="full compiles rather than schedules")
    parser.add_argument("--keep", type=Path, help="folder for the compiled text of each row")
    parser.add_argument("--again", type=Path, help="folder of an earlier run's --keep")
    parser.add_argument("--before", type=Path, help="with --again: the lines of that run")
    args = parser.parse_args()
    if (args.again is None) != (args.before is None):
        refuse("--again takes the lines of the run that kept the folder; add --before ROWS.jsonl")
    pythons, roots = (
        dict(one.partition("=")[::2] for one in given) for given in (args.python, args.root)
    )
    rows = [row for row in lines(ROWS, "id", "on") if _chosen(row["id"], args.row)]
    if not rows:
        refuse(none_chosen(ROWS, args.row, None))
    if args.again is not None:
        return _again(rows, args)
    rows = [row for row in rows if row["program"] in pythons] if pythons else rows
    if missing := sorted({row["program"] for row in rows} - set(pythons)):
        refuse(f"no Python for {' and '.join(missing)}; add --python {missing[0]}=ENV/bin/python")
    check_out(args.out)
    done = {key(one) for one in lines(args.out, "id")} if args.out.exists() else set()
    for row in rows:
        if key(row) in done:
            continue
        options = [] if args.full else ["--quick"]
        keep = None if args.keep is None else args.keep.resolve() / name_of(row)
        made = answer(row, pythons[row["program"]], options, keep, roots.get(row["program"]))
        with args.out.open("a") as file:
            file.write(json.dumps(made) + "\n")
        shown = made.get("forecast_seconds") or made.get("problem") or "does not fit"
        print(f"{row['id']}: {shown} ({made['seconds']} s)", flush=True)
    return 0


def _again(rows: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> int:
    before = {key(one): one for one in lines(args.before, "id", "on")}
    made = [priced_again(row, args.again, before[key(row)]) for row in rows if key(row) in before]
    write_atomically(args.out, "".join(json.dumps(one) + "\n" for one in made))
    print(left_stale(made, args.again), file=sys.stderr)
    return 0


def _chosen(name: str, parts: Sequence[str]) -> bool:
    return not parts or any(part in f"{name}$" for part in parts)


if __name__ == "__main__":
    raise SystemExit(main())
