"""``systolic doctor``: the verdict first, one screen, exit code, JSON."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from systolic.cli.main import main
from systolic.doctor import Machine, Status, examine
from systolic.doctor.command import Examination
from systolic.doctor.machine import Holder, LockFile
from systolic.doctor.view import WIDTH, print_examination
from tests.doctor.machines import GPU_HOST, LAPTOP, ON_CPU, TPU_VM, with_package, with_variables

BAD = with_variables(
    replace(
        with_package(TPU_VM, "tensorflow", "2.21.0"),
        measured=ON_CPU,
        holders=(Holder(pid=9, command="python -m serve", user="eve", path="/dev/vfio/0"),),
        lock_file=LockFile(path="/tmp/libtpu_lockfile", owner="root", opens=False),
        transparent_hugepages=False,
    ),
    XLA_FLAGS="--xla_dump_to=/tmp/x " + "--xla_flag=1 " * 100,
    JAX_ENABLE_X64="1",
)


def _examined(machine: Machine) -> Examination:
    return Examination(machine=machine, findings=tuple(examine(machine)))


def _screen(machine: Machine) -> list[str]:
    file = io.StringIO()
    print_examination(_examined(machine), Console(width=WIDTH, file=file, highlight=False))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("machine", [TPU_VM, GPU_HOST, LAPTOP, BAD])
def test_one_screen_with_the_verdict_first(machine: Machine) -> None:
    lines = _screen(machine)
    bad = any(f.status is Status.failed for f in examine(machine))
    assert lines[0].startswith("NOT FIT" if bad else "All fine")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= WIDTH


def test_each_failure_is_followed_by_its_fix() -> None:
    lines = _screen(BAD)
    assert lines[0] == "NOT FIT: JAX HAS FALLEN BACK TO THE CPU; 3 checks failed, 4 warnings"
    text = "\n".join(lines)
    assert "JAX HAS FALLEN BACK TO THE CPU" in text
    loud = [f for f in examine(BAD) if f.status in (Status.failed, Status.warning)]
    assert [line.strip() for line in lines if line.strip().startswith("fix:")] == [
        f"fix: {f.fix}" for f in sorted(loud, key=lambda f: f.status is Status.warning)
    ]


def test_record_is_json() -> None:
    plain = json.loads(json.dumps(_examined(BAD).to_json()))
    assert plain["fit"] is False
    failed = [finding for finding in plain["findings"] if finding["status"] == "failed"]
    assert failed
    assert all(finding["fix"] and finding["mend"] == finding["fix"] for finding in failed)
    assert plain["machine"]["measured"]["platform"] == "cpu"
    assert plain["machine"]["holders"][0]["pid"] == 9


def test_without_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--no-measure", "--json"])
    plain = json.loads(capsys.readouterr().out)
    assert plain["machine"]["measured"] is None
    assert code == (0 if plain["fit"] else 1)


@pytest.mark.slow
def test_on_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code = main(["doctor", "--json"])
    captured = capsys.readouterr()
    plain = json.loads(captured.out)
    assert plain["machine"]["measured"]["platform"] == "cpu"
    assert code == (0 if plain["fit"] else 1)
    assert captured.err == ""
