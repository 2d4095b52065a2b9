"""Launches of tests, and all slices of the catalogue."""

from collections.abc import Iterator
from typing import Any

import yaml

from systolic.chips import Slice, chips, slice
from systolic.chips.slices import named_slices
from systolic.launching import Launch, Prepared, Site

IMAGE = "us-docker.pkg.dev/project/repository/systolic:1"
HEADER = "# Made by: systolic launch lm --on v5e-16\n"


def launch(on: str = "v5e-16", **fields: Any) -> Launch:
    given = {
        "name": "lm",
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
    """All that have a name, alone and in pairs."""
    for known in chips():
        for one in named_slices(known):
            yield one
            if one.platform == "tpu":
                yield slice(f"2x{one.name}")


def documents(prepared: Prepared) -> list[dict[str, Any]]:
    """The objects of a Kubernetes file."""
    return list(yaml.safe_load_all(prepared.files["jobset.yaml"]))


def jobset(prepared: Prepared) -> dict[str, Any]:
    (found,) = [one for one in documents(prepared) if one["kind"] == "JobSet"]
    return found


def pod_of(found: dict[str, Any]) -> dict[str, Any]:
    return found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
