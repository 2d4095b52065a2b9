"""Options to search: types come from the recipe's options; each mistake is one line."""

import re
from contextlib import closing
from pathlib import Path

import pytest

from systolic.cli.forms import request
from systolic.cli.main import VERBS, main
from systolic.core.errors import OptionError
from systolic.tuning.definition import Tuning
from systolic.tuning.study import DEFINITION
from tests.tuning.searches import tuning_of

pytest.importorskip("optuna")


def searched(*words: str, recipe: str = "digits"):
    return tuning_of([recipe, *(f"--search={word}" for word in words)]).searched


def test_the_options_types_decide() -> None:
    rate, batch, model, rows, smooth = searched(
        "optimizer.learning-rate=log:1e-4..1e-2",
        "batch=16..64:16",
        "model=cnn,vit",
        "optimizer.clip=0,1",
        "label_smoothing=0..0.3",
    )
    assert (rate.low, rate.high, rate.log, rate.whole) == (1e-4, 1e-2, True, False)
    assert (batch.low, batch.high, batch.step, batch.whole) == (16, 64, 16, True)
    assert batch.grid() == [16, 32, 48, 64]
    assert list(model.words) == ["cnn", "vit"]
    assert model.choices is not None
    assert [value.value for value in model.choices.values()] == ["cnn", "vit"]
    assert rows.words == (0.0, 1.0)
    assert smooth.name == "label-smoothing"
    assert not smooth.whole
    (switch,) = searched("model.qk-norm=yes,no", recipe="bytes")
    assert switch.words == (True, False)


KINDS = """
from enum import Enum
from typing import Literal
from systolic.job import Job
from systolic.recipes.digits import digits

class Act(Enum):
    relu = "relu"
    tanh = "tanh"

def job(kind: Literal["a", "b"] = "a", count: Literal[1, 2] | None = None, widths: tuple[int, ...] = (8, 4),
        pair: tuple[int, Act] = (1, Act.relu), parts: tuple[Literal["x", "y"] | int, ...] = (), limit: int | None = None,
        fast: bool | None = None, lambda_: float = 1.0, steps: int = 2) -> Job:
    return digits(steps=steps)
"""


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("kind=a,b", ["a", "b"]),
        ("count=1,None,2", [1, None, 2]),
        ("widths=8 4,6", [(8, 4), (6,)]),
        ("pair=1 tanh,2 relu", "[(1, <Act.tanh: 'tanh'>), (2, <Act.relu: 'relu'>)]"),
        ("parts=x 3,y", [("x", 3), ("y",)]),
        ("limit=None,3", [None, 3]),
        ("fast=yes,no,None", [True, False, None]),
        ("lambda_=0.5,1", [0.5, 1.0]),
        ("limit=1..8", None),
        ("kind=a,c", "it takes a or b"),
        ("pair=1,2 relu", "it takes values with spaces between, each a whole number or relu or tanh"),
        ("count=1,3", "it takes 1 or 2"),
        ("widths=8 x,4", "it takes values with spaces between, each a whole number"),
    ],
)  # fmt: skip
def test_choices_are_of_the_types_that_the_command_line_takes(
    tmp_path: Path, word: str, values: object
) -> None:
    (tmp_path / "kinds.py").write_text(KINDS)
    recipe = f"{tmp_path / 'kinds.py'}:job"
    if isinstance(values, str) and values.startswith("it takes"):
        with pytest.raises(OptionError, match=re.escape(values)):
            searched(word, recipe=recipe)
        return
    (option,) = searched(word, recipe=recipe)
    assert option.name == word.partition("=")[0].rstrip("_")
    if values is None:
        assert (option.low, option.high, option.whole) == (1, 8, True)
        return
    assert option.choices is not None
    own = list(option.choices.values())
    assert (repr(own) if isinstance(values, str) else own) == values


def test_the_command_of_the_best_is_one_that_train_reads(tmp_path: Path) -> None:
    (tmp_path / "kinds.py").write_text(KINDS)
    recipe = f"{tmp_path / 'kinds.py'}:job"
    words = ("widths=8 4,6", "kind=a,b", "pair=1 tanh,2 relu", "limit=None,3", "lambda_=0.5,1")
    tuning = tuning_of([recipe, *(f"--search={word}" for word in words)])
    best = {option.name: option.words[0] for option in tuning.searched}
    line = [word for name, value in best.items() for word in tuning._words(name, value)]
    assert " ".join(line) == "--widths 8 4 --kind a --pair 1 tanh --limit None --lambda 0.5"
    options = request(recipe, line, "train", VERBS["train"].forms[0].options.read).options
    assert (options["widths"], options["limit"], options["lambda_"]) == ((8, 4), None, 0.5)


def test_numbers_of_a_range_are_short_and_inside_it() -> None:
    (rate,) = searched("optimizer.learning-rate=log:1.23456e-4..1.23457e-4")
    assert rate.rounded(1.2345671e-4) == pytest.approx(1.2345671e-4, abs=1e-12)
    assert rate.rounded(1.3e-4) == 1.23457e-4
    (wide,) = searched("optimizer.learning-rate=log:1e-4..1e-2")
    assert wide.rounded(0.00123456) == 0.001235
    assert wide.place(1e-3) == pytest.approx(0.5)
    (high,) = searched("optimizer.b2=0.9990..0.99999")
    assert high.rounded(0.99912347) == 0.9991235
    assert len({high.rounded(0.999 + i * 1e-6) for i in range(900)}) == 900


def test_numbers_of_a_range_in_steps_are_on_them() -> None:
    (quarter,) = searched("optimizer.learning-rate=1000.5..1010:0.25")
    assert quarter.rounded(1005.7500001) == 1005.75
    (fine,) = searched("optimizer.learning-rate=0.12341..0.12349:0.00001")
    assert fine.grid() == [0.12341 + 0, 0.12342, *(float(f"0.1234{i}") for i in range(3, 10))]


WRONG = {
    "optimizer.learning-rat=1,2": "did you mean optimizer.learning-rate?",
    "optimizer.lr=1,2": "did you mean optimizer.learning-rate?",
    "optimizer.learning-rate=1..inf": "a range needs finite numbers",
    "optimizer.learning-rate=nan..1": "a range needs finite numbers",
    "optimizer.learning-rate=lgo:1e-4..1e-2": "a logarithmic range is log:LOW..HIGH",
    "batch=-32..64": "search batch=-32..64: batch is -32; it must be at least 1",
    "batch=1..9999999999999999999999": "it must be at most",
    "optimizer.learning-rate=-1..0.1": "learning-rate is -1.0; it must be",
    "evaluation.every=-1..10": "evaluation.every is -1; it must be",
    "batch=16..64:100": "a step of 100, and the range is 48 wide",
    "learning-rate=1,2": "did you mean optimizer.learning-rate?",
    "batch": "it takes an option with a range",
    "batch=": "it takes an option with a range",
    "batch=1.5..3": "takes a whole number",
    "batch=a,b": "takes a whole number",
    "batch=8..4": "begins at 8 and ends at 4; give the smaller one first",
    "optimizer.learning-rate=log:1e-3..1e-3": "begins and ends at 0.001; give a range, or set --optimizer.learning-rate 1e-3",
    "batch=8..8": "begins and ends at 8; give a range, or set --batch 8",
    "batch=4..8:0": "it takes a whole number above 0",
    "batch=log:4..8:2": "a step in a logarithmic range",
    "batch=4": "has one value",
    "batch=4,4": "a value twice",
    "optimizer.learning-rate=1e-3,0.001": "a value twice",
    "optimizer.learning-rate=log:0..1": "a logarithmic range must begin above 0",
    "optimizer.learning-rate=log:1,2": "it takes log:LOW..HIGH",
    "model=cnn..vit": "list its values with commas",
    "model=cnn,vitt": "it takes cnn or vit",
}


@pytest.mark.parametrize(("word", "told"), WRONG.items())
def test_a_wrong_range_is_told_in_one_line(word: str, told: str) -> None:
    with pytest.raises(OptionError) as error:
        searched(word)
    assert told in str(error.value)
    assert "--value" not in str(error.value)
    assert "\n" not in str(error.value)


LINES = {
    "digits": "needs an option to search",
    "digits --search batch=8,16 --batch 8": "--batch is both given and searched",
    "digits --search batch=8,16 --search batch=4,8": "twice",
    "digits --search batch=8,16 --budget 5": "add --on v5e-4",
    "digits --search batch=8,16 --budget 0 --on v5e-1": "above 0",
    "digits --search batch=8,16 --on v9-1": "v9",
    "digits --search batch=8,16 --objective accurcy": "did you mean accuracy?",
    "digits --search batch=8,16 --objective seconds": "minimising seconds alone picks the smallest model; add --objective accuracy",
    "digits --search batch=8,16 --objective max:parameters": "parameters alone says nothing about the trained model",
    "digits --search batch=8,16 --objective dollars --objective accuracy": "needs a slice",
    "digits --search batch=8,16 --sampler cmaes": "two ranges",
    "digits --search optimizer.clip=0..1 --sampler grid": "a grid needs values",
    "digits --search batch=8,16 --objective accuracy --objective seconds --pruner median": "one objective",
    "bytes --search batch=8,16 --pruner hyperband": "add --evaluation.every 50",
    "digits --search batch=8,16 --storage nowhere": "is not a database URL",
    "digits --search batch=8,16 --storage nosuch://host/db": "does not know",
    "digits --search batch=8,16 --trials 0": "at least 1",
}


@pytest.mark.parametrize(("line", "told"), LINES.items())
def test_a_wrong_line_is_refused_before_anything_is_written(
    line: str, told: str, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *line.split()]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert told in said
    assert list(tmp_path.iterdir()) == []


def test_hyperband_knows_the_longest_trial() -> None:
    def longest(*words: str) -> int:
        given = ["digits", *words, "--evaluation.every=10", "--pruner=hyperband"]
        return tuning_of(given).pruning()._max_resource

    assert longest("--search=steps=50,100,1000") == 1000
    assert longest("--search=batch=16,32", "--search=steps=50..500") == 500
    assert longest("--search=model=cnn,vit") == 800
    assert longest("--search=model=cnn,vit", "--trial-steps=60") == 60


RECIPE = """
from dataclasses import replace
from pathlib import Path

import helper
from systolic.recipes.lm import lm


def job(path: Path, steps: int = 16):
    return replace(lm(path=path, steps=steps), seed=helper.SEED)
"""


def test_a_study_of_other_files_is_not_continued(tmp_path: Path) -> None:
    """Imported modules and the data are part of the definition; a study of a version that stored neither is continued."""
    recipe, helper, text = (tmp_path / name for name in ("recipe.py", "helper.py", "a.txt"))
    recipe.write_text(RECIPE)
    helper.write_text("SEED = 1\n")
    text.write_text("some text\n" * 40)

    def tuning() -> Tuning:
        words = ("--search=steps=8,16", f"--path={text}", f"--study={tmp_path / 's'}")
        return tuning_of([f"{recipe}:job", *words])

    with closing(tuning().open()) as shared:
        kept = shared.study.user_attrs[DEFINITION]
        assert "400 bytes" in kept["data"]["train"]
        text.write_text("SOME TEXT\n" * 40)
        with pytest.raises(OptionError, match="has the data train=1 files of 400 bytes"):
            tuning().open()
        helper.write_text("SEED = 2\n")
        with pytest.raises(
            OptionError, match=r"has the modules helper\.py=.* with the same modules, or"
        ):
            tuning().open()
        before = {name: one for name, one in kept.items() if name not in ("data", "modules")}
        shared.study.set_user_attr(DEFINITION, before)
        (tmp_path / "s" / "trials.json").unlink()
        tuning().open().close()
        assert set(shared.study.user_attrs[DEFINITION]) == set(kept)
