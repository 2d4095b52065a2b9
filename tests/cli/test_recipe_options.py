"""Options of a user's recipe: switches in both forms, several values, options that need another, and their names in messages."""

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest

import systolic
from systolic.cli.forms import request, request_for
from systolic.cli.main import VERBS, main
from systolic.core.arguments import Partner
from systolic.core.errors import OptionError, SystolicError
from systolic.core.option_words import as_options, as_parameters
from systolic.core.units import with_article
from systolic.data.command import pack

RECIPE = '''
from enum import Enum
from systolic.job import Job
from systolic.recipes.digits import digits

class Act(Enum):
    relu = "relu"
    tanh = "tanh"

def job(widths: tuple[int, ...] = (8, 4), acts: tuple[Act, ...] = (Act.relu,), pair: tuple[int, str] = (1, "a"),
        scales: tuple[float, ...] | None = None, fast: bool = False, slow: bool = True, steps: int = 2) -> Job:
    """Digits."""
    return digits(steps=steps)
'''


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(RECIPE)
    return f"{tmp_path / 'mine.py'}:job"


def read(recipe: str, *words: str) -> dict[str, Any]:
    options = VERBS["train"].forms[0].options.read
    return dict(request(recipe, words, "train", options).options)


def test_a_switch_has_both_forms_and_the_last_counts(recipe: str) -> None:
    assert read(recipe)["fast"] is False
    assert read(recipe, "--no-fast")["fast"] is False
    assert read(recipe, "--no-fast", "--fast")["fast"] is True
    both = read(recipe, "--fast", "--no-fast", "--no-slow")
    assert (both["fast"], both["slow"]) == (False, False)
    options = VERBS["train"].forms[0].options.read
    kept = request_for(recipe, ["--no-fast"], "train", options, {"fast": True})
    assert kept.options["fast"] is False


def test_the_help_shows_a_switch_that_is_off_once(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", recipe, "--help"])
    shown = capsys.readouterr().out
    assert "--fast " in shown
    assert "--no-fast" not in shown
    assert main(["train", recipe, "--no-continue"]) == 2  # a verb's own have one form


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--widths", "6,3"], "--widths is '6,3'; it takes whole numbers with spaces between: --widths 6 3"),
        (["--widths", "6", "x"], "--widths is '6 x'; it takes whole numbers with spaces between"),
        (["--scales", ".5,1"], "--scales is '.5,1'; it takes numbers with spaces between: --scales .5 1"),
        (["--acts", "relu,tanh"], "--acts is 'relu,tanh'; it takes values with spaces between: --acts relu tanh"),
        (["--acts", "gelu"], "--acts is 'gelu'; it takes relu or tanh"),
        (["--pair", "1"], "--pair takes 2 values with spaces between: --pair INT STR"),
    ],
)  # fmt: skip
def test_several_values_have_spaces_between(recipe: str, words: list[str], line: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(recipe, *words)
    assert str(caught.value).partition("; see ")[0] == line


ALONE: list[tuple[list[str], str, Callable[[], Any]]] = [
    (["train", "digits", "--candidate", "2"], "--candidate is 2, which has no effect without --plan; give --plan, or leave --candidate out", lambda: systolic.train("digits", candidate=2)),
    (["train", "digits", "--rehearse", "v5e-4", "--candidate", "2"], "--candidate is 2, which has no effect without --plan; give --plan, or leave --candidate out", lambda: systolic.rehearse("digits", on="v5e-4", candidate=2)),
    (["launch", "digits", "--on", "v5e-4", "--via", "gke", "--candidate", "2"], "--candidate is 2, which has no effect without --plan; give --plan, or leave --candidate out", lambda: systolic.launch("digits", on="v5e-4", via="gke", candidate=2)),
    (["serve", "x", "--tokens-per-minute", "9"], "--tokens-per-minute is 9, which has no effect without --keys; give --keys, or leave --tokens-per-minute out", lambda: systolic.serve("x", tokens_per_minute=9)),
    (["compare", "a", "b", "--quick"], "--quick has no effect without --on; give --on, or leave --quick out", lambda: systolic.compare_models("a", "b", quick=True)),
    (["quantize", "a", "--out", "b", "--to", "int8", "--quick"], "--quick has no effect without --on; give --on, or leave --quick out", lambda: systolic.quantize_model("a", "b", to="int8", quick=True)),
    (["data", "pack", "a", "--to", "b", "--images", "--field", "t"], "--field is of text, and --images packs pictures; leave --field out", lambda: pack("a", "b", images=True, field="t")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "line", "call"), ALONE, ids=lambda each: "")
def test_what_needs_another_option_is_refused_alone(
    words: list[str],
    line: str,
    call: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err == f"systolic: {line} [option]\n"
    with pytest.raises(OptionError) as caught:
        call()
    assert str(caught.value) == line.replace("--", "").replace("tokens-per", "tokens_per").replace(
        "-minute", "_minute"
    )
    assert list(tmp_path.iterdir()) == []


def test_partners_are_parameters() -> None:
    for name in systolic.__all__:
        function = getattr(systolic, name)
        if not inspect.isfunction(function):
            continue
        parameters = inspect.signature(inspect.unwrap(function)).parameters
        for parameter in parameters.values():
            if typing.get_origin(parameter.annotation) is Annotated:
                for extra in typing.get_args(parameter.annotation)[1:]:
                    assert not isinstance(extra, Partner) or extra.name in parameters, name


def test_every_checkpoint_is_a_name_or_a_number() -> None:
    kinds = {
        name: str(parameters["checkpoint"].annotation)
        for name in systolic.__all__
        if inspect.isfunction(function := getattr(systolic, name))
        and "checkpoint" in (parameters := inspect.signature(function).parameters)
    }
    assert set(kinds) >= {"open", "evaluate", "predict", "generate", "serve", "batch", "export"}
    assert set(kinds.values()) == {"str | int"}


NAMES = {"--top-p", "--temperature", "--init-from", "--workers", "--seed", "--model.layers"}


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("top-p is 1.5; temperature is nan", "--top-p is 1.5; --temperature is nan"),
        ("train a new run with init-from runs/a", "train a new run with --init-from runs/a"),
        ("the seed is drawn, and workers are few; the rest is not", "the seed is drawn, and workers are few; the rest is not"),
        ("'top-p' in a/top-p.json; see systolic tune top-p x", "'top-p' in a/top-p.json; see systolic tune top-p x"),
        ("model.layers is 2 and model.heads 3; model.json and a/model.x stay", "--model.layers is 2 and --model.heads 3; model.json and a/model.x stay"),
        ("--top-p is 2, and --seed is 3", "--top-p is 2, and --seed is 3"),
    ],
)  # fmt: skip
def test_options_have_dashes_on_the_command_line(message: str, typed: str) -> None:
    assert as_options(message, NAMES) == typed


@pytest.mark.parametrize(
    ("message", "called"),
    [
        ("--workers is -1; leave --top-p out", "workers is -1; leave top_p out"),
        ("no slice is given; add --on v5e-4", "no slice is given; add on='v5e-4'"),
        ("continue it: systolic train --on v5e-4 --workers 2; --on is x", "continue it: systolic train --on v5e-4 --workers 2; on is x"),
        ("--xla_flag=1 and --on-top stay", "--xla_flag=1 and --on-top stay"),
    ],
)  # fmt: skip
def test_parameters_have_none_in_python(message: str, called: str) -> None:
    assert as_parameters(message, ("workers", "top_p", "on")) == called


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: systolic.train("digits", workers=-1), "workers is -1; it must be at least 0"),
        (lambda: systolic.evaluate("x", split="dev"), "split is 'dev'; it takes train, validation, test or None"),
        (lambda: systolic.train("digits", log_every=0), "log_every is 0; it must be at least 1"),
    ],
)  # fmt: skip
def test_a_call_is_refused_by_its_parameters(call: Callable[[], Any], line: str) -> None:
    with pytest.raises(SystolicError) as caught:
        call()
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["generate", "x", "hi", "--temperature", "nan"], "--temperature is nan, not a finite number; it must be at least 0 [range]"),
        (["generate", "x", "hi", "--top-p", "1.5"], "--top-p is 1.5; it must be above 0 and at most 1 [range]"),
        (["train", "lm", "--optimizer.learning-rate", "0"], "--optimizer.learning-rate is 0.0; it must be above 0 [range]"),
    ],
)  # fmt: skip
def test_a_line_is_refused_by_its_options(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"systolic: {line}\n"


def test_a_parameter_of_a_record_names_the_record() -> None:
    generate: Any = systolic.generate
    with pytest.raises(
        TypeError,
        match=r"generate\(\) takes no temperature; give sampling=systolic\.Sampling\(temperature=…\)",
    ):
        generate("x", "hi", temperature=0)
    with pytest.raises(TypeError, match=r"generate\(\) takes no tokns; did you mean tokens\?"):
        generate("x", "hi", tokns=3)


def test_a_run_in_the_place_of_another_thing_is_told_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, study = tmp_path / "my run", tmp_path / "a study"
    for folder in (run, study / "trials" / "0000", study / "trials" / "0001"):
        folder.mkdir(parents=True)
        (folder / "job.json").write_text("{}")
    trials = f"{study / 'trials' / '0000'}, {study / 'trials' / '0001'}"
    lines = {
        ("verify", str(run)): f"{run} is a run, and no Bundle; systolic export '{run}' --to bundle writes one [not-found]",
        ("explain", str(study)): f"{study} is no run but holds 2; give one of them: {trials} [not-found]",
    }  # fmt: skip
    for words, line in lines.items():
        assert main(list(words)) == 2
        assert capsys.readouterr().err == f"systolic: {line}\n"


def test_articles_are_those_of_the_noun() -> None:
    nouns = ("ExportedProgram", "Decoder", "Adapter", "UNet")
    assert list(map(with_article, nouns)) == [
        "an ExportedProgram",
        "a Decoder",
        "an Adapter",
        "a UNet",
    ]
