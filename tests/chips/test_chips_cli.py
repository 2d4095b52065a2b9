"""``systolic chips``: prints, fits 100 columns, and speaks JSON."""

import json
from pathlib import Path

import pytest

from systolic.chips import chip, chips, named_slices
from systolic.cli.main import main


@pytest.fixture(autouse=True)
def _no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SYSTOLIC_CATALOGUE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def _lines(capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    assert main(["chips", *args]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    return lines


def test_all_chips(capsys) -> None:
    lines = _lines(capsys)
    first_words = [line.split(" ")[0] for line in lines]
    assert [w for w in first_words if w in {c.name for c in chips()}] == [c.name for c in chips()]
    assert all("…" not in line.split("  ")[0] for line in lines)


@pytest.mark.parametrize("name", [known.name for known in chips()])
def test_one_chip_shows_each_number_with_source_and_date(capsys, name: str) -> None:
    text = "\n".join(_lines(capsys, name))
    known = chip(name)
    for field, figure in known.figures.items():
        assert field in text
        assert figure.as_of in text
        for source in figure.sources:
            assert source.key in text
    for made in named_slices(known):
        assert made.name in text


def test_one_slice(capsys) -> None:
    text = "\n".join(_lines(capsys, "v5p:4x4x8"))
    assert text.startswith("v5p-256")
    assert "$537.60/h on demand" in text
    assert "v5:4x4x8, megacore, 2x2x1 chips per host" in text


def test_json(capsys) -> None:
    assert main(["chips", "--json"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in everything["chips"]] == [c.name for c in chips()]
    assert main(["chips", "v5e", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["figures"]["hbm_bytes"]["value"] == 16 * 2**30
    assert one["figures"]["hbm_bytes"]["source"]
    assert [s["name"] for s in one["slices"]][:3] == ["v5e-1", "v5e-4", "v5e-8"]
    assert main(["chips", "v5e-16", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    wanted = {"name", "chip", "topology", "num_chips", "num_devices", "num_hosts", "num_slices"}
    assert wanted <= made.keys()
    assert (made["wrap"], made["usd_per_hour"]["on_demand"]) == ([False, False], 19.2)


def test_a_users_price_is_shown_with_its_file(capsys, monkeypatch, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[chips.v5e]\nusd_per_chip_hour.on_demand = 0.5\n")
    monkeypatch.setenv("SYSTOLIC_CATALOGUE", str(mine))
    text = "\n".join(_lines(capsys, "v5e-16"))
    assert "$8.00/h on demand" in text
    assert "your catalogue" in text
    assert main(["chips", "v5e", "--json"]) == 0
    figure = json.loads(capsys.readouterr().out)["figures"]["usd_per_chip_hour.on_demand"]
    assert str(mine) in figure["source"][0]


@pytest.mark.parametrize(
    ("name", "words"),
    [("v5e-15", "v5e-16"), ("v7", "did you mean"), ("ironwod", "did you mean ironwood?")],
)
def test_a_wrong_name(capsys, name: str, words: str) -> None:
    assert main(["chips", name]) == 2
    complaint = capsys.readouterr().err
    assert words in complaint
    assert complaint.count("\n") == 1
