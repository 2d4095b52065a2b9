"""The option that views get which print an answer as text or as JSON."""

import inspect
import json
from dataclasses import asdict, dataclass

import pytest

from systolic.report.output import or_json


@dataclass
class Tea:
    cups: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@or_json
def show(tea: Tea, *, loud: bool = False) -> None:
    """Prints a tea."""
    print(f"{tea.cups} cups{'!' if loud else ''}")


def test_a_view_prints_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(Tea(2), loud=True) == 0
    assert show(Tea(2), json=True) == 0
    text, line = capsys.readouterr().out.splitlines()
    assert (text, json.loads(line)) == ("2 cups!", {"cups": 2})


def test_a_view_has_the_option_and_its_sentence() -> None:
    assert list(inspect.signature(show).parameters) == ["tea", "loud", "json"]
    assert inspect.getdoc(show) == "Prints a tea.\n\nArgs:\n    json: Print one JSON object."
