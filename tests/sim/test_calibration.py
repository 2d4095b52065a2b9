"""The simulator's tables: each constant says what it means, where it comes from, and how."""

import tomllib

import pytest

from systolic.sim.attention import AttentionPace
from systolic.sim.calibration import constant, fitted
from tests.house.budget import ROOT

PACKAGE = ROOT / "src" / "systolic"
TABLES = {
    folder: tomllib.loads((PACKAGE / folder / "constants.toml").read_text())
    for folder in ("sim", "planning")
}
NAMED = [
    (f, table, name) for f, tables in TABLES.items() for table in tables for name in tables[table]
]


@pytest.mark.parametrize(("folder", "table", "name"), NAMED)
def test_a_constant_says_what_it_is(folder: str, table: str, name: str) -> None:
    entry = TABLES[folder][table][name]
    assert set(entry) == {"value", "origin", "what", "source"}
    assert entry["origin"] in ("fitted", "measured", "assumed")
    assert entry["what"]
    assert entry["source"]
    assert f'constant("{table}.{name}"' in (PACKAGE / folder / f"{table}.py").read_text()


def test_values() -> None:
    assert constant("network.switched_link_efficiency") == 370 / 450
    assert constant("roofline.attention") == ((64, 0.41), (128, 0.61))


def test_a_generation_takes_the_rest_from_all() -> None:
    v5e, other = (fitted("attention", AttentionPace, name) for name in ("v5e", "v99"))
    assert (v5e.forward, other.forward) == (0.1, 0.3)
    assert v5e.step_seconds == other.step_seconds == 3e-7
