"""The bill after a launch, by hand: hours of machines times their price."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from systolic.launching.record import LOCAL, Launched
from systolic.launching.state import cost

BEFORE: dict[str, Any] = {
    "slice": "v5e-8",
    "bill": {"usd_per_hour": 5.0},
    "stopped": None,
    "submitted": "1970-01-01T00:00:00+00:00",
    "until": "1970-01-01T01:00:00+00:00",
}
"""An hour with another slice, before the launch was submitted again."""


def made(folder: Path, **fields: Any) -> Launched:
    """A launch that was submitted an hour after the epoch."""
    given: dict[str, Any] = {
        "name": "x",
        "via": "gke",
        "slice": "v5e-16",
        "run": "gs://b/x",
        "folder": str(folder),
        "made_by": [],
        "submitted": "1970-01-01T01:00:00+00:00",
        "bill": {"usd_per_hour": 10.0},
        "commands": {"detached": False},
    }
    return msgspec.convert({**given, **fields}, Launched)


def used(launch: Launched, now: float) -> Any:
    found = cost(launch, now)
    assert found is not None
    return found


def test_from_submit_until_now_or_the_stop(tmp_path: Path) -> None:
    now = used(made(tmp_path), 3 * 3600.0)
    assert (now.hours, now.usd) == (2.0, 20.0)
    assert "2.00 h since submission, if still running at $10.00; an estimate" in now.text()
    assert now.at_most
    ended = used(made(tmp_path, stopped="1970-01-01T02:30:00+00:00"), 9 * 3600.0)
    assert (ended.hours, ended.since, ended.at_most) == (1.5, "from submit to stop", False)
    server = {"usd_per_hour": 9.6, "usd_per_hour_most": 38.4}
    of_pods = used(made(tmp_path, bill=server, stopped="1970-01-01T02:00:00+00:00"), 9e9)
    assert of_pods.text().startswith("$9.60 to $38.40 used: 1.00 h from submit to stop at $9.60 to")
    assert cost(made(tmp_path, via=LOCAL), 9e9) is None
    assert cost(made(tmp_path, bill={"usd_per_hour": None}), 9e9) is None


def test_the_hours_that_machines_of_a_script_exist(tmp_path: Path) -> None:
    tpus = made(tmp_path, via="tpu-vm", commands={"detached": True})
    # Neither an earlier launch nor the time between a preemption and the next machines counts.
    (tmp_path / "times.log").write_text("up 10\ndown 20\nup 3600\ndown 7200\ndown 7300\nup 10800\n")
    lost = used(tpus, 12600.0)
    # The script is gone, so nobody knows whether the machines of the last half hour are.
    assert (lost.hours, lost.at_most) == (1.5, True)
    assert "1.50 h of machine time, if the machines still exist, at $10.00" in lost.text()
    (tmp_path / "ended").write_text("0\n")
    kept = used(tpus, 12600.0)
    assert (kept.hours, kept.at_most) == (1.5, False)
    (tmp_path / "ended").unlink()
    # With one of two slices dropped, half the price.
    (tmp_path / "times.log").write_text("up 3600 2\ndown 7200\nup 7200 1\n")
    assert used(replace(tpus, slice="2xv5e-16"), 14400.0).usd == 20.0


def test_earlier_submissions_keep_their_price(tmp_path: Path) -> None:
    again = used(made(tmp_path, earlier=[BEFORE]), 3 * 3600.0)
    assert again.usd == 1.0 * 5.0 + 2.0 * 10.0
    plain = again.to_json()
    assert (plain["used_hours"], plain["used_usd"], plain["used_submissions"]) == (3.0, 25.0, 2)
    assert "at $10.00, and 1.00 h in 1 earlier submission; an estimate" in again.text()
    # The script's log has all submissions: 10 s of the first, an hour of the second.
    (tmp_path / "times.log").write_text("up 10\ndown 20\nup 3600\ndown 7200\n")
    tpus = made(tmp_path, via="tpu-vm", commands={"detached": True}, earlier=[BEFORE])
    both = used(tpus, 12600.0)
    assert both.usd == pytest.approx(10 / 3600 * 5.0 + 10.0)
    # With a last "down" all machines are known to be gone.
    assert not both.to_json()["used_at_most"]
