"""``systolic verify BUNDLE``: whether a Bundle is whole, and computes here what it computed."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from systolic.cli.parse import parse
from systolic.core.units import si
from systolic.report.output import print_json
from systolic.report.progress import ProgressLine


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Compares every file of a Bundle with its digest, refuses files that it does not list, and replays its recorded inputs.

    Args:
        bundle: The Bundle's folder.
        replay: Compute the recorded inputs here and compare with the recorded outputs.
        json: Print one JSON object.
    """

    bundle: Annotated[Path, tyro.conf.Positional]
    replay: bool = True
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(VerifyOptions, args, "systolic verify")
    from systolic.inference.verification import verify_bundle

    with ProgressLine(sys.stderr, f"verify {options.bundle.name}") as progress:
        found = verify_bundle(options.bundle, replay=options.replay, say=progress.say)
    if options.json:
        print_json(found.to_json())
        return 0
    print(f"{found.path}: {found.files} files, {si(found.bytes, 'B')}, all as they were written")
    print(f"  {found.unreplayed if found.replay is None else found.replay.line()}")
    for line in _lines(found.about):
        print(f"  {line}")
    return 0


def _lines(about: dict[str, Any]) -> list[str]:
    """Origin, versions, evaluations and licence, a line each."""
    source, recipe = about["source"], about["recipe"]
    by = "" if recipe is None else f", recipe {recipe['name']}"
    lines = [f"from the {source['kind']} {source['name']}{by}"]
    if about["versions"]:
        told = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        lines.append(f"written by {told}")
    for one in about["evaluations"]:
        lines.append(f"{one['on']} at step {one['step']}: {_told(one['metrics'])}")
        if one["before"] is not None:
            lines.append(f"{one['on']} before quantization: {_told(one['before'])}")
    lines.append(f"licence {about['licence'] or 'not recorded'}")
    return lines


def _told(metrics: dict[str, float | None]) -> str:
    return "  ".join(
        f"{name} {'no number' if value is None else f'{value:.4f}'}"
        for name, value in sorted(metrics.items())
    )
