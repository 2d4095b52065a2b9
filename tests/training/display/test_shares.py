"""A task says which of its metrics are shares of 1: those are shown in per cent, whatever their names."""

from pathlib import Path

import pytest

from systolic.cli.main import main
from systolic.report import figures
from systolic.runs.metrics import StartRecord, TrainRecord
from systolic.runs.record import load_run
from systolic.training.display import plain

RECIPE = '''
from dataclasses import dataclass
import numpy as np
from flax import nnx
from systolic.data.arrays import Arrays
from systolic.job import Batch, Evaluation, Job, Model, Task

class Constant(nnx.Module):
    def __init__(self, rngs):
        self.bias = nnx.Param(0.0 * rngs.params.uniform(()))

@dataclass(frozen=True)
class Guess(Model):
    def build(self, rngs, target):
        return Constant(rngs)

@dataclass(frozen=True)
class Pulse(Task):
    shares = SHARES
    def terms(self, model, batch, train):
        ones = 0 * batch["x"] + 1
        return {"loss": (model.bias[...] - batch["x"]) ** 2, "iou": ones / 4, "heart_rate": 72 * ones}

def job() -> Job:
    x = np.zeros(8, np.float32)
    return Job(name="pulse", model=Guess(), task=Pulse(), data=Arrays.of(train={"x": x}, validation={"x": x}), steps=2, batch=Batch(total=4), evaluation=Evaluation(every=1))
'''  # fmt: skip


def test_a_users_shares_are_shown_in_per_cent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pulse.py").write_text(RECIPE.replace("SHARES", '("iou",)'))
    assert main(["train", "pulse.py:job", "--run", "run", "--diagnose", "0"]) == 0
    shown = capsys.readouterr()
    assert "heart rate 72.0000  iou 25.0 %" in shown.err
    assert "validation heart rate 72.0000, validation iou 25.0 %" in shown.out.replace("\n", " ")
    page = Path("run/report.html").read_text()
    assert "25.0 %" in page
    assert "7200" not in page
    assert load_run(Path("run")).start.shares == ("iou",)


def test_a_text_is_no_list_of_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pulse.py").write_text(RECIPE.replace("SHARES", '"iou"'))
    assert main(["train", "pulse.py:job", "--run", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "shares of the task Pulse is 'iou'; give the names of terms in a tuple" in line


def test_runs_of_earlier_versions_look_as_before() -> None:
    """Their start records have no shares: names that end so are taken for shares."""
    terms = {"accuracy": 0.5, "top5_accuracy": 0.75, "skip_rate": 0.25, "balance": 0.1}
    line = plain.line_of(TrainRecord(step=3, terms=terms), StartRecord(steps=10))
    assert "accuracy 50.0 %  top5 accuracy 75.0 %  skip rate 25.0 %  balance 0.1000" in line


@pytest.mark.parametrize(
    ("name", "shares", "share"),
    [
        ("accuracy", ("*accuracy",), True),
        ("test_top5_accuracy", ("*accuracy",), True),
        ("validation_iou", ("iou",), True),
        ("iou_of_best", ("iou",), False),
        ("hit_rate", ("*accuracy",), False),
    ],
)
def test_a_share_is_one_in_any_split(name: str, shares: tuple[str, ...], share: bool) -> None:
    assert figures.is_share(name, shares) is share
