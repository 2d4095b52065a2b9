"""A command that is printed gives the values that it was made from."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from systolic import recipes
from systolic.cli.forms import request
from systolic.cli.main import VERBS, main
from systolic.core.option_words import option_words
from systolic.job import Layout
from systolic.recipes.jobs import source_of

LM = recipes.find("lm")
FORECAST = VERBS["forecast"].forms[0].options.read


def asked(*words: str):
    return request("lm", [*words, "--on", "v5e-4"], "forecast", FORECAST)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--model.layers", "2", "--layout.fsdp", "8"],
        ["--layout.remat", "save-names", "--layout.remat-names", "query", "key"],
        ["--model.no-tie-embeddings", "--prompt", "a text of words"],
        ["--path", "a file.txt", "--batch-per-device", "0.5"],
        ["--prompt=--dashed", "--optimizer.learning-rate", "0.0001"],
        ["--layout.fsdp", "-1", "--layout.data", "2"],
    ],
    ids=" ".join,
)
def test_words_give_the_values_back(words: list[str]) -> None:
    options = asked(*words).options
    made = option_words(LM.function, options)
    assert asked(*shlex.split(shlex.join(made))).options == options
    assert len(made) <= len(words)


def test_what_is_a_default_is_not_typed() -> None:
    assert option_words(LM.function, asked("--steps", "1000", "--seed", "3").options) == [
        "--seed",
        "3",
    ]


def test_a_whole_number_has_no_point() -> None:
    words = ["--batch-per-device", "64", "--optimizer.learning-rate", "1e-05"]
    assert option_words(LM.function, asked(*words).options) == words


def test_a_path_in_a_bucket_keeps_both_slashes() -> None:
    options = asked("--path", "gs://b/c").options
    assert option_words(LM.function, options) == ["--path", "gs://b/c"]


def test_a_default_that_was_typed_stays() -> None:
    """A run that continues may have another value than the default."""
    words = ["--steps", "1000", "--seed", "3", "--model.no-tie-embeddings", "--precision=auto"]
    given = request("lm", [*words, "--on", "v5e-4"], "forecast", FORECAST)
    made = option_words(LM.function, given.options, typed=given.as_typed.given)
    assert shlex.join(made) == shlex.join(
        ["--model.no-tie-embeddings", "--steps", "1000", "--precision", "auto", "--seed", "3"]
    )


def test_settings_take_the_place_of_what_was_given() -> None:
    options = asked("--layout.fsdp", "8", "--batch-per-device", "2", "--steps", "7").options
    settings = {"layout.fsdp": 4, "layout.remat": "full", "batch": 16, "layout.tensor": 1}
    words = option_words(LM.function, options, settings)
    again = asked(*words).options
    assert (again["layout"].fsdp, again["layout"].remat.value) == (4, "full")
    assert (again["batch"], again["batch_per_device"], again["steps"]) == (16, None, 7)
    assert "--layout.tensor" not in words


def test_a_default_takes_away_what_was_given() -> None:
    options, one = {"layout": Layout(data=4)}, {"layout.data": 1}
    assert option_words(LM.function, options, one) == []

    def other(layout: Layout = Layout(data=2)) -> None:  # noqa: B008
        """A recipe with another default."""

    assert option_words(other, options, one) == ["--layout.data", "1"]


def test_options_that_are_left_out() -> None:
    options = asked("--model.layers", "2", "--seed", "3", "--batch", "8").options
    made = option_words(LM.function, options, typed={"batch"}, without={"model.layers", "batch"})
    assert made == ["--seed", "3"]


def test_a_verbs_own_options() -> None:
    options = FORECAST(on="v5e-4", flags="--xla_a=1", quick=True, html=Path("a b.html"))
    assert option_words(FORECAST, vars(options)) == [
        "--on",
        "v5e-4",
        "--flags=--xla_a=1",
        "--quick",
        "--html",
        "a b.html",
    ]


COUNTED = '''
from pathlib import Path
from systolic.job import Job
from systolic.recipes.digits import digits

def job(count: Path, steps: int = 2) -> Job:
    """Notes each time that it is read."""
    with count.open("a") as file:
        file.write("read ")
    return digits(steps=steps)
'''


@pytest.mark.parametrize("place", ["{}", "../{0.parent.name}/{0.name}"])
def test_a_recipe_is_read_once(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more where a path is relative: a mistake names it as it was typed, and the run keeps it whole."""
    (tmp_path / "counted.py").write_text(COUNTED)
    monkeypatch.chdir(tmp_path)
    count = place.format(tmp_path / "count")
    words = ["--count", count, "--run", "run", "--diagnose", "0", "--quiet"]
    assert main(["train", "counted.py:job", *words]) == 0
    assert (tmp_path / "count").read_text().split() == ["read"] * (1 + count.startswith(".."))


def test_a_source_has_one_job() -> None:
    source = source_of("digits", {"steps": 4})
    assert source.job is source.job
    assert replace(source, options={**source.options, "steps": 5}).job.steps == 5
