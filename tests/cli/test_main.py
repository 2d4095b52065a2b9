"""The command line's spine: a mistake is one line on stderr and a code, ``--json`` one object."""

import json
from pathlib import Path

import pytest

from systolic import recipes
from systolic.cli.forms import _chosen
from systolic.cli.main import VERBS, guarded, main
from systolic.inference.view import values_line

CASES = [
    (["trian"], 2, "there is no verb 'trian'; did you mean train?; systolic --help lists them"),
    (["train"], 0, None),
    (["train", "--steps", "3"], 2, "systolic train needs a recipe"),
    (["train", "bites"], 2, "there is no recipe or model 'bites'; did you mean bytes?"),
    (["train", "bytes", "--step", "3"], 2, "has no option --step; did you mean --steps?"),
    (["train", "bytes", "--model.layer=3"], 2, "did you mean --model.layers?"),
    (["train", "bytes", "--steps", "many"], 2, "see systolic train bytes --help"),
    (["train", "bytes", "--steps", "0"], 2, "steps is 0; it must be at least 1"),
    (["train", "bytes", "extra"], 2, "systolic train bytes has no argument extra"),
    (
        ["train", "lm", "--layout.remat-names", "query", "key", "--run", "x", "value"],
        2,
        "systolic train lm has no argument value",
    ),
    (
        ["train", "lm", "--layout.remat-names", "query", "--json", "attention"],
        2,
        "systolic train lm has no argument attention",
    ),
    (["train", "bytes", "--on", "v5e-4"], 2, "has no option --on; did you mean --rehearse SLICE?"),
    (["train", "bytes", "--tokens", "9"], 2, "has no option --tokens; see systolic train bytes -"),
    (["recipes", "--on", "v5e-4"], 2, "systolic recipes has no option --on; see systolic rec"),
    (["train", "lm", "--data", "missing"], 2, "has no option --data; did you mean --path PATH?"),
    (
        ["train", "digits", "--data", "missing"],
        2,
        "digits has no option --data; see systolic train",
    ),
    (["train", "bytes", "--layers", "3"], 2, "did you mean --model.layers?"),
    (["train", "nowhere.py:job"], 2, "nowhere.py is not a file"),
    (["train", "bytes", "--resume", "runs/x"], 2, "--resume takes a run and no recipe"),
    (["train", "image"], 2, "systolic: image is given no pictures, which only a forecast does"),
    (["train", "sft"], 2, "systolic: systolic train sft needs --from PATH; see systolic train"),
    (
        ["data", "pack"],
        2,
        "systolic: systolic data pack needs PATH and --to PATH; see systolic data",
    ),
    (
        ["train", "lm", "--batch-per-device", "nan"],
        2,
        "systolic: --batch-per-device is nan, not a finite number; it must",
    ),
    (["train", "lm", "--batch-per-device=-1"], 2, "systolic: --batch-per-device is -1.0; it must"),
    (["train", "lm", "--batch", "0"], 2, "systolic: --batch is 0; it must be at least 1"),
    (["train", "lm", "--layout.tensor=-2"], 2, "layout.tensor is -2"),
    (["recipes", "lmm"], 2, "there is no recipe or model 'lmm'; did you mean lm?"),
    (["recipes", "--jsn"], 2, "systolic recipes has no option --jsn; did you mean --json?"),
    (["chips", "v5e-17"], 2, "did you mean v5e-16?"),
    (["doctor", "--no-mesure"], 2, "did you mean --no-measure?"),
]


@pytest.mark.parametrize(("args", "code", "said"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_a_mistake_is_one_line(capsys, args: list[str], code: int, said: str | None) -> None:
    assert main(args) == code
    captured = capsys.readouterr()
    if said is None:
        assert captured.err == ""
        return
    (line,) = captured.err.splitlines()
    assert line.startswith("systolic: ")
    assert said in line
    assert captured.out == ""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nonesuch\n", ":1 failed to import: ModuleNotFoundError: No module named 'non"),
        ("def job(:\n", "failed to import: SyntaxError"),
        ("x = 1\n\ny = 1 / 0\n", ":3 failed to import: ZeroDivisionError: division by zero"),
        ("def jab():\n    pass\n", "has no function job; did you mean jab?"),
        ("def job():\n    return 3\n", "returned int, not a Job"),
    ],
)
def test_a_bad_recipe_file(capsys, tmp_path: Path, source: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    assert main(["recipes", f"{file}:job"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


LISTS = """from systolic.core.errors import OptionError

def job(names: tuple[str, ...] = (), pair: tuple[int, int] = (1, 2), my_steps: int = 1):
    raise OptionError(f"{names} {pair} {my_steps}")
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--names b --json False", "has no argument False"),
        ("--names a --run x a b", "has no argument a"),
        ("--names a --run a a", "has no argument a"),
        ("--pair 3 --json 4", "has no argument 4"),
        ("--my_steps --json 5", "has no argument 5"),
        ("--json b --names a", "has no argument b"),
        ("--names a --json=b", "has no argument b"),
        ("--names a -- b", "has no argument b"),
        ("b --names a", "has no argument b"),
        ("--names a --json --pair 3 -4", "('a',) (3, -4) 1"),
        ("--run a --names a b --workers 0 --my_steps=5 --json", "('a', 'b') (1, 2) 5"),
        ("--names --json --names a b", "('a', 'b') (1, 2) 1"),
        ("--json --names", "() (1, 2) 1"),
    ],
)
def test_a_word_after_an_option_of_the_verb_is_no_value_of_the_recipe(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LISTS)
    assert main(["train", "mine.py:job", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_an_option_that_the_verb_needs_itself(capsys, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def job(workers: int = 1):\n    return None\n")
    assert main(["train", f"{file}:job"]) == 2
    assert "has an option workers that systolic train needs" in capsys.readouterr().err


def test_usage_names_every_verb(capsys) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in VERBS)


def test_recipes_as_json(capsys) -> None:
    assert main(["recipes", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    listed = json.loads(line)["recipes"]
    assert [each["name"] for each in listed] == recipes.shipped()
    assert all(each["summary"].endswith(".") for each in listed)


@pytest.mark.parametrize("name", recipes.shipped())
def test_one_recipe_as_json(capsys, name: str) -> None:
    assert main(["recipes", name, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["name"] == name
    assert (record["job"] is None) == bool(record["required"])
    assert set(record["options"]) >= {"steps", "seed", "layout"}


def test_options_change_the_resolved_job(capsys) -> None:
    assert main(["recipes", "bytes", "--json", "--steps", "7", "--layout.remat", "full"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["options"]["steps"] == record["job"]["steps"] == 7
    assert record["job"]["layout"]["remat"] == "full"


def test_one_recipe_for_people(capsys) -> None:
    assert main(["recipes", "digits", "--steps", "7"]) == 0
    text = capsys.readouterr().out
    assert "--schedule.warmup INT" in text
    assert '"steps": 7' in text


def test_a_required_option_is_named(capsys) -> None:
    assert main(["recipes", "sft"]) == 0
    assert "The job depends on --from" in capsys.readouterr().out


def test_an_interrupt_is_no_traceback(capsys) -> None:
    def work() -> int:
        raise KeyboardInterrupt

    assert guarded(work) == 130
    assert capsys.readouterr().err == "systolic: interrupted\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--budget", "lots"], "--budget is 'lots'; it takes a number"),
        (["--programs", "few"], "--programs is 'few'; it takes a whole number"),
        (["--programs=2.5"], "--programs is '2.5'; it takes a whole number"),
        (["--goal", "speed"], "--goal is 'speed'; it takes cost, energy, fit, pareto or time"),
        (["--schedule.kind", "up"], "it takes constant, cosine, linear or wsd"),
        (["--optimizer.learning-rate", "fast"], "it takes a number"),
    ],
)
def test_a_value_that_does_not_parse_is_told_in_our_words(capsys, words, told: str) -> None:
    assert main(["plan", "lm", "--on", "v5e-4", *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_an_output_that_another_name_has_is_printed_once() -> None:
    answer = {"output": [1.0, 2.0], "label": "a", "scores": [1.0, 2.0], "one": 1.0, "two": 1.0}
    shown = "output [1.0, 2.0]  label a  scores as output  one 1.0000  two 1.0000"
    assert values_line(answer) == shown


@pytest.mark.parametrize(
    ("verb", "words", "function"),
    [
        ("train", ["lm"], "train"),
        ("train", ["--resume=run"], "resume"),
        ("train", ["lm", "--rehearse", "v5e-4"], "rehearse"),
        ("train", ["lm", "--resume", "run"], "train"),
        ("forecast", ["lm", "--serve"], "forecast_server"),
        ("forecast", ["--on", "v5e-4", "--", "python", "x.py"], "forecast_command"),
        ("forecast", ["step.hlo"], "forecast_dump"),
        ("forecast", ["--on", "v5e-4"], "forecast"),
        ("explain", ["lm"], "explain_step"),
        ("explain", ["run"], "explain_run"),
        ("explain", ["run", "--", "python", "x.py"], "explain_program"),
        ("explain", ["step.hlo"], "explain_dump"),
        ("data", ["inspect", "folder"], "inspect"),
        ("data", ["inspect", "lm"], "inspect_recipe"),
        ("data", ["inspect", "--help"], "inspect"),
        ("plan", ["serve", "model"], "plan_serving"),
        ("recipes", ["lm"], "describe_recipe"),
        ("recipes", ["--json"], "list_recipes"),
    ],
)
def test_words_choose_a_form(
    verb: str, words: list[str], function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("step.hlo").write_text("HloModule step, is_scheduled=true\n")
    Path("run").mkdir()
    Path("run/job.json").write_text("{}")
    Path("folder").mkdir()
    assert _chosen(VERBS[verb].forms, words).function.endswith(f":{function}")
