"""``systolic explain PROFILE``: why a measured step takes its time."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from systolic.artifact.run import JOB, Run
from systolic.cli.output import print_json
from systolic.cli.parse import arguments
from systolic.core.units import duration


def is_profile(path: Path) -> bool:
    """Whether it is an ``xplane.pb`` or a directory with one, of no run."""
    from systolic.explain.xplane import SUFFIX

    if path.is_dir():
        return not (path / JOB).is_file() and next(path.rglob(f"*{SUFFIX}"), None) is not None
    return path.name.endswith(SUFFIX) and path.is_file()


def options(json: bool = False) -> None:
    """Why a measured step takes its time.

    Args:
        json: Print one JSON object.
    """


def explain_profile(target: str, args: Sequence[str]) -> int:
    """Causes of the median step of a profile."""
    from systolic.explain.profile import open_profile
    from systolic.explain.profile_causes import causes_of_profile, figures, unjudged

    verb = arguments(options, args, "systolic explain PROFILE")
    path = Path(target)
    profile = open_profile(path)
    causes = causes_of_profile(profile, mesh_of(path))
    found, notes = figures(profile), unjudged(profile)
    if verb["json"]:
        plain = [asdict(cause) for cause in causes]
        print_json(
            {"target": target, "kind": "profile", "causes": plain, "figures": found, "notes": notes}
        )
        return 0
    from systolic.report.explain.text import print_causes

    print_causes(target, causes, remarks=[remark(found)], notes=notes)
    return 0


def mesh_of(path: Path) -> Mapping[str, int]:
    """The mesh of the run that a profile lies in; empty where it lies in none."""
    for folder in path.resolve().parents:
        if (folder / JOB).is_file():
            with Run.open(folder) as run:
                return run.read_job()["layout"]
    return {}


def remark(found: Mapping[str, Any]) -> str:
    """The figures in a line."""
    parts = ", ".join(f"{name} {share:.0%}" for name, share in found["shares"].items() if share)
    steps = f"median of {found['steps']}" if found["steps"] > 1 else "the only one"
    return f"a step on {found['device']} takes {duration(found['step_seconds'])} ({steps}): {parts}"
