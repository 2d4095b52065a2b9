"""Compiler flags of a run: options of its programs, in its record, kept when it is resumed."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import systolic.setup as module
from systolic import recipes
from systolic.chips import chip
from systolic.chips.flags import SHARED
from systolic.cli.main import main
from systolic.inference.model import set_up_here
from systolic.models.vision.config import Depth, ResNet
from systolic.recipes.jobs import kept_flags, new_flags
from systolic.runs.job_record import JobRecord
from systolic.runs.run import Run
from systolic.setup import set_up
from systolic.steps.machine import LocalDevices
from systolic.steps.programs import jit_evaluate, jit_train
from systolic.steps.step_functions import StepFunctions
from tests.models.images import CLASSES, COLOURED, steps
from tests.training.sessions import losses, records

RECIPE = f"{Path(__file__).with_name('tiny.py')}:job"
FLAG = "--xla_cpu_enable_fast_math=false"
OTHER = "--xla_cpu_enable_fast_min_max=false"
EARLIER = JobRecord.from_json({})
"""Of a version that kept no flags."""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.delenv(name, raising=False)


def flags_of(run: Path) -> tuple[Any, Any]:
    """What job.json and environment.json say."""
    record = json.loads((run / "job.json").read_text())["flags"]
    return record, json.loads((run / "environment.json").read_text())["flags"]


@pytest.mark.slow
def test_flags_are_in_the_record_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", RECIPE, "--run", str(run), "--steps", "2", f"--flags={FLAG}"]) == 0
    wanted = {"given": FLAG, "chip": None, "compiler": [FLAG]}
    assert flags_of(run) == (wanted, [FLAG])
    assert next(iter(records(run, "start")))["flags"] == [FLAG]
    assert FLAG in capsys.readouterr().err.splitlines()[0]
    assert main(["train", "--resume", str(run), "--steps", "4"]) == 0
    assert flags_of(run) == (wanted, [FLAG])
    with Run.open(run) as directory:
        setup = set_up_here(recipes.find(RECIPE)({}), directory)
    assert setup.steps.target.flags == (FLAG,)
    assert main(["train", "--resume", str(run), "--steps", "6", f"--flags={OTHER}"]) == 0
    assert flags_of(run)[1] == [OTHER]
    assert main(["train", "--resume", str(run), "--steps", "8", "--flags=none"]) == 0
    assert flags_of(run) == ({"given": "none", "chip": None, "compiler": []}, [])
    assert len(losses(run)) == 8
    assert not {"XLA_FLAGS", "LIBTPU_INIT_ARGS"} & set(os.environ)


def test_a_run_of_a_version_without_flags_goes_on_without_any() -> None:
    model = recipes.find(RECIPE)({}).model
    assert kept_flags(EARLIER, None, model, None).compiler == ()
    assert kept_flags(EARLIER, None, model, FLAG).compiler == (FLAG,)


def test_convolutional_networks_have_flags_of_their_own_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = [flag.text for flag in SHARED if flag.convolutional]
    job = steps(ResNet(depth=Depth.d10, width=4, num_classes=CLASSES, pixels=COLOURED)).job
    assert [*set_up(job, reads=False).flags] == here
    assert [*new_flags("none", None, job.model).compiler] == []
    assert [*new_flags(FLAG, None, job.model).compiler] == [*here, FLAG]
    tiny = recipes.find(RECIPE)({})
    assert set_up(tiny, reads=False).flags == new_flags("", None, tiny.model).compiler == ()
    made_here = replace(EARLIER, flags=new_flags(FLAG, None, job.model))
    assert [*kept_flags(made_here, None, job.model).compiler] == [*here, FLAG]
    elsewhere = SimpleNamespace(chip=None, platform="gpu")
    with monkeypatch.context() as patch:
        patch.setattr(LocalDevices, "here", lambda: elsewhere)
        assert [*kept_flags(made_here, None, job.model).compiler] == [FLAG]
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=dce")
    assert [*set_up(job, reads=False).flags] == here[:1]


def test_flags_are_options_of_the_programs() -> None:
    setup = set_up(recipes.find(RECIPE)({}))
    steps = StepFunctions(setup.job, replace(setup.steps.target, flags=("--xla_no_such=1",)))
    state, batch = steps.abstract_state, steps.abstract_batch()
    for program, arguments in (
        (jit_train(steps), (state, batch)),
        (jit_evaluate(steps), (state.params, state.model_state, batch)),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such"):
            program.lower(*arguments).compile()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--xla_no_such=1", "No such compile option: 'xla_no_such'"),
        ("--megascale_port=1", "set it in LIBTPU_INIT_ARGS"),
        ("fast", "flags begin with two dashes"),
    ],
)
def test_a_flag_that_is_none_is_one_line_and_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    run = tmp_path / "run"
    assert main(["train", RECIPE, "--run", str(run), f"--flags={flags}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not run.exists()


def test_what_the_environment_sets_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    setup = set_up(recipes.find(RECIPE)({}), flags=(FLAG, OTHER))
    assert setup.steps.target.flags == (OTHER,)


def test_the_set_of_the_devices_chip_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalDevices, "chip", chip("v6e"))
    monkeypatch.setattr(module, "check_flags", lambda *_: None)
    made = set_up(recipes.find(RECIPE)({}))
    wanted = tuple(flag.text for flag in SHARED if "v6e" in flag.generations)
    assert made.steps.target.flags == wanted
