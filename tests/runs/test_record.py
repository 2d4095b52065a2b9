"""A run read back from its directory, whole or not."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from systolic.cli.main import main
from systolic.core.errors import NotFoundError, RunError
from systolic.runs import Run
from systolic.runs.job_record import read_record
from systolic.runs.metrics import norm_of
from systolic.runs.record import State, load_run
from tests.training.display.fabricate_run import START, records, summary, write_run


@pytest.fixture(scope="module")
def whole() -> list[dict]:
    return records(600)


def test_a_finished_run(tmp_path: Path, whole: list[dict]) -> None:
    run = load_run(write_run(tmp_path, whole, summary(tmp_path, 600)))
    assert (run.name, run.state, run.step, run.steps) == ("bytes", State.finished, 600, 600)
    assert [r.step for r in run.train] == list(range(1, 601))
    assert run.num_sessions == 2
    assert run.damage == []


def test_time_goes_on_where_a_session_stopped(tmp_path: Path, whole: list[dict]) -> None:
    run = load_run(write_run(tmp_path, whole, summary(tmp_path, 600)))
    elapsed = [r.elapsed for r in run.train]
    assert elapsed == sorted(elapsed)
    assert run.seconds < 300, "the night between the sessions is not training"


def test_nan_and_infinity_come_back_as_numbers(tmp_path: Path, whole: list[dict]) -> None:
    lines = [
        *whole,
        whole[-4] | {"kind": "train", "step": 600, "loss": math.inf, "grad_norm": math.nan},
    ]
    last = load_run(write_run(tmp_path, lines)).train[-1]
    assert last.loss == math.inf
    assert math.isnan(norm_of(last))


def test_a_torn_line_is_counted_and_the_rest_is_read(tmp_path: Path, whole: list[dict]) -> None:
    write_run(tmp_path, whole)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    run = load_run(tmp_path)
    lines = path.read_bytes().count(b"\n") + 1
    assert run.damage == [f"line {lines} of metrics.jsonl is damaged and left out"]
    assert len(run.train) == 600


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a run"):
        load_run(tmp_path / "nothing")


def test_a_damaged_file_is_named(tmp_path: Path, whole: list[dict]) -> None:
    write_run(tmp_path, whole)
    (tmp_path / "summary.json").write_text('{"run": ')
    (note,) = load_run(tmp_path).damage
    assert note == f"{tmp_path}/summary.json is damaged; its records in metrics.jsonl count instead"
    (tmp_path / "job.json").write_text("[")
    with pytest.raises(RunError, match=r"job\.json is damaged"):
        load_run(tmp_path)


def test_a_damaged_line_is_named_and_the_rest_explained(
    tmp_path: Path, whole: list[dict], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, whole, summary(tmp_path, 600))
    log = tmp_path / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:6], b"\0" * 80 + b"\n", *lines[7:]]))
    assert main(["explain", str(tmp_path), "--quick", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "line 7 of metrics.jsonl is damaged and left out" in shown["notes"]
    assert shown["figures"]["training_loss"] > 0


def test_the_last_session_alone(tmp_path: Path, whole: list[dict]) -> None:
    write_run(tmp_path, whole, summary(tmp_path, 600))
    run, session = load_run(tmp_path), load_run(tmp_path, last_session=True)
    begun = session.resumed_from
    assert run.num_sessions == 2
    assert 0 < begun < 600
    assert session.train_steps == [step for step in run.train_steps if step > begun]
    assert (session.start, session.summary) == (
        msgspec.structs.replace(run.start, elapsed=0.0),
        run.summary,
    )


def test_a_moved_run_names_its_own_place(tmp_path: Path, whole: list[dict]) -> None:
    write_run(tmp_path / "before", whole, summary(tmp_path / "before", 600))
    (tmp_path / "before").rename(tmp_path / "after")
    found = load_run(tmp_path / "after").summary
    assert found is not None
    assert found.run == str(tmp_path / "after")


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        ({"layout": [2]}, "layout"),
        ({"flags": {"given": "all"}}, "flags"),
        ({"plan": "best"}, "plan"),
        ({"job": {"evaluation": {"mode": "most"}}}, "evaluation.mode"),
    ],
)
def test_a_damaged_field_of_job_json_is_named(tmp_path: Path, damage: dict, field: str) -> None:
    file = write_run(tmp_path, []) / "job.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage | {"later": 1}))
    with pytest.raises(RunError) as error, Run.open(tmp_path) as run:
        read_record(run)
    said = str(error.value)
    assert said.startswith(f"{file} is damaged (")
    assert f"$.{field}" in said
    assert said.endswith("; restore it, or start again in another folder")


def test_a_record_with_a_damaged_field_is_a_damaged_line(tmp_path: Path, whole: list[dict]) -> None:
    damaged = {5: {"loss": "low"}, 6: {"step": None}}
    later = {"kind": "gossip", "time": START + 1e6, "step": 601}
    lines = [line | damaged.get(at, {}) for at, line in enumerate(whole)]
    run = load_run(write_run(tmp_path, [*lines, later]))
    assert run.damage == ["lines 6, 7 of metrics.jsonl are damaged and left out"]
    assert len(run.train) == 598
    assert (run.last and run.last.step) == 601, "a kind of a later version"


def test_a_summary_with_a_damaged_field_gives_way_to_the_records(
    tmp_path: Path, whole: list[dict]
) -> None:
    end = summary(tmp_path, 600)
    write_run(tmp_path, [*whole, end | {"kind": "end"}], end | {"time": 5, "later": 1})
    run = load_run(tmp_path)
    assert run.summary is not None
    assert run.summary.time == end["time"]
    assert "summary.json is damaged" in run.damage[0]
