"""The page of a profile: what the time line draws, what the table sorts by."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from systolic.cli.main import main
from systolic.explaining.display.page import COLUMNS, brief
from systolic.profile import open_profile
from tests.profile.real import EXCERPTS, HOST_OFFLOAD


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "profile.html"
    assert main(["explain", str(EXCERPTS / HOST_OFFLOAD), "--html", str(path)]) == 0
    return path.read_text()


def tree(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="tree">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_lanes_hold_the_step(page: str):
    drawn = tree(page)
    names = [lane["name"] for lane in drawn["lanes"]]
    spent: dict[str, float] = {}
    for span in drawn["spans"]:
        assert span[2] >= 0
        assert span[2] + span[3] <= drawn["seconds"] * 1e9 + 1
        spent[names[span[4]]] = spent.get(names[span[4]], 0.0) + span[3] / 1e9
    step = open_profile(EXCERPTS / HOST_OFFLOAD).seconds
    assert drawn["seconds"] == pytest.approx(step)
    core = sum(spent.get(f"TPU:0 {unit}", 0.0) for unit in ("memory", "host", "idle"))
    assert core == pytest.approx(step, rel=1e-6)
    assert spent["TPU:0 host"] == pytest.approx(0.760, rel=1e-3)
    assert spent["TPU:0 memory"] == pytest.approx(0.024, rel=0.01)
    assert "TPU:0 in flight" in spent
    assert not drawn["hidden"]


def test_ops_are_sorted_by_what_their_cells_say(page: str):
    assert all(f">{name}</button>" in page for name in COLUMNS)
    rows = re.findall(r"<tr><td class=\"src\" data-by=\"[^\"]*\".*?</tr>", page)
    cells = {}
    for row in rows:
        found = re.findall(r'data-by="([^"]*)"[^>]*>([^<]*)</td>', row)
        assert len(found) == len(COLUMNS)
        by = dict(zip(COLUMNS, found, strict=True))
        cells[by["op"][1]] = by
    reduced = cells["all-reduce"]
    assert reduced["median"][1] == "122 ms"
    assert reduced["rate"][1] == "44.1 GB/s"
    assert float(reduced["rate"][0]) == pytest.approx(44.12e9, rel=1e-3)
    assert reduced["of peak"][1] == "47.3 %"
    assert reduced["bound by"][1] == "one link between chips"
    assert cells["copy-done.5"]["memory"][1] == "host"
    times = [float(cell["time"][0]) for cell in cells.values()]
    assert times == sorted(times, reverse=True)


def test_the_page_needs_no_network(page: str):
    assert not re.search(r'(?:src|href)="http', page)


def test_json_has_the_numbers_of_the_page(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "other.html"
    assert main(["explain", str(EXCERPTS / HOST_OFFLOAD), "--json", "--html", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["report"] == str(path)
    assert path.read_text() == page
    (device, _) = told["devices"]
    assert device["bound_by"] == "host transfers"
    assert [round(seconds, 3) for seconds in device["steps"]] == [0.784, 0.92]
    (cause,) = (one for one in told["causes"] if one["name"] == "host-transfers")
    assert cause["work"]["unit"] == "host link"
    assert 0.4 < cause["work"]["share"] < 0.5


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0042, "4.2 ms"), (7.56e-5, "75.6 µs"), (5e-9, "5 ns")]
)
def test_short_times(seconds: float, text: str):
    assert brief(seconds) == text
