"""What later versions read from the files of an earlier one, and how answers are compared."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADDED_STEPS = 4
"""Steps that a continued run trains further."""


def environment(folder: Path) -> dict[str, Path]:
    """Variables by which settings, lists of launches and caches are in a folder."""
    return {
        "XDG_CONFIG_HOME": folder / "config",
        "XDG_STATE_HOME": folder / "state",
        "XDG_CACHE_HOME": folder / "cache",
    }


def losses(run: Path) -> dict[int, float]:
    """Training losses by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A command that opens files and the part of its answer that stays."""

    command: str
    """Of ``systolic``, in the folder of the files."""
    kept: tuple[str, ...]
    """Dotted names of values of its JSON that later versions give too; all other fields stay there, with any value."""

    def read(self, out: str) -> dict[str, Any]:
        """The names of all fields, and the values that stay."""
        plain = json.loads(out)
        return {"fields": sorted(plain), "values": {name: _at(plain, name) for name in self.kept}}


def _at(plain: Any, name: str) -> Any:
    for part in name.split("."):
        plain = plain[int(part)] if isinstance(plain, list) else plain[part]
    return plain


READINGS: Mapping[str, Reading] = {
    "evaluate a run": Reading(
        command="eval lm --path held.txt --batches 2 --json", kept=("step", "metrics")
    ),
    "evaluate an interrupted run": Reading(
        command="eval interrupted --path held.txt --batches 2 --json", kept=("metrics",)
    ),
    "evaluate a run that no recipe made": Reading(
        command="eval typed --path held.txt --batches 2 --json", kept=("metrics",)
    ),
    "evaluate images": Reading(command="eval pictures --json", kept=("metrics",)),
    "evaluate a recipe's own data": Reading(command="eval tables --json", kept=("metrics",)),
    "evaluate adapters": Reading(
        command="eval lora --path chats.jsonl --batches 2 --json", kept=("step", "metrics")
    ),
    "evaluate a Bundle": Reading(
        command="eval bundle --path held.txt --batches 2 --json", kept=("metrics",)
    ),
    "evaluate a quantized Bundle": Reading(
        command="eval int8 --path held.txt --batches 2 --json", kept=("metrics",)
    ),
    "generate": Reading(
        command="generate lm 'def ' --tokens 8 --temperature 0 --json", kept=("text",)
    ),
    "generate with adapters": Reading(
        command="generate lora 'twice 3' --chat --tokens 6 --temperature 0 --json", kept=("text",)
    ),
    "score a text": Reading(
        command="predict int8 held.txt --json", kept=("predictions.0.bits_per_byte",)
    ),
    "label a picture": Reading(command="predict pictures digit.npy --json", kept=("predictions",)),
    "answer a table": Reading(command="predict tables rows.jsonl --json", kept=("predictions",)),
    "run a program": Reading(command="predict network inputs.npz --json", kept=("predictions",)),
    "compare a run and its quantized Bundle": Reading(
        command="compare lm int8 --data held.txt --batches 2 --repeats 0 --json",
        kept=("a.measured", "b.measured", "a.evaluations.0.metrics", "b.bytes"),
    ),
    "verify a Bundle": Reading(command="verify bundle --json", kept=("files", "replay.passed")),
    "verify a quantized Bundle": Reading(
        command="verify int8 --json", kept=("files", "replay.passed")
    ),
    "verify an imported Bundle": Reading(
        command="verify imported --json", kept=("files", "replay.passed")
    ),
    "verify a program": Reading(command="verify network --json", kept=("files", "replay.passed")),
    "explain a run": Reading(
        command="explain lm --json", kept=("kind", "figures.batch", "figures.training_loss")
    ),
    "list launches": Reading(
        command="runs --json", kept=("runs.0.name", "runs.0.via", "runs.0.bill")
    ),
    "a launch that is done": Reading(
        command="status launches/done --json", kept=("name", "phase", "codes", "commands")
    ),
    "a launch that was written": Reading(
        command="status launches/waiting --json", kept=("name", "submitted", "commands")
    ),
    "a launch of a cluster": Reading(
        command="status launches/cluster --json", kept=("name", "bill", "commands")
    ),
    "a program that was kept": Reading(
        command="forecast kept/program0.txt --on v6e-1 --against own.json --json",
        kept=("chips", "hbm.peak_bytes"),
    ),
    "with a calibration": Reading(
        command="forecast kept/program0.txt --on v6e-1 --calibration of-v6e --json",
        kept=("chips", "hbm.peak_bytes"),
    ),
    "a calibration": Reading(command="calibrations of-v6e --json", kept=("chip", "kinds")),
    "a calibration's file": Reading(
        command="calibrations config/systolic/calibrations/of-v6e.json --json",
        kept=("chip", "kinds"),
    ),
    "launch a plan": Reading(
        command="launch lm --plan plan.json --candidate 2 --via local --name planned --json",
        kept=("slice", "made_by", "commands.submit"),
    ),
}
"""What is read, by what it is; each command leaves the files of the samples as they are."""
