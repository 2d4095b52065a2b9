"""A run read back from what is on disk, whole or not, and the verdict on it."""

import json
import math
from pathlib import Path

import pytest

from systolic.report.figures import Tone
from systolic.runs.record import RunRecord, State, load_run
from systolic.training.display.summary import (
    commands,
    judge,
    metric_texts,
    plain_summary,
    print_summary,
    seconds_by_kind,
)
from tests.training.display.fabricate_run import failed_records, records, summary, write_run


@pytest.fixture(scope="module")
def whole() -> list[dict]:
    return records(600)


def loaded(path: Path, lines: list[dict], **changes: object) -> RunRecord:
    """A finished run whose summary differs in what is given."""
    end = summary(path, 600)
    final = end["final"]["metrics"] | changes.pop("metrics", {})  # type: ignore[operator]
    metrics = {name: value for name, value in final.items() if value is not None}
    end["final"] = end["final"] | {"metrics": metrics}
    return load_run(write_run(path, lines, end | changes))


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({"interrupted": "SIGINT"}, State.interrupted, "Interrupted at step 600 of 600: SIGINT."),
        (
            {"stopped": "loss has not improved in 5 evaluations"},
            State.stopped,
            "Stopped at step 600 of 600: loss has not improved in 5 evaluations.",
        ),
    ],
)
def test_a_run_that_ended_early_says_why(
    tmp_path: Path, whole: list[dict], changes: dict, state: State, words: str
) -> None:
    run = loaded(tmp_path, whole, **changes)
    assert run.state is state
    assert judge(run).sentence == words


def test_a_run_without_a_summary_is_unfinished(tmp_path: Path, whole: list[dict]) -> None:
    run = load_run(write_run(tmp_path, whole[:200]))
    assert run.state is State.unfinished
    assert judge(run).tone is Tone.neutral
    assert f"step {run.train[-1].step} of 600" in judge(run).sentence
    assert run.final_metrics["validation_loss"] == run.evals[-1].metrics["loss"]
    assert dict(commands(run))["continue from the last checkpoint"].startswith(
        "systolic train --res"
    )


def test_without_a_summary_the_records_say_where_the_time_went(
    tmp_path: Path, whole: list[dict]
) -> None:
    spent = seconds_by_kind(load_run(write_run(tmp_path, whole)))
    assert spent["eval"] == 12.0
    assert spent["compile"] == pytest.approx(11.6 + 2.6)
    assert spent["checkpoint"] == pytest.approx(6 * 1.6)
    steps = sum(r["step_seconds"] for r in whole if r["kind"] == "train")
    assert spent["step"] + spent["data_wait"] == pytest.approx(steps)


def test_a_bad_step_that_ended_a_run_is_its_verdict(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, failed_records()))
    assert run.state is State.failed
    assert judge(run).tone is Tone.bad
    assert "step 1000 is not a number" in judge(run).sentence
    replay = dict(commands(run))["replay the bad step"]
    assert replay == f"systolic train --replay {tmp_path}/bad/step-1000.npz"


def test_a_run_whose_last_loss_is_nan_has_diverged(tmp_path: Path, whole: list[dict]) -> None:
    last = max(i for i, line in enumerate(whole) if line["kind"] == "train")
    lines = [*whole[:last], whole[last] | {"loss": math.nan}, *whole[last + 1 :]]
    assert judge(loaded(tmp_path, lines)).word == "diverged"


@pytest.mark.parametrize(
    ("metrics", "word", "sentence"),
    [
        ({}, "beats gzip", "27 % less"),
        ({"validation_bits_per_byte": 2.63}, "level with gzip", "2.630 bits per byte"),
        ({"validation_bits_per_byte": 3.4}, "behind gzip", "30 % more"),
        ({"gzip_bits_per_byte": None}, "trained", "1.921 bits per byte on held-out text."),
    ],
)
def test_verdicts(
    tmp_path: Path, whole: list[dict], metrics: dict, word: str, sentence: str
) -> None:
    verdict = judge(loaded(tmp_path, whole, metrics=metrics))
    assert verdict.word == word
    assert sentence in verdict.sentence


@pytest.mark.parametrize(
    ("unit", "metrics", "sentence", "first"),
    [
        (
            "tokens",
            {"validation_accuracy": 0.341, "validation_loss": 2.5},
            "Perplexity 12.18 on held-out text, a loss of 2.5000 per token.",
            ("validation perplexity", "12.1825"),
        ),
        (
            "tokens",
            {"validation_accuracy": 0.4, "validation_loss": 1.2, "validation_bits_per_byte": 1.73},
            "1.730 bits per byte on held-out text.",
            ("validation bits per byte", "1.7300"),
        ),
        (
            "examples",
            {"test_loss": 0.2, "test_accuracy": 0.9551},
            "Test accuracy 95.5 %.",
            ("test accuracy", "95.5 %"),
        ),
    ],
)
def test_the_headline_is_the_measure_of_the_kind_of_model(
    tmp_path: Path,
    whole: list[dict],
    unit: str,
    metrics: dict,
    sentence: str,
    first: tuple[str, str],
) -> None:
    """2.5 nats a token is a perplexity of exp(2.5) = 12.18; accuracy says little of a language model."""
    lines = [line | {"unit": unit} if line["kind"] == "start" else line for line in whole]
    end = summary(tmp_path)
    end["final"]["metrics"] = metrics
    run = load_run(write_run(tmp_path, lines, end))
    assert judge(run).sentence == sentence
    assert next(iter(metric_texts(run).items())) == first


def test_the_command_that_made_it_without_the_folder_that_is_taken(
    tmp_path: Path, whole: list[dict]
) -> None:
    run = loaded(tmp_path, whole)
    assert dict(commands(run))["the same run again"] == "systolic train bytes --steps 3000"


def test_a_recipe_of_ones_own_runs_from_the_copy(tmp_path: Path, whole: list[dict]) -> None:
    write_run(tmp_path, whole, summary(tmp_path))
    argv = ["/usr/bin/systolic", "train", "my file.py:job", "--run=x", "--width", "64"]
    (tmp_path / "environment.json").write_text(json.dumps({"argv": argv}))
    (tmp_path / "recipe.py").write_text("")
    found = dict(commands(load_run(tmp_path)))
    assert found["the same run again"] == "systolic train 'my file.py:job' --width 64"
    copy = f"systolic train {tmp_path}/recipe.py:job --width 64"
    assert found["from the copy of the recipe kept with the run"] == copy


def test_a_resume_is_not_offered_as_the_same_run(tmp_path: Path, whole: list[dict]) -> None:
    write_run(tmp_path, whole, summary(tmp_path))
    argv = ["systolic", "train", "--resume", str(tmp_path)]
    (tmp_path / "environment.json").write_text(json.dumps({"argv": argv}))
    assert "the same run again" not in dict(commands(load_run(tmp_path)))


def test_a_run_of_which_only_the_job_is_there(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    (tmp_path / "metrics.jsonl").unlink()
    lines = plain_summary(load_run(tmp_path))
    assert lines[0] == "bytes: unfinished"
    assert "0 of 3,000" in "\n".join(lines)


def test_a_long_sample_is_cut_and_says_so(tmp_path: Path, whole: list[dict]) -> None:
    sample = whole[-1] | {"text": "The " + "word " * 1000}
    text = "\n".join(plain_summary(loaded(tmp_path, [*whole[:-1], sample])))
    assert any(line.startswith("  | The word") and line.endswith("…") for line in text.splitlines())
    assert len(text) < 2500


def test_the_summary_of_a_pipe_has_no_escapes(
    tmp_path: Path, whole: list[dict], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, whole, summary(tmp_path))
    print_summary(tmp_path)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "beats gzip" in out
