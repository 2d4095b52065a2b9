"""Several processes that have different data or checkpoints find it out: before the first step, while they train, and in evaluations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.training.children import environment, together
from tests.training.test_kept import SIZES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts of the same size, and a file that only one process finds."""
    folder = tmp_path_factory.mktemp("same")
    for process, word in enumerate(("pulse", "beats")):
        (folder / str(process)).mkdir()
        (folder / str(process) / "text.txt").write_text(f"the array {word}\n" * 100)
        tokenizer(folder / str(process) / "same", "pulse", "</s>")
        tokenizer(folder / str(process) / "other", word, "</s>")
        tokenizer(folder / str(process) / "marks", "pulse", ("<s>", "</s>")[process])
    (folder / "1" / "gone0.txt").write_text("here")
    return folder


def tokenizer(folder: Path, word: str, end: str) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([f"the array {word}"] * 9, trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[str, Any]]:
    """What the two processes say."""
    told = together(
        ["tests.training.distributed.same_child", str(folder)], environment(folder / "cache"), 2
    )
    # Gloo prints a line or two beside ours.
    return [json.loads(next(x for x in out.splitlines() if x.startswith("{"))) for out in told]


def test_both_processes_refuse_alike(answers: list[dict[str, Any]]):
    assert answers[0] == {**answers[1], "skipped": answers[0]["skipped"]}


def test_a_checkpoint_that_one_process_sees_damaged_is_skipped_by_both(
    answers: list[dict[str, Any]],
):
    """Each saves and copies what both saved, then reads its copy."""
    found = answers[0]["damaged"]
    assert (found["step"], found["same"], found["processes"]) == (20, True, [0, 1])
    [[step, told]] = found["skipped"]
    assert step == 30
    assert "other content in process 1" in told


def test_files_and_arrays_are_compared_before_the_first_step(
    answers: list[dict[str, Any]], folder: Path
):
    told = answers[0]
    assert told["same text"] == ""
    assert told["text"] == (
        f"processes 0 and 1 have different data for train: in process 1 {folder / '1' / 'text.txt'} has as many bytes (1600) with other contents, compared whole; give every process the same files and versions"
    )
    assert told["arrays"].startswith(
        "processes 0 and 1 have different data for validation: in process 1 validation arrays"
    )
    assert "different data for train" in told["size"]
    assert told["gone"].endswith(
        "gone1.txt does not exist; give a file or folder of text (in process 1)"
    )


def test_batches_are_compared_where_data_tells_nothing(answers: list[dict[str, Any]]):
    told = answers[0]
    assert told["untold"] == ""
    for name in ("evaluation", "training"):
        assert told[name].startswith(
            "processes 0 and 1 hold the same part of a batch and read different data for it (tokens"
        )
    # Batches 1, 5 and 9 are compared; the sixth is the first that differs.
    assert told["trained"] == 8


def test_files_that_any_process_left_out_are_named(answers: list[dict[str, Any]]):
    for process, other in ((0, 1), (1, 0)):
        assert answers[process]["skipped"] == ["both", f"process {process}", f"process {other}"]
        assert answers[process]["again"] == []


def test_all_processes_have_the_text_of_the_first(answers: list[dict[str, Any]]):
    assert [told["shared"] for told in answers] == ["said by 0, é"] * 2


def test_settings_are_compared_before_the_first_step(answers: list[dict[str, Any]]):
    told = answers[0]
    assert told["same job"] == ""
    for name, values in (("seed", (0, 1)), ("optimizer.learning_rate", (0.1, 0.2))):
        assert told[name] == (
            f"processes 0 and 1 were given different settings: {name} is {values[0]!r} in process 0 and {values[1]!r} in process 1; start every process with the same options and versions"
        )
    assert (
        "flags is '' in process 0 and '--xla_cpu_enable_fast_math=true' in process 1"
        in told["flags"]
    )


def test_settings_of_the_data_are_compared_and_its_paths_are_not(answers: list[dict[str, Any]]):
    told = answers[0]
    assert told["paths"] == told["own paths"] == ""
    for name, values in {
        "data.field": ("'text'", "'body'"),
        "data.packing": ("'fit'", "'cut'"),
        "data.validation": ("None", "'a path'"),
        "data.template": ("…{ text }}{{ text }} 0'", "…{ text }}{{ text }} 1'"),
    }.items():
        assert told[name] == (
            f"processes 0 and 1 were given different settings: {name} is {values[0]} in process 0 and {values[1]} in process 1; start every process with the same options and versions"
        )
    assert "settings: data." in told["data.type"]


def test_tokenizers_are_compared(answers: list[dict[str, Any]]):
    told = answers[0]
    assert told["same tokenizer"] == ""
    said = r"processes 0 and 1 have different tokenizers: (.*) in process 0, (.*) in process 1; give every process the same tokenizer.json and tokenizer_config.json"
    for name, alike in (("tokenizer", False), ("marks", True)):
        found = re.fullmatch(said, told[name])
        assert found is not None, told[name]
        mine, other = (each.split(", ") for each in found.groups())
        assert (mine[0] == other[0]) is alike
        assert (mine[1:] == other[1:]) is not alike


@pytest.mark.slow
def test_a_process_whose_data_changed_is_found_at_a_resume(tmp_path: Path):
    texts = [tmp_path / name / "text.txt" for name in "01"]
    for text in texts:
        text.parent.mkdir()
        text.write_text("the array flows\n" * 400)
    environ, run = environment(tmp_path / "cache"), tmp_path / "run"
    path = ["--path", f"{tmp_path}/{{}}/text.txt"]
    together(["systolic", "train", "lm", *path, *SIZES, "--run", str(run)], environ, 2)
    more = ["systolic", "train", "--resume", str(run), *path, "--steps", "5"]
    texts[1].write_text("the array flews\n" * 400)
    before = (run / "summary.json").read_bytes()
    together(more, environ, 2, code=1)
    assert (run / "summary.json").read_bytes() == before
    texts[1].write_text("the array flows\n" * 400)
    together(more, environ, 2)
    assert json.loads((run / "summary.json").read_text())["steps"] == 5
