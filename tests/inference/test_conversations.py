"""Held-out conversations by every verb: a base model beside its fine-tune, answers scored, prompts with a system's message."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import systolic
from systolic.cli.main import main
from systolic.core.errors import OptionError
from systolic.inference.evaluation import AnswerOptions, metrics_of
from systolic.inference.model import turns_of
from systolic.job import Checkpoints, Evaluation, Layout, Optimizer, Sampling
from tests.formats import folders

GREEDY = Sampling(temperature=0)
ANSWER = "7"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A tiny model, its fine-tune on one answer, and held-out conversations in ShareGPT's form."""
    home = tmp_path_factory.mktemp("tuned")
    base = folders.folder(home / "base")
    train = home / "train.csv"
    train.write_text("Frage,Antwort\n" + f"what,{ANSWER}\n" * 2 + f"who,{ANSWER}\n")
    held = home / "held.jsonl"
    said = [("human", "what"), ("gpt", ANSWER)]
    row = {"conversations": [{"from": who, "value": what} for who, what in said]}
    held.write_text(f"{json.dumps(row)}\n" * 2)
    systolic.train(
        "sft",
        run=home / "run",
        from_=base,
        data=train,
        columns={"prompt": "Frage", "answer": "Antwort"},
        sequence=48,
        batch=2,
        steps=80,
        layout=Layout(data=1, fsdp=1),
        optimizer=Optimizer(learning_rate=1e-2),
        evaluation=Evaluation(every=40),
        checkpoints=Checkpoints(every=80),
    )
    return base, home / "run", held


def test_a_base_model_is_compared_with_its_fine_tune(
    tuned: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run, held = tuned
    (tmp_path / "mine.py").write_text(
        "def brief(answer, reference):\n    return len(answer) <= 2 * len(reference)\n"
    )
    metrics = ["--metric", "exact", "--metric", "json", "--metric", f"{tmp_path / 'mine.py'}:brief"]
    given = ["compare", str(base), str(run), "--data", str(held), "--repeats", "0"]
    assert main([*given, *metrics, "--answer-tokens", "24", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    before, after = (made[side]["measured"] for side in ("a", "b"))
    assert after["loss"] < before["loss"]
    # The same tokens are scored, by the template that both have.
    assert {"exact_match", "valid_json", "brief", "answered"} < set(after)
    assert (after["exact_match"], after["valid_json"], after["brief"]) == (1.0, 1.0, 1.0)
    assert before["exact_match"] == 0.0
    assert after["answered"] == 2
    # The evaluation of the run on the same conversations is the same.
    (metrics_of_run,) = systolic.open(run).evaluate(path=held).values()
    assert metrics_of_run["loss"] == pytest.approx(after["loss"], rel=1e-5)


def test_what_fine_tuning_says(tuned: tuple[Path, Path, Path]) -> None:
    run = tuned[1]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [one["step"] for one in samples] == [40, 80]
    assert {one["prompt"] for one in samples} <= {"what", "who"}
    assert samples[-1]["text"] == ANSWER
    summary = json.loads((run / "summary.json").read_text())
    assert re.fullmatch(rf"systolic generate {run} --chat (what|who)", summary["next"])


def test_prompts_are_texts_or_messages(
    tuned: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = systolic.open(tuned[1])
    asked = [{"role": "user", "content": "what"}]
    plain = {"tokens": 24, "sampling": GREEDY}
    (answer,) = model.generate("what", chat=True, **plain)
    assert answer == ANSWER
    assert model.generate(asked, **plain) == [answer]
    assert model.generate([asked, "what"], chat=True, **plain) == [answer, answer]
    told = [{"role": "system", "content": "be short"}, *asked]
    assert model.generate("what", system="be short", **plain) == model.generate(told, **plain)
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(f"{json.dumps(one)}\n" for one in ({"messages": asked}, {"prompt": told}))
    )
    words = ["generate", str(tuned[1]), "--file", str(file), "--tokens", "24", "--temperature", "0"]
    assert main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["answers"]
    assert made[0]["text"] == answer
    assert made[0]["messages"] == asked
    assert made[1]["text"] == model.generate(told, **plain)[0]
    shown = repr(model)
    assert shown.startswith(f"<TrainedModel {tuned[1]}: Decoder for LanguageModel, ")
    assert re.search(r" parameters in float32, step [48]0, on 1 x cpu>$", shown)
    assert "Decoder for LanguageModel" in model._repr_html_()


@pytest.mark.parametrize(
    ("prompt", "system", "says"),
    [
        (3, None, "the prompt is 3; give a text, or a list of messages"),
        ([], None, r"the prompt is \[\]"),
        ([{"content": "a"}], None, "message 1 of the prompt is .* give role and content"),
        ([{"role": "user"}], None, "message 1 of the prompt has no content"),
        ([{"role": "assistant", "content": "a"}], None, "end with an answer"),
        ([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "c", "another one is given"),
    ],
)  # fmt: skip
def test_what_is_no_prompt(prompt: Any, system: str | None, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        turns_of(prompt, chat=False, system=system)


def test_what_is_no_metric(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def one(answer):\n    return 1\n")
    for word, says in (
        ("bleu", "bleu is no metric; give exact, json, or a function"),
        (f"{tmp_path / 'mine.py'}", "names no function"),
        (f"{tmp_path / 'mine.py'}:one", r"takes \(answer\); a metric takes \(answer, reference\)"),
    ):
        with pytest.raises(OptionError, match=says):
            metrics_of([word])
    with pytest.raises(OptionError, match="conversations"):
        AnswerOptions(conversations=0)


def test_a_model_is_inspected_with_its_special_tokens(
    tuned: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, _, held = tuned
    given = ["data", "inspect", "sft", "--from", str(base), "--sequence", "48"]
    assert main([*given, "--data", str(held)]) == 0
    assert "[learned: 7<|stop|>]" in capsys.readouterr().out
    bad = tmp_path / "bad.jsonl"
    bad.write_text(held.read_text() + '{\n{"question": "a"}\n{"chosen": "a", "rejected": "b"}\n')
    assert main([*given, "--data", str(bad)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [re.search(r"line \d", one)[0] for one in lines[:-1]] == ["line 3", "line 4", "line 5"]  # ty: ignore[not-subscriptable]
    assert "3 of 5 lines of the data can't be learned; correct them, or take them out" in lines[-1]
    # A fault that many lines have is told once, also where the template refuses them.
    robots = [{"role": "user", "content": "what"}, {"role": "robot", "content": "x"}]
    row = {"messages": [*robots, {"role": "Assistant", "content": ANSWER}]}
    many = f"{json.dumps(row)}\n" * 64
    for more, kinds in (("", 0), ("{\n" * 3 + '{"question": "a"}\n', 3)):
        bad.write_text(many + more)
        assert main([*given, "--data", str(bad)]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == kinds + 1
        first = lines[-1] if not kinds else lines[-2]
        assert re.search(
            r"64 of 6\d lines: \S+bad.jsonl line 1, turn 2 has the role 'robot', which the chat template of \S+ does not name; did you mean bot\? take system, developer, user, assistant, tool( \[data\])?$",
            first,
        )
    assert re.search(r"3 of 68 lines: .*line 65 is not JSON", lines[0])
    assert "line 68 has question and lacks answer" in lines[1]
    assert "68 of 68 lines of the data can't be learned" in lines[-1]
    for name, text, says in (
        ("empty.jsonl", "", r"empty.jsonl is empty; write conversations to it"),
        ("head.CSV", "question,answer\n", r"head.CSV names its columns and has no rows"),
        ("a.XLSX", "PK", r"a.XLSX is a spreadsheet; save it as CSV"),
        ("hed.csv", None, r"hed.csv does not exist; did you mean \S+/head.CSV\?"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        assert main([*given, "--data", str(tmp_path / name)]) != 0
        assert re.search(says, capsys.readouterr().err)
