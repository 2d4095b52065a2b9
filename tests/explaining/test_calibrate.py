"""``systolic calibrate`` on recorded profiles of chips, and what forecast and plan do with it."""

import json
import lzma
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import systolic
from systolic.cli.main import main
from systolic.core.errors import OptionError
from systolic.forecasting.calibrations import CalibrationRecord, save
from systolic.runs.run import ENVIRONMENT, JOB
from systolic.sim.calibration import Calibration, CostKind, Factor
from tests.profile.real import BF16, EXCERPTS, HOST_OFFLOAD, KERNEL, whole
from tests.recorded import hlo as recorded

CPU = Path(__file__).parents[1] / "recorded" / "profile"
V6E = str(EXCERPTS / HOST_OFFLOAD)
TPU7X = str(EXCERPTS / BF16)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "systolic" / "calibrations"


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.txt"
    path.write_text(recorded.text("upgrade_old-v6e-4"))
    return path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that refuses."""
    assert main([*words]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def _words(text: str) -> str:
    """Text without the breaks of its lines, which depend on the length of a path."""
    return " ".join(text.split())


def test_a_profile_becomes_a_calibration_that_a_forecast_takes(
    capsys: pytest.CaptureFixture[str], own_folder: Path, dump: Path
) -> None:
    assert main(["calibrate", V6E, "--name", "my-v6e"]) == 0
    shown = _words(capsys.readouterr().out)
    assert "my-v6e: v6e, " in shown
    assert "host copies, too few for a range" in shown
    assert "B/s" in shown
    assert f"wrote {own_folder / 'my-v6e.json'}" in shown
    assert main(["calibrations"]) == 0
    assert capsys.readouterr().out.startswith("my-v6e  v6e  ")
    assert main(["calibrations", "my-v6e"]) == 0
    assert _words(capsys.readouterr().out) in shown
    assert main(["calibrations", "my-v6e", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    factor = made["kinds"]["all-reduce"]["factor"]
    assert factor == pytest.approx(0.836, abs=0.01)

    def forecast(*words: str) -> dict[str, float]:
        assert main(["forecast", str(dump), "--on", "v6e-4", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    plain, corrected = forecast(), forecast("--calibration", "my-v6e")
    assert plain["calibration"] is None
    assert corrected["calibration"]["name"] == "my-v6e"
    reduced = corrected["calibration"]["corrected_seconds"]["all-reduce"]
    # All-reduces take less, so that more of them are hidden.
    assert plain["step_seconds"] - corrected["step_seconds"] >= reduced * (1 / factor - 1) * 0.99
    assert corrected["step_seconds_low"] < corrected["step_seconds"]
    assert corrected["notes"][0].startswith(f"{reduced / corrected['step_seconds']:.0%} of the")
    by_path = forecast("--calibration", str(own_folder / "my-v6e.json"))
    assert by_path["step_seconds"] == corrected["step_seconds"]


def test_a_calibration_is_replaced_and_says_so(
    capsys: pytest.CaptureFixture[str], own_folder: Path
) -> None:
    words = ["calibrate", TPU7X, "--chip", "tpu7x", "--name", "mine", "--json"]
    for replaced in (False, True):
        assert main(words) == 0
        made = json.loads(capsys.readouterr().out)
        assert made["replaced"] is replaced
        assert made["chip"] == "tpu7x"
        assert made["file"] == str(own_folder / "mine.json")
    assert made["sources"][0]["file"] == str(Path(TPU7X).absolute())
    assert made["kinds"]["matmul"]["shapes"] >= 3


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([V6E], "systolic calibrate needs a name; add --name my-v5e"),
        ([V6E, "--name", "a/b"], "--name is 'a/b'"),
        (["nowhere.pb", "--name", "a"], "nowhere.pb"),
        ([TPU7X, "--name", "a"], "does not name its chip (it says nothing)"),
        ([V6E, "--name", "a", "--chip", "v5e"], "the profile is of TPU v6 Lite"),
        ([V6E, "--name", "a", "--on", "v5e-8"], "the profile is of TPU v6 Lite"),
        ([V6E, "--name", "a", "--against", "no.txt"], "no.txt is no file; give the scheduled HLO"),
    ],
)
def test_what_gives_no_calibration_is_one_line(
    capsys: pytest.CaptureFixture[str], own_folder: Path, words: list[str], line: str
) -> None:
    assert line in said(capsys, "calibrate", *words)
    assert not own_folder.exists()


def test_a_profile_of_a_cpu_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, own_folder: Path
) -> None:
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(lzma.decompress((CPU / "digits.xplane.pb.xz").read_bytes()))
    line = said(capsys, "calibrate", str(path), "--name", "a", "--chip", "v5e")
    assert line.endswith("is of a CPU, and only TPUs are simulated; give a TPU's profile [option]")
    assert not own_folder.exists()


def test_the_compilers_version_is_that_of_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "profile").mkdir(parents=True)
    shutil.copy(V6E, run / "profile" / "host.xplane.pb")
    (run / JOB).write_text("{}")
    (run / ENVIRONMENT).write_text(json.dumps({"packages": {"libtpu": "0.0.42.1"}}))
    assert main(["calibrate", str(run / "profile"), "--name", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compiler"] == "libtpu 0.0.42.1"


def test_a_dump_of_another_program_is_refused(
    capsys: pytest.CaptureFixture[str], dump: Path
) -> None:
    words = ["calibrate", V6E, "--name", "a", "--against", str(dump)]
    assert "and the profiles ran jit_f, " in said(capsys, *words)


def test_another_build_of_the_program_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = whole("v6e-1-pallas-matmul.hlo.txt").read_text()
    other = tmp_path / "other.txt"
    other.write_text(text.replace("f32[2048,2048]", "f32[2048,1024]"))
    words = ["calibrate", str(whole(KERNEL)), "--name", "a", "--against", str(other)]
    line = said(capsys, *words)
    assert f"{other} is another build of jit_" in line
    assert "have no such result in it" in line


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([V6E, "--on", "v6e-256"], "v6e-256 has 256 devices, and the collectives of "),
        ([V6E, V6E], "is given twice"),
    ],
)
def test_a_wrong_slice_and_a_profile_twice_are_refused(
    capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    assert says in said(capsys, "calibrate", *given, "--name", "a")


def test_profiles_of_two_generations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, "calibrate", V6E, TPU7X, "--name", "a")
    assert "does not name its chip" in line
    for more in (["--chip", "tpu7x"], ["--on", "tpu7x-8"]):
        line = said(capsys, "calibrate", V6E, TPU7X, "--name", "a", *more)
        assert f"{V6E} is of v6e and {TPU7X} of tpu7x; make a calibration of each" in line
    line = said(capsys, "calibrate", V6E, "--name", "a", "--chip", "tpu7x")
    assert "--chip is tpu7x, and the profile is of TPU v6" in line


def test_another_chip_and_an_unknown_name_are_refused(
    capsys: pytest.CaptureFixture[str], dump: Path
) -> None:
    assert "none yet in" in said(
        capsys, "forecast", str(dump), "--on", "v6e-4", "--calibration", "x"
    )
    assert main(["calibrate", V6E, "--name", "my-v6e"]) == 0
    capsys.readouterr()
    for words in (
        ["forecast", str(dump), "--on", "v5e-4"],
        ["forecast", str(dump), "--on", "v6e-4,v5e-4"],
        ["forecast", "lm", "--on", "v5e-4"],
        ["forecast", "lm", "--on", "v6e-4,v5e-4"],
        ["forecast", "lm", "--on", "cpu"],
        ["plan", "lm", "--on", "v5e-4"],
        ["plan", "lm", "--on", "v6e-4,v5e-4"],
    ):
        line = said(capsys, *words, "--calibration", "my-v6e")
        assert "the calibration my-v6e is of v6e and " in line
    captured = ["--on", "v5e-4", "--calibration", "my-v6e", "--", "python", "nowhere.py"]
    assert "is of v6e and v5e-4 is v5e" in said(capsys, "forecast", *captured)
    line = said(capsys, "forecast", "lm", "--on", "v6e-4", "--calibration", "my-v6")
    assert "there is no calibration my-v6; did you mean my-v6e?" in line
    assert "did you mean my-v6e?" in said(capsys, "calibrations", "my-v6")


def test_a_damaged_one_is_listed_as_such(
    capsys: pytest.CaptureFixture[str], own_folder: Path
) -> None:
    assert main(["calibrations"]) == 0
    assert "make one: systolic calibrate PROFILE --name" in capsys.readouterr().out
    assert main(["calibrate", V6E, "--name", "whole"]) == 0
    (own_folder / "half.json").write_text('{"format": "systolic cal')
    capsys.readouterr()
    assert main(["calibrations", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [one["name"] for one in json.loads(out)["calibrations"]] == ["whole"]
    assert "half.json is not JSON" in err


# Where prices go through the simulator


def planted(folder: Path, chip: str, **factors: float) -> str:
    """A calibration with these factors, as a file of the user's."""
    by = {
        CostKind[name]: Factor(value=value, low=value, high=value, ops=9, works=9, seconds=1.0)
        for name, value in factors.items()
    }
    of = Calibration(name="planted", chip=chip, factors=by, made="2026-11-27", num_profiles=1)
    save(CalibrationRecord(calibration=of, sources=()))
    return "planted"


def test_a_dump_is_explained_at_the_corrected_times(
    capsys: pytest.CaptureFixture[str], own_folder: Path, dump: Path
) -> None:
    name = planted(own_folder, "v6e", matmul=1.5)

    def made(verb: str, *words: str) -> dict[str, Any]:
        assert main([verb, str(dump), "--on", "v6e-4", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    plain, corrected = made("explain"), made("explain", "--calibration", name)
    assert plain["calibration"] is None
    assert corrected["calibration"] == "planted"
    assert corrected["step_seconds"] > 1.05 * plain["step_seconds"]
    forecast = made("forecast", "--calibration", name)
    assert corrected["step_seconds"] == forecast["step_seconds"]
    assert main(["explain", str(dump), "--on", "v6e-4", "--calibration", name]) == 0
    assert "is corrected by the calibration planted" in " ".join(capsys.readouterr().out.split())


def test_other_verbs_refuse_another_chip_before_anything_is_compiled(
    capsys: pytest.CaptureFixture[str], own_folder: Path, dump: Path
) -> None:
    name = planted(own_folder, "v6e", matmul=1.5)
    program = ["--", "python", "nowhere.py"]
    for words in (
        ["explain", "lm", "--on", "v5e-4"],
        ["explain", str(dump), "--on", "v5e-4"],
        ["explain", "--on", "v5e-4", *program],
        ["plan", "--on", "v6e-4,v5e-4", *program],
        ["forecast", "--serve", "llama-3.1-8b", "--on", "v5e-4"],
        ["forecast", "--serve", "llama-3.1-8b", "--on", "cpu"],
    ):
        at = words.index("--") if "--" in words else len(words)
        line = said(capsys, *words[:at], "--calibration", name, *words[at:])
        assert "the calibration planted is of v6e and " in line, words


def test_a_saved_forecast_and_a_profile_take_none_in_python() -> None:
    with pytest.raises(OptionError, match="a run and a profile are measured"):
        systolic.explain(V6E, calibration="planted")


@pytest.mark.slow
def test_slices_of_a_program_rank_by_the_corrected_times(
    capsys: pytest.CaptureFixture[str], own_folder: Path, tmp_path: Path
) -> None:
    """A program of two matmuls: 1.5 times as long where it is nothing else."""
    name = planted(own_folder, "v6e", matmul=1.5)
    program = tmp_path / "train.py"
    program.write_text(MATMULS)
    seconds = []
    for words in ([], ["--calibration", name]):
        command = ["plan", "--on", "v6e-1", "--json", *words, "--", sys.executable, str(program)]
        assert main(command) == 0
        made = json.loads(capsys.readouterr().out)
        seconds.append(made["candidates"][0]["step_seconds"])
    assert any("corrected by the calibration planted" in note for note in made["notes"])
    assert 1.3 < seconds[1] / seconds[0] < 1.51


MATMULS = """import jax, jax.numpy as jnp

@jax.jit
def step(w, x):
    return w - 1e-3 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) @ w.T).astype(jnp.float32))(w)

w = jnp.ones((4096, 4096), jnp.bfloat16)
x = jnp.ones((8192, 4096), jnp.bfloat16)
for _ in range(10):
    w = step(w, x)
"""


@pytest.mark.slow
def test_a_recipe_is_explained_and_a_server_forecast_at_the_corrected_times(
    capsys: pytest.CaptureFixture[str], own_folder: Path
) -> None:
    name = planted(own_folder, "v6e", matmul=1.5)
    tiny = ["--model.layers", "2", "--model.d-model", "256", "--model.vocab", "2048"]
    step = ["explain", "lm", *tiny, "--on", "v6e-1", "--remedies", "0", "--json"]
    server = ["forecast", "--serve", "lm", *tiny, "--on", "v6e-1", "--quick", "--concurrency", "4"]
    times, points = [], []
    for words in ([], ["--calibration", name]):
        assert main([*step, *words]) == 0
        times.append(json.loads(capsys.readouterr().out))
        assert main([*server, "--json", *words]) == 0
        points.append(json.loads(capsys.readouterr().out))
    assert times[1]["step_seconds"] > 1.05 * times[0]["step_seconds"]
    assert (times[0]["calibration"], times[1]["calibration"]) == (None, "planted")
    assert (points[0]["calibration"], points[1]["calibration"]["name"]) == (None, "planted")
    told = [note for note in points[1]["notes"] if "calibration planted" in note]
    assert len(told) == 1
    assert told[0].endswith("; the floors are not")
    slower, faster = (made["steps"][-1]["seconds"] for made in reversed(points))
    assert slower > faster
    assert points[1]["steps"][-1]["floor_seconds"] == points[0]["steps"][-1]["floor_seconds"]
