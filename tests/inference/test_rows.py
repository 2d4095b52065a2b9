"""Recipes of tables: answers for new rows, and a user's mistakes in data and shapes in one line."""

import csv
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax.monitoring
import numpy as np
import pytest

import systolic
from systolic.cli.main import main
from systolic.core.errors import DataError, OptionError
from systolic.data.arrays import Arrays
from systolic.data.input_files import TableInputs
from systolic.job.data import Field
from systolic.job.model import RESERVED_TERMS
from systolic.runs import metrics
from systolic.runs.metrics import TrainRecord
from systolic.serving.facts import COMPILED

RECIPE = '''
from dataclasses import dataclass
import jax.numpy as jnp
import numpy as np
from flax import nnx
from systolic.data.arrays import Arrays
from systolic.job import Batch, Job, Model, Task

class Network(nnx.Module):
    def __init__(self, width, rngs):
        self.body = nnx.Sequential(nnx.Linear(width, 4, rngs=rngs), nnx.relu)
        self.out = nnx.Linear(4, 1, rngs=rngs)
    def __call__(self, x, size):
        return self.out(self.body(x))[:, 0] + size

@dataclass(frozen=True)
class Line(Model):
    width: int = 3
    def build(self, rngs, target):
        return Network(self.width, rngs)

@dataclass(frozen=True)
class Square(Task):
    wrong: bool = False
    of: str = "target"
    term: str = ""
    def terms(self, model, batch, train):
        made = model(batch["x"], batch["size"])
        if self.wrong:
            made = made[:, None] + jnp.ones((3, 2))
        loss = (made - batch[self.of]) ** 2
        if self.term == "no loss":
            return {"losses": loss}
        named = {} if self.term.endswith("in training") and not train else {self.term.split()[0]: loss} if self.term else {}
        return {"loss": loss, **named}

def load():
    x = np.random.default_rng(0).normal(size=(64, 3))
    return {"train": {"x": x, "size": x[:, 0], "target": x @ [1, 2, 3]}}

def job(width: int = 3, wrong: bool = False, kind: str = "call", of: str = "target", term: str = "") -> Job:
    data = {"call": Arrays.call(load), "dict": load(), "function": load, "columns": Arrays.call(load, columns={"x": ("age", "height", "weight")})}[kind]
    return Job(name="table", model=Line(width), task=Square(wrong, of, term), data=data, steps=2, batch=Batch(total=16))
'''  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("recipe") / "table.py"
    made.write_text(RECIPE)
    return made


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    systolic.train(f"{recipe}:job", run=recipe.parent / "run", kind="columns")
    return recipe.parent / "run"


def test_new_rows_are_answered(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    size = np.arange(5, dtype=np.float32)
    params = systolic.open(run).weights.params
    hidden = np.maximum(x @ params["body/layers/0/kernel"] + params["body/layers/0/bias"], 0)
    wanted = (hidden @ params["out/kernel"] + params["out/bias"])[:, 0] + size
    # Columns in any order, beside others: by their declared names; the label is not asked for.
    with (tmp_path / "new.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "weight", "size", "age", "height"])
        rows.writerows([[n, x[n, 2], size[n], x[n, 0], x[n, 1]] for n in range(5)])
    np.savez(tmp_path / "new.npz", x=x, size=size, target=np.zeros(5))
    lines = [{"x": one.tolist(), "size": float(of)} for one, of in zip(x, size, strict=True)]
    (tmp_path / "new.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for name in ("new.csv", "new.npz", "new.jsonl"):
        (answer,) = systolic.open(run).predict(tmp_path / name)
        found = [row["output"] for row in answer["rows"]]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=name)
    out = tmp_path / "answers.csv"
    assert main(["predict", str(run), str(tmp_path / "new.csv"), "--out", str(out)]) == 0
    assert "answers.csv: answers for 5 rows" in capsys.readouterr().out
    with out.open() as file:
        written = [float(row["output"]) for row in csv.DictReader(file)]
    np.testing.assert_allclose(written, wanted, rtol=1e-5)
    assert main(["predict", str(run), str(tmp_path / "new.jsonl")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    (tmp_path / "bad.csv").write_text("weight,size,age\n1,2,3\n")
    assert main(["predict", str(run), str(tmp_path / "bad.csv")]) == 1
    line, _ = capsys.readouterr().err.splitlines()
    assert "has 3 columns (weight, size, age), and the model takes x float32[3]" in line
    assert line.endswith("it lacks height")


def test_an_opened_model_compiles_once_for_a_size(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps({"x": [1, 2, 3], "size": 4}) + "\n"
    files = {rows: tmp_path / f"{rows}.jsonl" for rows in (1, 3)}
    for rows, file in files.items():
        file.write_text(line * rows)
    model, compiled = systolic.open(run), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event == COMPILED else None
    )
    counts, answers = [], []
    for rows in (1, 1, 3):
        before = len(compiled)
        answers.append(model.predict(files[rows]))
        counts.append(len(compiled) - before)
    assert [count > 0 for count in counts] == [True, False, True]
    with ThreadPoolExecutor(2) as threads:
        again = list(threads.map(model.predict, [files[rows] for rows in (1, 1, 3)]))
    assert (again, len(compiled)) == (answers, sum(counts))
    capsys.readouterr()
    assert main(["predict", str(run), *map(str, files.values()), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["predictions"]
    assert [row["rows"] for row in listed] == [answers[0][0]["rows"], answers[2][0]["rows"]]


def test_an_array_that_is_replaced_counts_from_the_next_prediction_on(run: Path) -> None:
    model, arrays = systolic.open(run), {"x": np.ones((1, 3)), "size": np.zeros(1)}
    (before,) = model.predict(arrays)
    model.weights.params["out/bias"] += 100
    (after,) = model.predict(arrays)
    assert after["output"] == pytest.approx(before["output"] + 100)
    zeros = {path: 0 * array for path, array in model.weights.params.items()}
    model.weights = replace(model.weights, params=zeros)
    assert model.predict(arrays) == [{"output": 0.0}]


def test_arrays_are_answered_as_files_are(run: Path, tmp_path: Path) -> None:
    model, rng = systolic.open(run), np.random.default_rng(1)
    arrays = {"x": rng.normal(size=(3, 3)), "size": rng.normal(size=3)}
    np.savez(tmp_path / "new.npz", **arrays)
    (answer,) = model.predict(tmp_path / "new.npz")
    assert model.predict(arrays) == answer["rows"]
    assert model.predict({**arrays, "target": np.zeros(3)}) == answer["rows"]
    wrong = [
        (arrays["x"], "files has the type ndarray; give a path or a list of paths, or arrays by name"),
        ([tmp_path / "new.npz", 3], "files has the type list; give a path"),
        ({"z": arrays["x"]}, "files has the arrays z, and the model takes x float32[examples, 3], size float32[examples]"),
        ({**arrays, "x": np.zeros((3, 2))}, r"x in files is [3, 2], and the model takes"),
        ({**arrays, "x": np.full((3, 3), np.inf)}, "files row 1: x[0] is inf; give a finite float32"),
    ]  # fmt: skip
    for given, line in wrong:
        with pytest.raises(systolic.SystolicError, match=re.escape(line)):
            model.predict(given)  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("new.jsonl", '{"x": [1, 2, 3]}\n{"x": [1, null, 3]}\n', "line 2: x[1] is null; give a finite float32"),
        ("new.jsonl", '{"x": [1, 2, NaN]}\n', "line 1: x[2] is nan; give a finite float32"),
        ("new.jsonl", '{"x": [1e300, 2, 3]}\n', "line 1: x[0] is 1e+300; give a finite float32"),
        ("new.jsonl", '{"x_0": 1, "x_1": null, "x_2": 3}\n', "line 1: x_1 is "),
        ("new.csv", "x_0,x_1,x_2\n1,2,3\n1,-inf,3\n", "line 3: x[1] is -inf; give a finite float32"),
    ],
)  # fmt: skip
def test_numbers_are_finite(tmp_path: Path, name: str, text: str, line: str) -> None:
    (tmp_path / name).write_text(text)
    inputs = TableInputs(fields={"x": Field(shape=(3,), dtype="float32")})
    with pytest.raises(DataError, match=re.escape(line)):
        list(inputs.rows(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x_0,x_1,x_2\n1,2,3\n", None),
        ("x[0],x[1],x[2],other\n1,2,3,4\n", None),
        ("a;b;c\n1;2;3\n", None),
        ("a,b,target,c\n1,2,9,3\n", None),
        ("a,b,c,d\n1,2,3,4\n", r"4 columns \(a, b, c, d\), .* name its columns x_0 to x_2, or give its 3 columns and no others"),
        ("a,b,c\n1,two,3\n", "line 2: b is 'two', which is no number; give a number, encoded as in training"),
        ("a,b,c\n1,,3\n", "line 2: b is empty"),
        ("a,b,c\n1,2\n", "line 2 has 2 columns and the first line names 3"),
    ],
)  # fmt: skip
def test_columns_are_checked(tmp_path: Path, text: str, says: str | None) -> None:
    (tmp_path / "new.csv").write_text(text)
    inputs = TableInputs(fields={"x": Field(shape=(3,), dtype="float32")}, unread=("target",))
    if says is None:
        (row,) = inputs.rows(tmp_path / "new.csv")
        np.testing.assert_array_equal(row["x"], [1, 2, 3])
        return
    with pytest.raises(DataError, match=says):
        list(inputs.rows(tmp_path / "new.csv"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kind", "dict"], "the job's data is a dict; wrap it: systolic.data.arrays.Arrays.of(train=…)"),
        (["--kind", "function"], "the job's data is a function; wrap it: systolic.data.arrays.Arrays.call(load)"),
        (["--width", "5"], "the model Line fails in body.layers.0 (Linear) at table.py line 14: input inputs float32[16, 3] and weights bias float32[4], kernel float32[5, 4] do not fit"),
        (["--of", "targets"], "there is no array 'targets' in a batch at table.py line 31; did you mean target?; the data has size, target, x"),
        (["--wrong"], "the task Square fails at table.py line 30 with shapes that do not fit (made float32[16]"),
    ],
)  # fmt: skip
def test_a_mistake_ends_in_a_line(
    recipe: Path, tmp_path: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["train", f"{recipe}:job", "--run", str(tmp_path / "run"), *options]
    assert main(given) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert says in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("term", "says"),
    [
        *((name, f"the task Square has a term '{name}', which records of training steps use for a figure of their own; give it another name, such as 'task_{name}'") for name in ("mfu", "step", "kind", "bad", "grad_norm", "name")),
        ("time in training", "the task Square has a term 'time', which records"),
        ("no loss", "the task Square has no term 'loss' to minimise; did you mean losses?; it has losses"),
    ],
)  # fmt: skip
def test_names_of_records_are_no_terms(
    recipe: Path, tmp_path: Path, term: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the place of a TypeError at the first record, or of a figure that the term hides."""
    words = ["--run", str(tmp_path / "run"), "--term", term]
    assert main(["train", f"{recipe}:job", *words]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert says in shown.splitlines()[-1]
    assert (tmp_path / "run").exists() == term.endswith("in training"), "the step is traced last"


def test_every_field_of_a_record_is_reserved() -> None:
    fields = {*TrainRecord.__struct_fields__, *metrics._TEXT, "kind", "bad"}
    assert fields - {"loss"} == RESERVED_TERMS


def test_arrays_of_other_forms_are_named() -> None:
    x = np.zeros((4, 2))
    with pytest.raises(DataError, match=r"the train split is a ndarray \[4, 2\]; give \{name: arr"):
        Arrays.of(train=x)  # ty: ignore[invalid-argument-type]
    with pytest.raises(DataError, match=r"returned a tuple; return \{split: \{name: array\}\}"):
        Arrays.call(lambda: (x, x)).fields()  # ty: ignore[invalid-argument-type]
    with pytest.raises(OptionError, match="answers to rows"):
        main_out()


def main_out() -> None:
    from systolic.inference.results import check_out

    check_out(["a.csv"], Path("answers.parquet"))
