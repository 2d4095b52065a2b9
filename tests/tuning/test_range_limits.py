"""Best values at an end of their range: the wider range, and none beyond an option's own limit."""

import json
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from systolic.cli.main import main
from systolic.tuning.processes import Processes
from systolic.tuning.results import edge
from tests.tuning.searches import tuning_of
from tests.tuning.test_seeds import ended


def wider(word: str, value: float, recipe: str = "digits") -> str | None:
    """The wider range for a best value, by the recipe's own limits."""
    made = tuning_of([recipe, f"--search={word}"])
    found = made._edges({made.searched[0].name: value})
    return found[0].search if found else None


@pytest.mark.parametrize(
    ("word", "value", "search"),
    [
        ("optimizer.learning-rate=log:1e-4..1e-2", 0.0099, "log:1e-4..1e-1"),
        ("optimizer.learning-rate=log:1e-4..1e-1", 0.099, "log:1e-4..1"),
        ("optimizer.learning-rate=log:0.0001..0.01", 0.0099, "log:0.0001..0.1"),
        ("optimizer.learning-rate=log:1e-4..1e-2", 1.02e-4, "log:1e-5..1e-2"),
        ("optimizer.learning-rate=log:1e-4..1e-2", 0.009, None),  # 2.3 % of the logarithm
        ("optimizer.learning-rate=log:1e-4..1e-2", 0.00092, None),
        ("optimizer.learning-rate=0.01..0.03", 0.03, "0.01..0.05"),
        ("optimizer.learning-rate=1e-3..2e-3", 0.001, "5e-4..2e-3"),
        ("batch=16..64", 64, "16..112"),
        ("batch=16..64:16", 64, "16..112:16"),
        ("batch=16..64:16", 48, None),
        ("batch=1..8", 1, None),  # the option's least
        ("batch=2..64", 2, "1..64"),
        ("label-smoothing=0..0.3", 0.0, None),
        ("label-smoothing=0..0.3", 0.3, "0..0.6"),
        ("optimizer.b2=0.9..0.99", 0.99, "0.9..0.99562"),
        ("batch=16,32", 32, None),
    ],
)
def test_the_range_grows_up_to_the_options_limit(
    word: str, value: float, search: str | None
) -> None:
    assert wider(word, value) == search


def test_numbers_that_are_not_typed_in_powers_stay_so() -> None:
    (one,) = tuning_of(["digits", "--search=optimizer.learning-rate=log:0.5..50"]).searched
    found = edge(one, 0.5, lambda _: True)
    assert found is not None
    assert found.search == "log:0.05..50"
    assert edge(one, 0.5, lambda _: False) is None


def test_an_end_is_told_in_the_terminal_on_the_page_and_in_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["digits", "--search=batch=16..64:16", f"--study={tmp_path}", "--trials=1"]
    ended(words, [0.9])
    made = tuning_of(words)
    with closing(made.open()) as shared:
        drawn = shared.trials(1)[0].params["batch"]
    monkeypatch.setattr(Processes, "run", Processes.result)
    # Wherever the value was drawn.
    monkeypatch.setattr("systolic.tuning.results.NEAR", 1.0)
    assert main(["tune", *words]) == 0
    (edge_,) = json.loads((tmp_path / "study.json").read_text())["edges"]
    assert edge_ == {"option": "batch", "value": drawn, "search": edge_["search"]}
    told = f"the best batch {drawn} is at the end of its range; search {edge_['search']}"
    assert told in " ".join(capsys.readouterr().out.split())
    assert told in (tmp_path / "report.html").read_text()
