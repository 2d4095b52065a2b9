"""``systolic forecast``: targets, options, exit codes, files, and answers from the store."""

import gzip
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from systolic.chips import slice
from systolic.chips.flags import resolved
from systolic.cli.forms import request
from systolic.cli.main import VERBS, main
from systolic.compiling import Compiled, Compiler, JobProgram
from systolic.compiling.compile import _Asked, _request_name, version
from systolic.compiling.traced import ProgramFacts
from systolic.core.files import Store
from systolic.forecasting.display import view
from systolic.forecasting.run import save_executable
from tests.forecasting.display import recorded

WORDS = ["--model.layers=2", "--sequence=1024"]


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.txt"
    path.write_bytes(gzip.decompress((recorded.FOLDER / "lm-scoped-v5e-4.hlo.gz").read_bytes()))
    return path


def test_a_dump_on_one_screen(capsys, dump: Path) -> None:
    assert main(["forecast", str(dump), "--on", "v5e-4"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("dump.txt on v5e-4   fits ")
    assert len(shown) <= 24


def test_a_dump_as_json_with_all_files(capsys, dump: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("a.html", "a.json.gz", "profile")}
    page, trace, profile = map(str, files.values())
    options = ["--html", page, "--perfetto", trace, "--xprof", profile, "--json"]
    assert main(["forecast", str(dump), "--on=v5e-4", *options]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    made = json.loads(line)
    assert made["fits"]
    assert made["origin"] == "simulated"
    assert made["step_seconds_low"] < made["step_seconds"] < made["step_seconds_high"]
    assert set(made["written"]) == {"report", "perfetto", "xprof"}
    assert Path(page).read_text().startswith("<!doctype html>")
    assert json.loads(gzip.decompress(Path(trace).read_bytes()))["traceEvents"]
    assert list(Path(profile).rglob("*.xplane.pb"))


def test_against_itself_nothing_changed(capsys, dump: Path, tmp_path: Path) -> None:
    main(["forecast", str(dump), "--on", "v5e-4", "--json"])
    before = tmp_path / "before.json"
    before.write_text(capsys.readouterr().out)
    assert main(["forecast", str(dump), "--on", "v5e-4", "--against", str(before)]) == 0
    shown = capsys.readouterr().out
    assert "from dump.txt on v5e-4 to dump.txt on v5e-4" in shown
    assert "same" in shown
    assert "%" not in shown.partition("from dump.txt")[2]


FOLDER = Path(__file__).parents[1] / "cli"
TINY, JOB = str(FOLDER / "tiny.py"), str(FOLDER.parent / "golden" / "job" / "lm.json")
MISTAKES = [
    (["lm"], "systolic forecast lm needs a slice; add --on v5e-16"),
    (["lm", "--on", "v5e-17"], "did you mean v5e-16?"),
    (["lm", "--on", "h400"], "did you mean h100"),
    (["lm", "--on", "v5e-4", "--setp", "eval"], "did you mean --step"),
    (["lm", "--on", "v5e-4", "--step", "evil"], "see systolic forecast lm --help"),
    (["lmm", "--on", "v5e-4"], "there is no recipe or model 'lmm'; did you mean lm?"),
    (["nothere.json", "--on", "v5e-4"], "there is no file nothere.json; check the path"),
    (["nothere.hlo", "--on", "v5e-4"], "there is no file nothere.hlo; check the path"),
    (["nothere.json", "--against", "b.json"], "there is no file nothere.json; check the path"),
    (["Qwen/Qwen9.5-0.5B", "--on", "v5e-4"], "there is no recipe or model 'Qwen/Qwen9.5-0.5B'"),
    (["--on", "v5e-4"], "systolic forecast needs a recipe"),
    (["lm", "--on", "v5e-4", "--quick", "--save", "x"], "leave one of them out"),
    (
        ["lm", "--on", "v5e-4", "--against", "nowhere.json"],
        "nowhere.json cannot be read (No such file or directory); write one with",
    ),
    (["lm", "--on", "v5e-4", "--against", TINY], "is not JSON (Extra data"),
    (["lm", "--on", "v5e-4", "--against", JOB], "is JSON but not a forecast; write one"),
    (["lm", "--on", "v5e-4", "--html", str(FOLDER)], "is a directory; name a file in it"),
    (["lm", "--on", "v5e-4", "--html", f"{TINY}/below"], "is a file, so"),
]


@pytest.mark.parametrize(("args", "said"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_a_mistake_is_one_line(capsys, args: list[str], said: str) -> None:
    assert main(["forecast", *args]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert said in line
    assert captured.out == ""


def test_a_dump_takes_no_options_of_a_compiler(capsys, dump: Path) -> None:
    assert main(["forecast", str(dump), "--on", "v5e-4", "--quick"]) == 2
    assert "has no option --quick" in capsys.readouterr().err


def test_a_dump_for_another_number_of_devices(capsys, dump: Path) -> None:
    assert main(["forecast", str(dump), "--on", "v5e-8"]) == 1
    assert "runs on 4 devices but v5e-8 has 8" in capsys.readouterr().err


def test_what_does_not_fit_ends_with_one(capsys) -> None:
    assert view.show(recorded.refused()) == 1
    assert "does not fit" in capsys.readouterr().out
    assert view.show(recorded.refused(), json=True) == 1
    assert json.loads(capsys.readouterr().out)["rejected"]["need_bytes"] > 20 << 30


def test_the_executable_is_copied_with_what_made_it(tmp_path: Path) -> None:
    (tmp_path / "executable.jax").write_bytes(b"code")
    report = json.loads((recorded.FOLDER / "lm-scoped-v5e-4.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(report))
    mine = msgspec.convert({**report["program"], "name": "mine"}, ProgramFacts)
    answer = Compiled(tmp_path, "recorded", True, mine)
    save_executable(replace(recorded.fitting(), answer=answer), tmp_path / "there" / "step.bin")
    assert (tmp_path / "there" / "step.bin").read_bytes() == b"code"
    beside = json.loads((tmp_path / "there" / "step.bin.json").read_text())
    assert report.pop("digest")
    assert beside == {**report, "program": {**report["program"], "name": "mine"}}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that holds the recorded answer for the recipe with :data:`WORDS`."""
    if version("libtpu") is None:
        pytest.skip("libtpu is not installed")
    asked = request(
        "lm", ["--on", "v5e-4", *WORDS], "forecast", VERBS["forecast"].forms[0].options.read
    )
    flags = resolved("", slice("v5e-4").chip)
    program, compiler = JobProgram(job=asked.job), Compiler(root=tmp_path, flags=flags)
    # As the command asks: in a process that has no JAX, and so no settings of it.
    name = _request_name(_Asked(program, slice("v5e-4"), compiler, settings={}))
    assert name is not None
    report = recorded.FOLDER / "lm-scoped-v5e-4.json"
    with Store("programs", tmp_path).scratch() as entry:
        shutil.copyfile(recorded.FOLDER / "lm-scoped-v5e-4.hlo.gz", entry / "module.hlo.gz")
        shutil.copyfile(report, entry / "report.json")
        Store("programs", tmp_path).put("recorded", entry)
    known = Store("requests", tmp_path).path(name).with_suffix(".json")
    known.parent.mkdir(parents=True)
    facts = json.loads(report.read_text())["program"]
    known.write_text(json.dumps({"program": "recorded", "facts": facts}))
    return tmp_path


PROCESS = """
import subprocess, sys
from systolic.cli.main import main
from systolic.cli.forms import request

def never(*_, **__):
    raise AssertionError("the store has the answer: nothing is compiled")

subprocess.Popen = never
code = main(["forecast", "lm", "--on", "v5e-4", "--json", *sys.argv[1:]])
heavy = {"jax", "flax", "orbax", "grain", "sklearn"} & set(sys.modules)
print(sorted(heavy), file=sys.stderr)
sys.exit(code)
"""


PYTHON = """
import dataclasses, json, sys
import systolic
from systolic.models.decoder.config import Decoder
from systolic.recipes.lm import lm

job = lm(model=Decoder(layers=2), sequence=1024)
made = systolic.forecast(job, on="v5e-4", step="train")
print(json.dumps(made.to_json()))
try:
    systolic.forecast(job, on="v5e-4", step="evil")
except systolic.SystolicError as error:
    print(error)
"""


def test_from_the_store_without_jax_and_as_python_forecasts_the_job(
    store: Path, monkeypatch
) -> None:
    monkeypatch.setenv("SYSTOLIC_CACHE", str(store))
    command = [sys.executable, "-c", PYTHON]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    line, mistake = done.stdout.splitlines()
    assert mistake == "step is 'evil'; did you mean eval?; it takes train, eval, prefill, decode"
    made = json.loads(line)
    assert made["compiler"]["cached"]
    # In a process of its own: one that has JAX asks the store for other settings.
    command = [sys.executable, "-c", PROCESS, *WORDS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    told = json.loads(done.stdout)
    assert told["compiler"]["cached"]
    assert told["recipe"] == "lm"
    for name in ("step_seconds", "hbm", "mfu", "bound_by", "layout", "usd_per_hour"):
        assert made[name] == told[name]
