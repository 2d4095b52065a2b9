"""Exit codes of every verb: 2 for a wrong command line, 1 for a right one that fails, in one line each."""

from pathlib import Path

import pytest

from systolic.cli.main import VERBS, main

WRONG = """
doctor --nope
chips v9
recipes lmm
data nope
data pack nowhere --to out
data pack text.txt --to text.txt
data tokenizer nowhere --to t.json
forecast nowhere --on v5e-1
forecast lm --on v9-1
forecast --serve nowhere --on cpu
forecast --serve lm --on cpu --prompt-tokens 0
forecast --serve lm --on cpu --concurrency 4 0
plan lm --on v9
plan lm --on v5e-4 --deadline x
plan lm --on v5e-4 --calibration nowhere
forecast lm --on v5e-4 --calibration nowhere
calibrate nowhere --name a
calibrate empty --name a
calibrate text.txt
calibrate text.txt --name a/b
calibrations nowhere
calibrations nowhere/a.json
explain nowhere
explain empty
train nowhere
train --resume nowhere
train lm --path nowhere
train lm --path text.txt --run text.txt
import nowhere
import empty
import text.txt
import foreign
import foreign --dtype f8
eval nowhere
eval empty
generate nowhere x
generate empty x
generate foreign x
generate foreign x --tokens 0
generate foreign --file nowhere
predict nowhere text.txt
predict foreign text.txt
serve
serve nowhere
serve empty
serve foreign --context 1
serve foreign --port 99999
serve foreign --port 0 --host nowhere.invalid
serve foreign --new-key a
serve foreign --traffic nowhere
serve foreign foreign
batch foreign
batch nowhere in.jsonl o.jsonl
batch empty in.jsonl o.jsonl
batch foreign nowhere o.jsonl
batch foreign in.jsonl in.jsonl
batch foreign in.jsonl empty
quantize nowhere --to int8 --out o
quantize foreign --to int7 --out o
export nowhere --to hf --out o
export empty --to hf --out o
export foreign --to nope --out o
compare nowhere foreign
compare empty foreign
verify nowhere
verify empty
verify text.txt
tune nowhere --search steps=1,2
tune digits
tune digits --search stepz=1,2
tune digits --search steps=2..1
tune digits --search steps=1,2 --budget 5
launch nope --on v5e-4 --via local
launch lm --on v5e-4 --via nope
launch lm --on v9-4 --via local
launch lm --plan nowhere --via local
runs nowhere
runs --nope
status nowhere
logs nowhere
logs
stop nowhere
"""
FAILED = """
calibrate text.txt --name a
calibrations foreign/config.json
forecast lm --on v5e-4 --calibration foreign/config.json
forecast nameless --on v5e-1
forecast bundle --on v5e-1
explain run
train --resume run
import nameless
import bundle
import short.gguf
eval run
eval bundle
generate run x
generate nameless x
generate short.gguf x
predict run text.txt
predict bundle text.txt
serve foreign --traffic text.txt
batch foreign text.txt o.jsonl
quantize bundle --to int8 --out o
export run --to hf --out o
export bundle --to hf --out o
compare bundle bundle
verify bundle
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the lines name: a model of an unknown family, one without a family, and damaged files of each kind."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("empty", "foreign", "nameless", "bundle", "run"):
        (folder / name).mkdir()
    (folder / "foreign" / "config.json").write_text('{"model_type": "nothing"}')
    (folder / "nameless" / "config.json").write_text("{}")
    (folder / "bundle" / "bundle.json").write_text("{}")
    (folder / "run" / "job.json").write_text('{"job": 1}')
    (folder / "text.txt").write_text("a text\n")
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "short.gguf").write_bytes(b"GGUF")
    return folder


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def test_a_mistake_has_the_code_of_its_kind(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(desk)
    before = sorted(desk.rglob("*"))
    for line, code in [*((one, 2) for one in lines(WRONG)), *((one, 1) for one in lines(FAILED))]:
        capfd.readouterr()
        assert main(line.split()) == code, line
        out, err = capfd.readouterr()
        said = [one for one in err.splitlines() if one.startswith("systolic: ")]
        assert (out, len(said)) == ("", 1), f"{line}: {err}"
        assert sorted(desk.rglob("*")) == before, line


def test_every_verb_is_asked() -> None:
    assert {one.split()[0] for one in lines(WRONG)} == set(VERBS)
