"""``systolic data``: what it prints, and what its mistakes say."""

import io
import json
import sys

import numpy as np
import pytest
from rich.console import Console

from systolic.cli.main import main
from systolic.data.arrays import Arrays
from systolic.data.inspect import inspect, pictures
from systolic.data.sheet import sheet, summary
from systolic.data.text.documents import Documents
from systolic.job.data import Read, Split


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpus.jsonl"
    rows = [{"text": f"document {n} says " + "beat " * (n % 7)} for n in range(40)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def drawn(renderable, **console) -> str:
    out = io.StringIO()
    Console(file=out, width=100, highlight=False, **console).print(renderable)
    return out.getvalue()


def test_pack_then_inspect(corpus, tmp_path, capsys):
    one = tmp_path / "one.txt"
    one.write_text("alone")
    pair = ["data", "pack", str(one), "--to", str(tmp_path / "pair"), "--validation", str(one)]
    assert main(pair) == 0
    assert "train       1 document, 6 places\n" in capsys.readouterr().out
    out = tmp_path / "packed"
    assert main(["data", "pack", str(corpus), "--out", str(out), "--json"]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert packed["kind"] == "text"
    documents = [packed["splits"][split]["documents"] for split in ("train", "validation")]
    assert sum(documents) == 40
    arguments = ["data", "inspect", str(out), "--sequence", "64", "--examples", "8"]
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fields"]["tokens"] == {"shape": [64], "dtype": "int32"}
    assert shown["examples"] == 8
    assert shown["text"]["vocab_size"] == 257
    assert shown["splits"]["test"]["examples"] == 0
    row = shown["text"]["row"]
    assert sum(part["places"] for part in row) == 64
    data = Documents(path=out, sequence=64)
    first = next(data.open(Read(split=Split.train, batch=8, epochs=1)))
    for part in row:
        ids = first["tokens"][0][part["from"] : part["from"] + part["places"]]
        assert part["text"].startswith(bytes(int(t) for t in ids if t < 256).decode())
        assert part["starts"] == (ids[0] == 256)
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "document" in text
    assert row[0]["text"].splitlines()[0].strip() in text


def test_the_figures_of_text_are_those_of_its_rows(corpus):
    data = Documents(path=corpus, sequence=32, validation_share=0)
    record = inspect(data, Split.train, 10_000)
    rows = list(data.open(Read(split=Split.train, batch=1, epochs=1)))
    assert record["examples"] == len(rows)
    padding = np.mean([row["segments"] == 0 for row in rows])
    assert record["text"]["padding_share"] == pytest.approx(padding)
    shares = {one["token"]: one["share"] for one in record["text"]["most_common"]}
    targets = np.concatenate([row["targets"][row["targets"] >= 0] for row in rows])
    assert shares["a"] == pytest.approx(np.mean(targets == ord("a")))
    assert record["splits"]["train"] == {"examples": None, "documents": 40}
    assert "40 documents" in drawn(summary({"target": "x", **record}))


def test_a_row_shows_its_documents_apart_and_no_control_characters(tmp_path):
    for n in range(4):
        (tmp_path / f"{n}.txt").write_text(f"text {n} \x1b[31mred")
    record = {"target": "x", **inspect(Documents(path=tmp_path, sequence=256), Split.train, 4)}
    text = drawn(summary(record))
    assert "\x1b" not in text
    assert text.count("[document at") == 3
    coloured = drawn(summary(record), force_terminal=True, color_system="standard")
    assert "\x1b[36m" in coloured
    assert "\x1b[33m" in coloured


def test_images_show_a_histogram_and_a_contact_sheet():
    image = np.zeros((30, 8, 8, 1), np.uint8)
    image[:, :4] = 255
    label = np.array([0] * 20 + [1] * 10)
    data = Arrays.of(train={"image": image, "label": label}, names=("cat", "dog"))
    record = {"target": "x", **inspect(data, Split.train, 100)}
    assert record["label_counts"] == {"cat": 20, "dog": 10}
    assert "cat" in drawn(summary(record))
    shown = pictures(data, Split.train, 3)
    plain = drawn(sheet(shown, data.labels(), colour=False)).splitlines()
    assert plain[1].startswith("@@@@@@@@ ")
    assert plain[-2].strip() == ""
    colour = drawn(
        sheet(shown, data.labels(), colour=True), force_terminal=True, color_system="truecolor"
    )
    assert "38;2;255;255;255" in colour
    assert pictures(Arrays.of(train={"x": np.zeros(3)}), Split.train, 3) == {}


def test_a_recipe_is_inspected_with_its_options(capsys):
    assert main(["data", "inspect", "bytes", "--sequence", "48", "--examples", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["data"] == "StandardLibrary"
    assert shown["fields"]["tokens"]["shape"] == [48]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pak"], "did you mean pack"),
        (["inspect", "byts"], "did you mean bytes"),
        (["inspect", "corpus.jsonl", "--field", "txt"], "did you mean text"),
        (["inspect", "corpus.jsonl", "--split", "test"], "no test split"),
        (["inspect", "corpus.jsonl", "--examples", "0"], "--examples is 0; it must be at least 1"),
        (["inspect", "corpus.jsonl", "--tokeniser", "x"], "did you mean --tokenizer"),
        (["pack", "corpus.jsonl", "--to", "."], "exists; remove it"),
        (["pack", "none", "--to", "out"], "none does not exist; give a file or folder of text"),
        (["pack", "corpus.json", "--to", "out"], "corpus.json does not exist; did you mean corpus.jsonl?; give"),
        (["pack", "corpus.jsonl", "--field", "body", "--to", "out"], "no text field 'body'; it has text; name it with --field"),
        (["tokenizer", "corpus.jsonl", "--to", "out", "--vocab-size", "300"], "no option --vocab-size; did you mean --vocab?"),
        (["pack", "corpus.jsonl.GZ", "--to", "out"], "decompress it first: gunzip -k corpus.jsonl.GZ"),
        (["inspect", "missing/"], "missing/ is neither data nor a recipe; give a path that exists"),
        (["inspect", "lmm"], "lmm is neither data nor a recipe; did you mean lm?; give a path"),
        (["inspect", "corpus.josnl"], "corpus.josnl is neither data nor a recipe; did you mean corpus.jsonl?; give"),
        (["pack", "x.jsonl", "--to", "out"], "x.jsonl does not exist; give a file or folder of text"),
        (["inspect", "a.xlsx"], "a.xlsx is a spreadsheet; save it as CSV"),
        (["pack", "pictures", "--to", "out"], "add --images"),
        (
            ["pack", "corpus.jsonl", "--to", "out", "--shard-mib", "0"],
            "--shard-mib is 0; it must be at least 1",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments, message, corpus, monkeypatch, capsys):
    monkeypatch.chdir(corpus.parent)
    for name in ("a.xlsx", "corpus.jsonl.GZ"):
        (corpus.parent / name).write_bytes(b"PK")
    (corpus.parent / "pictures" / "cat").mkdir(parents=True)
    (corpus.parent / "pictures" / "cat" / "a.png").write_bytes(b"")
    assert main(["data", *arguments]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (corpus.parent / "out").exists()


def test_pictures_are_packed_and_inspected(tmp_path, capsys, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    for label in ("cat", "dog"):
        (tmp_path / "in" / label).mkdir(parents=True)
        for n in range(12):
            picture = image.new("RGB", (20, 10), (255 * (label == "dog"), 20 * n, 0))
            picture.save(tmp_path / "in" / label / f"{n}.png")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    target = str(tmp_path / "out")
    assert main(["data", "pack", str(tmp_path / "in"), "--to", target, "--images", "--json"]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert packed["labels"] == ["cat", "dog"]
    assert sum(split["examples"] for split in packed["splits"].values()) == 24
    assert main(["data", "inspect", target, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["data"] == "Images"
    assert set(shown["label_counts"]) == {"cat", "dog"}
