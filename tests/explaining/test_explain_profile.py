"""``systolic explain RUN/profile``: what was measured, and what changes of the run's settings would gain."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from systolic.cli.main import main
from systolic.compiling.host_backend import CpuRates
from systolic.core.errors import NotFoundError
from systolic.explaining.profiles import is_profile, slice_of
from systolic.forecasting import profiled as session_traced
from systolic.forecasting.display.profiled import print_beside
from systolic.forecasting.profiled import Beside, traced_beside
from systolic.runs.access import Access
from systolic.runs.run import JOB, Run
from systolic.training.session import Audience, SessionOptions, TrainResult, _finished

pytestmark = pytest.mark.own_programs

ROOT = Path(__file__).parents[2]
SIZES = {"layers": 1, "d-model": 64, "d-ff": 128, "heads": 2, "kv-heads": 2, "head-dim": 32}
JOB_OPTIONS = [word for name, size in SIZES.items() for word in (f"--model.{name}", str(size))]
TOLD = "told.json"
"""What the command printed, beside the run."""
SMALL = ["lm", *JOB_OPTIONS, "--batch", "4", "--sequence", "128", "--steps", "7"]


def made(path: Path, devices: str, **more: object) -> Run:
    """A run that was trained on such devices."""
    path.mkdir()
    (path / JOB).write_text("{}")
    start = {"kind": "start", "step": 0, "time": 0.0, "devices": devices, **more}
    (path / "metrics.jsonl").write_text(json.dumps(start) + "\n")
    return Run.open(path)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a process of its own: programs that others compiled may have the same number in a profile."""
    run = tmp_path_factory.mktemp("traced") / "run"
    words = ["train", *SMALL, "--profile", "2", "--json", "--run", str(run)]
    # No test reads how fast it was: XLA's costly passes take most of its time.
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-m", "tests.explaining.command", *words]
    out = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    (run.parent / TOLD).write_text(out)
    return run


def test_a_profile_of_a_cpu_run_promises_nothing(
    traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(traced / "profile"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["causes"]
    assert told["remedies"] == []
    assert "do not rank settings" in told["problem"]
    assert main(["explain", str(traced / "profile"), "--remedies", "0", "--json"]) == 0
    assert "remedies" not in json.loads(capsys.readouterr().out)


def test_a_directory_of_runs_is_no_profile(
    traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_profile(traced / "profile")
    assert not is_profile(traced.parent)
    assert main(["explain", str(traced.parent)]) != 0
    assert "is no run but holds 1; give one of them" in capsys.readouterr().err


def on_tpus(traced: Path, run: Path, devices: int) -> Path:
    """A copy of a run that says it was on TPUs."""
    shutil.copytree(traced, run)
    records = (run / "metrics.jsonl").read_text()
    for old, new in (
        ('"num_devices": 1', f'"num_devices": {devices}'),
        ('"device_kind": "cpu"', '"device_kind": "TPU v5 lite"'),
    ):
        assert old in records
        records = records.replace(old, new)
    (run / "metrics.jsonl").write_text(records)
    return run


def test_a_step_that_its_slice_can_not_have_is_told_beside_the_causes(
    traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four rows a step on eight devices."""
    run = on_tpus(traced, tmp_path / "run", 8)
    assert main(["explain", str(run / "profile"), "--json"]) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert told["causes"]
    assert told["remedies"] == []
    assert told["problem"].startswith("batch of 4 does not divide by 8 ")
    assert "no changes were tried: " in shown.err


@pytest.mark.slow
def test_a_profile_of_a_tpu_run_is_followed_by_changes_with_their_gain(
    traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was on a CPU and says it was on TPUs; its step is compiled for those."""
    pytest.importorskip("libtpu")
    run = on_tpus(traced, tmp_path / "run", 4)
    assert main(["explain", str(run / "profile"), "--remedies", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "profile"
    assert told["slice"] == "v5e-4"
    assert told["figures"]["step_seconds"] > told["forecast_step_seconds"] > 0
    assert len(told["remedies"]) >= 2
    for one in told["remedies"]:
        assert one["settings"]
        assert one["fits"]
        # A gain is of tokens a second, so that a step of twice the batch counts twice.
        batch = one["settings"]["batch"] / told["remedies"][0]["settings"]["batch"]
        assert one["gain_of"] == "tokens per second"
        assert one["gain"] == pytest.approx(
            batch * told["forecast_step_seconds"] / one["step_seconds"] - 1, rel=1e-6
        )
    if told["command"] is not None:
        assert told["command"].startswith("systolic train lm --model.layers 1 ")
        assert "--profile" not in told["command"]


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ("4 x TPU v5 lite", "v5e-4"),
        ("256 x TPU v5 lite", "v5e-256"),
        ("4 x TPU v5", "v5p-8"),
        ("16 x TPU v4", "v4-32"),
        ("8 x TPU v6 lite", "v6e-8"),
        ("1 x cpu", "cpu"),
        ("8 x cpu", "8xcpu"),
    ],
)
def test_the_devices_of_a_run_name_its_slice(tmp_path: Path, devices: str, name: str) -> None:
    earlier = made(tmp_path / "earlier", devices)  # whose records have the text alone
    number, _, kind = devices.partition(" x ")
    now = made(tmp_path / "now", "", num_devices=int(number), device_kind=kind)
    assert slice_of(earlier).name == slice_of(now).name == name


@pytest.mark.parametrize("devices", ["3 x TPU v5 lite", "1 x Abacus"])
def test_devices_that_are_no_slice_are_named(tmp_path: Path, devices: str) -> None:
    with pytest.raises(NotFoundError, match=devices.split(" x ")[1]):
        slice_of(made(tmp_path / "run", devices))


# Beside the forecast


def test_the_end_of_a_run_has_its_ops_beside_the_forecast(traced: Path) -> None:
    found = json.loads((traced.parent / TOLD).read_text())["profile"]
    assert found["program"].startswith("jit_")
    assert found["measured_step_seconds"] > 0
    assert found["simulated_step_seconds"] > 0
    assert "roofline" in found["notes"][0]
    kinds = {row["kind"]: row for row in found["kinds"]}
    assert kinds["matmuls"]["ops"] > 3
    # Nearly all of what ran has a forecast, and the other way round.
    assert found["measured_alone_seconds"] < 0.1 * sum(
        k["measured_seconds"] for k in kinds.values()
    )
    assert found["simulated_alone_seconds"] < 0.2 * found["simulated_step_seconds"]
    lost = [abs(op["difference_seconds"]) for op in found["ops"]]
    assert lost == sorted(lost, reverse=True)
    assert sum(op["simulated_seconds"] for op in found["ops"]) == pytest.approx(
        found["simulated_step_seconds"] - found["simulated_alone_seconds"], rel=0.05
    )


def test_a_screen_shows_where_the_difference_lies(
    traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = CpuRates(
        matmul_flops_per_second=5e10,
        memory_bytes_per_second=1e10,
        vector_operations_per_second=5e9,
    )
    monkeypatch.setattr(session_traced, "measured_rates", lambda _: rates)
    with Run.open(traced) as run:
        found = traced_beside(run, traced / "profile")
    assert isinstance(found, Beside)
    print_beside(found)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith(f"{found.program}: measured ")
    head = next(line for line in shown if "difference" in line)
    rows = shown[shown.index(head) + 1 :]
    assert len(rows) > 5
    ends = head.index("simulated") + len("simulated")
    assert all(row[ends - 1] != " " and row[ends] == " " for row in rows[:3])


def test_a_profile_that_does_not_hold_its_program_is_one_line(traced: Path, tmp_path: Path) -> None:
    with (
        Run.open(traced) as run,
        pytest.raises(NotFoundError, match="holds no profile; give an xplane"),
    ):
        traced_beside(run, tmp_path)


def test_devices_that_are_not_in_the_catalogue_are_one_line(traced: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(traced, other)
    records = other / "metrics.jsonl"
    records.write_text(
        records.read_text().replace('"device_kind":"cpu"', '"device_kind":"TPU v99"')
    )
    records.write_text(
        records.read_text().replace('"device_kind": "cpu"', '"device_kind": "TPU v99"')
    )
    with Run.open(other) as run, pytest.raises(NotFoundError, match="the catalogue has no TPU v99"):
        traced_beside(run, other / "profile")


def test_a_comparison_that_fails_does_not_hide_the_end_of_a_run(
    traced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("fusion.7")

    monkeypatch.setattr(session_traced, "traced_beside", fail)
    told: list[str] = []
    result = TrainResult(run=traced, summary={"interrupted": None})
    with Run.open(traced, access=Access.write) as run:
        made = _finished(result, run, SessionOptions(profile=2), Audience(warnings=told))
    assert made.beside is None
    assert told == ["the profile is not set beside a forecast: KeyError: 'fusion.7'"]
    assert made.warnings == tuple(told)
