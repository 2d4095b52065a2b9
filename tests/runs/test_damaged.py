"""Records that lost a field: each reads all the same, or is refused in one line."""

import copy
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from systolic import recipes
from systolic.cli.main import main
from systolic.core.errors import RunError, SystolicError
from systolic.explaining.runs import explain_run
from systolic.formats.jobs import job_of
from systolic.formats.source import open_source
from systolic.launching import record, state
from systolic.recipes.jobs import planned_options
from systolic.recipes.jobs.run import rebuild
from systolic.runs import plan_choice
from systolic.runs.job_record import read_record
from systolic.runs.run import JOB, Run
from systolic.training.resuming import check_resume
from systolic.tuning import study as studies

SAMPLES = Path(__file__).parent.parent / "compat" / "0.1.0"
EMPTY = (None, {}, [], "", 5)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    for name in ("lm", "typed", "bundle", "plan.json", "study", "launches"):
        with tarfile.open(SAMPLES / f"{name}.tar.xz") as packed:
            packed.extractall(folder, filter="data")
    return folder


def read_run(path: Path) -> None:
    with Run.open(path) as run:
        own = read_record(run)
        explain_run(path, quick=True)
        rebuilt = rebuild(run, trust_code=True)
        check_resume(run, replace(own, data={}), rebuilt.job, recipes.plain(rebuilt.options))


def read_plan(path: Path) -> None:
    chosen, recipe = plan_choice.read(path / "plan.json"), recipes.find("lm")
    chosen.applied(recipe(planned_options(recipe, chosen)))


def read_study(path: Path) -> None:
    studies.num_results(path)
    studies.check_free(path)
    studies._beside(path / "trials.json")


def read_launch(path: Path) -> None:
    launched = record.launch_in(path)
    state.cost(launched, 0.0)
    if not (launched.commands.logs and launched.commands.follow):
        list(state.output_of(launched, launched.name, follow=False, last=1, process=0))


READERS: Mapping[str, Callable[[Path], None]] = {
    "lm/job.json": read_run,
    "lm/summary.json": lambda path: void(explain_run(path, quick=True)),
    "typed/job.json": read_run,
    "plan.json": read_plan,
    "bundle/bundle.json": lambda path: void(job_of(open_source(path))),
    "study/study.json": read_study,
    "study/trials.json": read_study,
    "launches/done/launch.json": read_launch,
    "launches/cluster/launch.json": read_launch,
}


WITHOUT_NEED = ("lm/summary.json", "study/study.json", "study/trials.json")
"""Records that are read as far as they go."""


def void(_: Any) -> None:
    pass


def damaged(plain: dict[str, Any], depth: int = 2) -> Iterator[dict[str, Any]]:
    """The record without each of its fields, or with another value for it; fields of fields too."""
    for name, value in plain.items():
        yield {other: kept for other, kept in plain.items() if other != name}
        yield from ({**plain, name: other} for other in EMPTY if other != value)
        if depth > 1 and isinstance(value, dict):
            yield from ({**plain, name: inner} for inner in damaged(value, depth - 1))
        if depth > 1 and isinstance(value, list) and value and isinstance(value[0], dict):
            for inner in damaged(value[0], depth - 1):
                yield {**plain, name: [inner, *value[1:]]}


@pytest.mark.parametrize("name", READERS)
def test_a_record_that_lost_a_field_is_one_line(
    name: str, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("systolic.training.resuming.contents_of", lambda _: {})  # it is gone
    file, read = samples / name, READERS[name]
    written = file.read_text()
    plain = json.loads(written)
    read(file.parent)  # as it was written
    lines = []
    try:
        for changed in ({}, [], None, *damaged(copy.deepcopy(plain))):
            file.write_text(json.dumps(changed))
            try:
                read(file.parent)
            except SystolicError as error:
                lines.append(str(error))
    finally:
        file.write_text(written)
    assert all("\n" not in line for line in lines)
    assert lines or name in WITHOUT_NEED


def test_a_job_without_its_parts_is_damaged(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / JOB).write_text("{}")
    line = f"{tmp_path / JOB} is damaged (its job has no model); restore it, or start again in another folder"
    with Run.open(tmp_path) as run, pytest.raises(RunError) as caught:
        rebuild(run)
    assert str(caught.value) == line
    for words in (["eval", str(tmp_path)], ["train", "--resume", str(tmp_path)]):
        assert main(words) == 1
        assert capsys.readouterr().err == f"systolic: {line} [run]\n"
