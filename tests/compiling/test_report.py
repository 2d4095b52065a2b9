"""Records of a compile keep the JSON that users read, and damage is one line."""

import json
from pathlib import Path

import msgspec
import pytest

from systolic.compiling.outcome import REPORT, ChildLine, CompileReport, read_report
from systolic.compiling.traced import ProgramFacts
from systolic.core.errors import RunError
from tests.recorded import hlo

NAMES = sorted(path.stem for path in hlo.HERE.glob("*.json"))
REPORTS = [name for name in NAMES if "program" in hlo.report(name)]


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_written_as_it_was_read(name: str) -> None:
    content = {key: value for key, value in hlo.report(name).items() if key != "digest"}
    report = msgspec.convert(content, CompileReport)
    assert json.dumps(report.to_json()) == json.dumps(content)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{", "Expecting property name"),
        (b"[]", "Expected `object`"),
        (b'{"slice": "v5e-4"}', "missing required field `flags`"),
    ],
)
def test_a_damaged_report_is_one_line(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / REPORT).write_bytes(content)
    with pytest.raises(RunError) as raised:
        read_report(tmp_path)
    text = str(raised.value)
    assert text.startswith(f"{tmp_path / REPORT} is damaged (")
    assert what in text
    assert text.endswith("; run again to compile it anew")
    assert "\n" not in text


def test_facts_of_a_function_have_no_fields_of_a_job() -> None:
    facts = ProgramFacts(name="f", verb="function", units=8)
    assert list(facts.to_json()) == [
        *("name", "verb", "model_flops", "unit", "units", "precision", "layout", "notes")
    ]


def test_a_line_has_the_fields_that_it_needs() -> None:
    assert ChildLine(stage="tracing").to_json() == {"stage": "tracing"}
    line = ChildLine(stage="found", digest="ab", facts=ProgramFacts(units=3))
    assert msgspec.convert(json.loads(json.dumps(line.to_json())), ChildLine) == line
