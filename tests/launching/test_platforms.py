"""Every slice of the catalogue on every platform: the files agree with ``systolic.slice``, or the refusal is one line."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from systolic.core.errors import OptionError
from systolic.launching import PLATFORMS, Launch, Prepared, Site, prepare
from systolic.launching.local import MOST_PROCESSES
from systolic.launching.names import fitting
from tests.launching.made import launch, slices

SLICES = list(slices())
SHARED: Mapping[str, dict[str, Any]] = {
    via: {"run": "/home/me/runs/lm"} for via in ("local", "slurm", "docker")
}
"""Platforms that train into a folder."""
LEAST = {"local": 60, "tpu-vm": 200, "gke": 200, "skypilot": 100, "slurm": 10, "docker": 15}
"""Minimum number of slices that each platform accepts."""


def written(via: str, described: Launch) -> Prepared | str:
    """Files of the launch, or the message of the refusal."""
    try:
        return prepare(via, described)
    except OptionError as error:
        return str(error)


@pytest.mark.parametrize("via", PLATFORMS)
def test_every_slice_is_written_or_refused_in_one_line(via: str) -> None:
    taken = 0
    for on in SLICES:
        described = launch(on.name, name=fitting(f"lm-{on.name}"), **SHARED.get(via, {}))
        prepared = written(via, described)
        if isinstance(prepared, str):
            assert on.name in prepared.partition("\n")[0], (via, on.name, prepared)
            assert "\n" not in prepared
            continue
        taken += 1
        nodes = on.num_hosts
        if via == "gke" and on.platform == "tpu":
            nodes = max(on.num_hosts, on.num_chips // 4)
        assert prepared.hosts == nodes, (via, on.name)
        assert all(
            "systolic launch lm" in text or name.endswith(".json")
            for name, text in prepared.files.items()
        )
        if via == "local":
            settings = json.loads(prepared.files["local.json"])
            assert settings["processes"] * settings["devices"] == on.num_devices
            assert settings["processes"] <= MOST_PROCESSES
            assert settings["made_by"] == list(described.made_by)
    assert taken >= LEAST[via], taken


def test_options_that_change_nothing_are_said() -> None:
    def notes(via: str, **fields: Any) -> str:
        described = launch("v5e-8", site=Site(**fields), **SHARED.get(via, {}))
        return "\n".join(prepare(via, described).notes)

    given = {"project": "my-project", "network": "mine", "service_account": "me@x"}
    assert "--project, --service-account, --network is not used by skypilot" in notes(
        "skypilot", **given
    )
    assert "is not used by" not in notes("tpu-vm", zone="us-west4-a", project="my-project")
    assert "--zone is not used by local" in notes("local", zone="us-west4-a")


@pytest.mark.parametrize("via", ["tpu-vm", "gke", "skypilot"])
def test_a_zone_is_checked_alike_on_all_platforms_of_google(via: str) -> None:
    def notes(zone: str, **fields: Any) -> str:
        described = launch(site=Site(zone=zone), **{**SHARED.get(via, {}), **fields})
        return "\n".join(prepare(via, described).notes)

    told = "us-east5-b may have no v5e; Google lists it in us-west4-a"
    assert told in notes("us-east5-b")
    for zone in ("us-west4-a", "europe-west4-a"):
        assert "may have no" not in notes(zone)
    for zone, why in (
        ("uscentral1", "zone is 'uscentral1'; it takes a zone such as us-east5-b"),
        ("us-west4", "zone is us-west4, which is a region"),
    ):
        with pytest.raises(OptionError, match=why):
            notes(zone)
