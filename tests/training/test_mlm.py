"""The ``mlm`` recipe as a person types it: trained on files, stopped and resumed, evaluated; what it has no answer for."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from systolic import recipes
from systolic.cli.main import main
from systolic.training.session import ReporterWatcher
from tests.training.sessions import losses

SIZES = ("--model.layers", "1", "--model.d-model", "16", "--model.d-ff", "32", "--model.heads", "2")


def systolic(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_an_encoder_learns_hidden_letters_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "ab":
        (texts / f"{name}.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 400)
    train = ("train", "mlm", "--path", texts, "--sequence", 32, "--batch", 16, *SIZES)
    train = (*train, "--optimizer.learning-rate", 1e-2, "--evaluation.batches", 4, "--steps", 60)
    whole = systolic(capsys, *train, "--run", tmp_path / "whole")
    told = losses(tmp_path / "whole")
    metrics = whole["final"]["metrics"]
    assert metrics["validation_loss"] < 0.7 * told[1][0]
    assert 0 < metrics["validation_accuracy"] <= 1

    def see(self: ReporterWatcher, record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(ReporterWatcher, "see", see)
        part = [*map(str, train), "--run", str(tmp_path / "part"), "--json"]
        assert main(part) == 143
        capsys.readouterr()
    systolic(capsys, "train", "--resume", tmp_path / "part")
    assert losses(tmp_path / "part")[60] == told[60], "the same tokens were hidden"

    measured = systolic(capsys, "eval", tmp_path / "whole", "--path", texts / "a.txt")
    assert measured["metrics"][str(texts / "a.txt")]["loss"] > 0
    assert main(["predict", str(tmp_path / "whole"), str(texts / "a.txt")]) != 0
    assert "is read as a whole only; use systolic eval RUN --path" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "whole"), "abc"]) != 0
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_a_model_sees_is_listed(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 100)
    record = systolic(capsys, "data", "inspect", "mlm", "--path", tmp_path, "--sequence", 64)
    assert record["fields"]["places"] == {"shape": [9], "dtype": "int32"}
    assert record["values"]["labels"]["min"] >= -1
    assert "mlm" in recipes.shipped()
