"""Slurm: nodes and tasks of every GPU slice, and the batch script with a stand-in for Slurm and with Slurm itself."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from systolic.chips import ChipKind
from systolic.core.errors import OptionError
from systolic.launching import Purchase, Site, SlurmOptions, prepare
from systolic.launching.slurm import seconds
from tests.launching.cluster import available, cluster, idle
from tests.launching.made import HEADER, executable, launch, shellcheck, slices, write_files

GPUS = [one for one in slices() if one.chip.kind is ChipKind.gpu]


def made(on: str = "16xh100", **fields: Any) -> Any:
    given = {"run": "/shared/runs/lm", "site": Site(), "slurm": SlurmOptions(time="24:00:00")}
    return prepare("slurm", launch(on, **{**given, **fields}))


def directives(text: str) -> dict[str, str]:
    words = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    return {word[2:].partition("=")[0]: word.partition("=")[2] for word in words}


def test_all_slices_of_gpus_agree_with_the_catalogue() -> None:
    assert len({one.chip.name for one in GPUS}) > 6
    for on in GPUS:
        prepared = made(on.name)
        found = directives(prepared.files["job.sh"])
        per_node = int(found["gpus-per-node"])
        assert int(found["nodes"]) * per_node == on.num_chips, on.name
        assert int(found["nodes"]) == on.num_hosts == prepared.hosts, on.name
        # As jax.distributed expects under Slurm: a process has the device of its local rank.
        assert int(found["ntasks-per-node"]) == per_node, on.name
        assert ("exclusive" in found) == (per_node == on.chip.chips_per_host), on.name


def test_nodes_of_another_size_and_more_options() -> None:
    batch = SlurmOptions(gpus_per_node=4, time="7-00", options=("--constraint=h100", "--qos=long"))
    found = directives(made(slurm=batch, site=Site(queue="gpu", account="lab")).files["job.sh"])
    assert (found["nodes"], found["gpus-per-node"]) == ("4", "4")
    assert (found["time"], found["constraint"], found["qos"]) == ("7-00", "h100", "long")
    assert (found["partition"], found["account"]) == ("gpu", "lab")
    assert found["signal"] == "B:USR1@180"
    assert {"requeue", "exclusive"} <= set(found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "singleton"),
        (("--dependency=afterok:7",), "afterok:7,singleton"),
        (("--depend=afterok:7:8,after:9+5",), "afterok:7:8,after:9+5,singleton"),
        (("--dependency=singleton",), "singleton"),
        (
            ("--dependency=afterok:7", "--qos=long", "--dependency=after:9"),
            "afterok:7,after:9,singleton",
        ),
    ],
)
def test_dependencies_are_added_to_the_one_on_jobs_of_its_name(
    options: tuple[str, ...], expected: str
) -> None:
    text = made(slurm=SlurmOptions(options=options)).files["job.sh"]
    # sbatch uses the last line of several with one option.
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH --depend")]
    assert lines == [f"#SBATCH --dependency={expected}"]
    assert ("#SBATCH --qos=long" in text) == ("--qos=long" in options)


def test_the_script_says_what_made_it_and_passes_shellcheck(tmp_path: Path) -> None:
    batch = SlurmOptions(setup="module load cuda", programs="/opt/my env/bin")
    code = {"mine.py": "x = 1\n"}
    prepared = made(slurm=batch, target="mine.py:job", code=code)
    text = prepared.files["job.sh"]
    assert text.split("\n", 1)[1].startswith(HEADER)
    assert "systolic train code/mine.py:job --steps 10 --run /shared/runs/lm --continue" in text
    assert prepared.files["code/mine.py"] == "x = 1\n"
    # Slurm reads #SBATCH lines up to the first command.
    assert text.index("\ncd ") > text.rindex("#SBATCH")
    (tmp_path / "job.sh").write_text(text)
    shellcheck(tmp_path / "job.sh")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"on": "v5e-16"}, "slurm takes GPU slices; v5e-16 is a TPU slice.*--via tpu-vm or gke"),
        ({"on": "8xcpu"}, "8xcpu is a CPU slice"),
        ({"name": "a" * 61}, "has 61 characters; a job's name takes at most 60"),
        ({"run": "gs://bucket/x"}, "folder that the nodes share"),
        ({"purchase": Purchase.spot}, "--sbatch=--reservation=NAME"),
        ({"slurm": SlurmOptions(time="tomorrow")}, "--time 24:00:00"),
        (
            {"slurm": SlurmOptions(time="0:02:00")},
            "signalled to save 3 minutes before the limit.*10 minutes",
        ),
        ({"slurm": SlurmOptions(time="9:59")}, "10 minutes or more"),
        ({"slurm": SlurmOptions(options=("--time=1:00",))}, "the launch sets; give --time"),
        ({"slurm": SlurmOptions(setup='echo "open')}, "is not valid shell .No closing quotation"),
        ({"slurm": SlurmOptions(gpus_per_node=1000)}, "more than any node has"),
        (
            {"slurm": SlurmOptions(gpus_per_node=3)},
            "divide the 16 GPUs of 16xh100; give 1, 2, 4, 8 or 16",
        ),
        (
            {"slurm": SlurmOptions(options=("--qos", "long"))},
            "'long'; it takes options as --name=value",
        ),
        (
            {"slurm": SlurmOptions(options=("--nodes=3",))},
            "sbatch has --nodes=3, which the launch sets",
        ),
        (
            {"slurm": SlurmOptions(options=("--array=1-4",))},
            "--array=1-4, which.*train the same run",
        ),
        ({"slurm": SlurmOptions(options=("--arr=1-4",))}, "--arr=1-4, which the launch sets"),
        ({"slurm": SlurmOptions(options=("--no-requeue",))}, "requeued to continue its run"),
        ({"slurm": SlurmOptions(options=("--open-mode=truncate",))}, "appends to its log"),
        ({"slurm": SlurmOptions(options=("--output=x",))}, "systolic logs reads slurm.log"),
        ({"slurm": SlurmOptions(options=("--dependency",))}, "as --dependency=afterok:JOB"),
        (
            {"slurm": SlurmOptions(options=("--dependency=after:1?after:2",))},
            "one is enough, but the job also waits for others of its name .singleton.",
        ),
        (
            {"slurm": SlurmOptions(options=("--partition=a",)), "site": Site(queue="b")},
            "--sbatch has --partition=a, but --queue is b",
        ),
        ({"slurm": SlurmOptions(setup="a\nb")}, "setup has several lines"),
        ({"slurm": SlurmOptions(setup=f"export T=hf_{'a' * 34}")}, "looks like a key"),
        ({"site": Site(queue="a b")}, "queue is 'a b'"),
        ({"site": Site(account="a;b")}, "account is 'a;b'"),
    ],
)
def test_mistakes_are_one_line(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        made(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 5400), ("90:30", 5430), ("1:30:30", 5430), ("1-2", 93600), ("1-2:30", 95400)],
)
def test_times_are_those_of_slurm(time: str, expected: int) -> None:
    assert seconds(time) == expected


CALLS = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
"""
SQUEUE = """#!/bin/sh
echo "${STATE:-RUNNING}"
"""
SRUN = """#!{python} -IS
import os, pathlib, signal, sys, time
def told(*_):
    sys.exit(int(os.environ.get("TOLD", "143")))
signal.signal(signal.SIGTERM, told)
here = pathlib.Path(os.environ["CALLS"]).parent
(here / "srun.pid").write_text(str(os.getpid()))
(here / "platforms").write_text(os.environ["JAX_PLATFORMS"])
if os.environ.get("SLEEP"):
    time.sleep(60)
for number, code in enumerate(os.environ.get("CODES", "").split()):
    pathlib.Path("codes", str(number)).write_text(code + "\\n")
sys.exit(int(os.environ.get("CODE", "0")))
"""
SCANCEL = (
    CALLS
    + """pid="$(cat "$(dirname "$CALLS")/srun.pid")"
kill -TERM "$pid"
while grep -qs '^State:[[:space:]]*[^Z]' "/proc/$pid/status"; do sleep 0.02; done
"""
)
"""Returns after the training has ended, so that its end is always seen together with the signal."""


def start(folder: Path, setup: str = "", **environ: str) -> subprocess.Popen[bytes]:
    """Runs the script with stand-ins for Slurm's commands."""
    write_files(folder, made(restarts=2, slurm=SlurmOptions(setup=setup)))
    for name, text in (
        ("scontrol", CALLS),
        ("squeue", SQUEUE),
        ("srun", SRUN),
        ("scancel", SCANCEL),
    ):
        executable(folder / "bin" / name, text)
    given = dict(os.environ) | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7",
    }
    with (folder / "slurm.log").open("ab") as out:
        return subprocess.Popen(["bash", "job.sh"], cwd=folder, env=given | environ, stdout=out)


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("setup", "expected"),
    [("", "cuda,cpu"), ("export JAX_PLATFORMS=rocm,cpu", "rocm,cpu"), ("JAX_PLATFORMS=x", "x")],
)
def test_the_training_runs_on_gpus_whatever_the_shell_that_submits_has(
    tmp_path: Path, setup: str, expected: str
) -> None:
    """sbatch exports the environment of the shell to the job."""
    assert start(tmp_path, setup, JAX_PLATFORMS="cpu").wait(timeout=60) == 0
    assert (tmp_path / "platforms").read_text() == expected


def test_a_failure_is_tried_again_so_often_and_a_wrong_command_never(tmp_path: Path) -> None:
    for attempt in range(3):
        done = start(tmp_path, CODE="1", SLURM_RESTART_COUNT=str(attempt))
        assert done.wait(timeout=60) == 1
    log = (tmp_path / "slurm.log").read_text().splitlines()
    assert log == [f"failed with exit code 1, restart {n} of 2: requeueing" for n in (1, 2)]
    assert calls(tmp_path) == ["scontrol requeue 7"] * 2
    # One task failed, so Slurm ended the other, whose exit code is higher.
    assert start(tmp_path, CODE="143", CODES="1 143").wait(timeout=60) == 1
    assert len(calls(tmp_path)) == 3
    assert start(tmp_path, CODE="2").wait(timeout=60) == 2
    assert start(tmp_path).wait(timeout=60) == 0
    assert start(tmp_path, CODE="143", CODES="143 2").wait(timeout=60) == 2
    assert len(calls(tmp_path)) == 3


@pytest.mark.parametrize(
    ("signal", "state", "code", "expected"),
    [
        ("USR1", "RUNNING", 143, ["scancel --signal=TERM 7", "scontrol requeue 7"]),
        ("USR2", "RUNNING", 0, ["scancel --signal=TERM 7"]),
    ],
)
def test_signals_let_the_training_save(
    tmp_path: Path, signal: str, state: str, code: int, expected: list[str]
) -> None:
    running = start(tmp_path, SLEEP="1", STATE=state)
    told(tmp_path, running, f"-{signal}")
    assert running.wait(timeout=60) == code
    assert calls(tmp_path) == expected
    assert not (tmp_path / "failures").exists()


def test_a_job_that_was_cancelled_stays_so(tmp_path: Path) -> None:
    running = start(tmp_path, SLEEP="1", STATE="CANCELLED")
    told(tmp_path, running, "-TERM", to_training=True)
    assert running.wait(timeout=60) == 143
    assert calls(tmp_path) == []


def told(
    folder: Path, running: subprocess.Popen[bytes], signal: str, *, to_training: bool = False
) -> None:
    path = folder / "srun.pid"
    while not path.exists() or not path.read_text():
        assert running.poll() is None
        time.sleep(0.02)
    pid = path.read_text() if to_training else str(running.pid)
    subprocess.run(["kill", signal, pid], check=True)


SYSTOLIC = """#!{python} -IS
import os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run") + 1])
run.mkdir(parents=True, exist_ok=True)
mine = run / os.environ["SLURM_PROCID"]
def note(text):
    with mine.open("a") as out:
        out.write(text + "\\n")
def saved(*_):
    note("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, saved)
note(f"start {os.environ['SLURM_STEP_NUM_TASKS']} {os.environ['SLURM_LOCALID']}")
while not (run / "go").exists():
    time.sleep(0.05)
    if (run / "fail").exists():
        sys.exit(1)
note("done")
"""
"""Training that records what happens to it."""


class SlurmJob:
    """Launch on a cluster on this machine."""

    def __init__(self, folder: Path, environ: Mapping[str, str], **fields: Any) -> None:
        self.folder, self.environ = folder, environ
        self.run = folder / "run"
        programs = executable(folder / "bin" / "systolic", SYSTOLIC).parent
        batch = SlurmOptions(gpus_per_node=1, time="10:00", programs=str(programs))
        given = {"on": "2xl4", "run": str(self.run), "slurm": batch}
        self.prepared = made(**{**given, **fields})
        write_files(folder, self.prepared)
        for words in self.prepared.submit:
            self.call(words)

    def call(self, words: Sequence[str]) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.environ, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self) -> str:
        return self.call(["squeue", "--me", "--noheader", "--format=%T %i", "--states=all"])

    def hurry(self) -> None:
        """Releases a requeued job, which Slurm holds for two minutes, as soon as the nodes are idle."""
        self.wait(lambda: self.state().startswith("PENDING") and idle(self.environ))
        job = self.state().split()[1]
        self.call(["scontrol", "update", f"JobId={job}", "StartTime=now"])

    def notes(self) -> list[str]:
        return [(self.run / n).read_text() if (self.run / n).exists() else "" for n in ("0", "1")]

    def wait(self, ready: Callable[[], bool], seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < until, (self.state(), self.notes(), self.log())
            time.sleep(0.1)

    def log(self) -> str:
        path = self.folder / "slurm.log"
        return path.read_text() if path.exists() else ""


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="Slurm is not installed, or this is not root")
def test_slurm_itself_runs_requeues_and_stops(tmp_path: Path) -> None:
    with cluster(tmp_path) as environ:
        job = SlurmJob(tmp_path, environ)
        begin = "start 2 0\n"
        job.wait(lambda: job.notes() == [begin] * 2)
        assert "RUNNING" in job.state()
        # The signal that Slurm sends before the time limit.
        number = job.state().split()[1]
        job.call(["scancel", "--batch", "--signal=USR1", number])
        job.hurry()
        job.wait(lambda: job.notes() == [f"{begin}saved\n{begin}"] * 2)
        # A failure of one task ends the other.
        (job.run / "fail").touch()
        job.wait(lambda: "restart 1 of 10" in job.log())
        (job.run / "fail").unlink()
        job.hurry()
        job.wait(lambda: all(text.count("start") == 3 for text in job.notes()))
        for words in job.prepared.stop:
            job.call(words)
        job.wait(lambda: "COMPLETED" in job.state())
        assert all(text.endswith("saved\n") for text in job.notes())
        assert "stopped; rerun sbatch job.sh to continue" in job.log()
