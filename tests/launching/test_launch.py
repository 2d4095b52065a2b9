"""``systolic launch``, ``status``, ``logs`` and ``stop`` as command lines."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from systolic import recipes
from systolic.cli.forms import planned_request
from systolic.cli.main import VERBS, main
from systolic.launching import request as launching
from systolic.launching.checks import trained
from systolic.launching.lifecycle import stop
from systolic.launching.platforms import CLIENTS
from systolic.launching.record import LOCAL, launches
from systolic.recipes.jobs import JobSource

RECIPE = """
from systolic.recipes.digits import digits

import part

def job(steps: int = part.STEPS):
    return digits(steps=steps)
"""
PLAN = {
    "format": 1,
    "recipe": "lm",
    "options": {},
    "goal": {},
    "best": None,
    "candidates": [
        {
            "slice": "v5e-16",
            "settings": {"layout.fsdp": 16, "batch": 64},
            "total": {"steps": 7200.0},
            "flags": ["--xla_a=1", "--xla_b=2"],
            "step_seconds": 2.0,
            "step_seconds_low": 1.0,
            "step_seconds_high": 3.0,
            "mfu": 0.5,
        }
    ],
}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield
    # A test that fails halfway would leave processes that train for days.
    for one in launches():
        if one.via == LOCAL and one.alive():
            stop(one)


def run(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    given = main(shlex.split(line))
    out, err = capsys.readouterr()
    assert given == code, err
    return out, err


FORM = VERBS["launch"].forms[0]


def requested(recipe: str, words: Sequence[str]) -> tuple[JobSource, launching.LaunchRequest]:
    """What a command line launches, and its request."""
    asked = planned_request(recipe, words, "launch", FORM.options.read, print)
    made_by = ("systolic", "launch", recipe, *words)
    return asked.as_typed, launching.request_of(asked.as_typed, vars(asked.verb), made_by)


GKE = "launch digits --via gke --image registry/systolic:1 --run gs://bucket/digits"

TPU = "launch digits --via tpu-vm --run gs://bucket/digits"
SERVE = "launch serve gs://bucket/chat --via gke --image registry/chat:1"


def test_files_bill_and_the_next_command_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(f"{GKE} --on v5e-16 --spot --steps 30", capsys)
    text = Path("launches/digits-v5e-16/jobset.yaml").read_text()
    assert text.startswith(f"# Made by: systolic {GKE} --on v5e-16 --spot --steps 30\n")
    number = len(text.splitlines())
    assert f"\nfile     launches/digits-v5e-16/jobset.yaml ({number} lines)\n" in out
    assert "\n         --show prints jobset.yaml, free.sh\n" in out
    assert text.splitlines()[-1] not in out
    # The catalogue's price of a v5e chip in a spot machine, times 16.
    assert "$4.77 an hour spot" in out
    assert "systolic train digits --steps 30 --run gs://bucket/digits --continue" in out
    assert f"systolic {GKE} --on v5e-16 --spot --steps 30 --submit" in out
    assert "kubectl apply --filename jobset.yaml" in out
    assert launches() == []
    assert "spot (prices of us-central1, 2026);" in out
    zone = f"{TPU} --on v6e-8 --spot --zone"
    assert "$10.21 an hour spot (prices of us-east5, 2026);" in run(f"{zone} us-east5-b", capsys)[0]
    out, _ = run(f"{zone} us-west9-a", capsys)
    assert "(prices of us-central1, 2026; the catalogue has none for us-west9, where" in out


def test_a_plan_gives_slice_settings_and_bill(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.json").write_text(json.dumps(PLAN))
    line = "launch lm --plan plan.json --via gke --image r/s:1 --run gs://bucket/lm --json"
    told = json.loads(run(line, capsys)[0])
    assert told["slice"] == "v5e-16"
    assert told["bill"]["hours"] == 4.0
    assert told["bill"]["usd"] == pytest.approx(16 * 1.2 * 4, rel=0.01)
    assert told["bill"]["usd_low"] == pytest.approx(16 * 1.2 * 2, rel=0.01)
    text = Path("launches/lm-v5e-16/jobset.yaml").read_text()
    for words in (
        "--layout.fsdp\n",
        "--batch\n",
        "- '64'\n",
        "- '7200'\n",
        "- '--flags=--xla_a=1 --xla_b=2'\n",
    ):
        assert words in text
    assert "plan.json has a candidate for v5e-16" in run(f"{line} --on v5e-8", capsys, 2)[1]


def test_words_of_train_are_held_against_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan has 7200 steps of 2 s."""
    Path("plan.json").write_text(json.dumps(PLAN))
    line = "launch lm --plan plan.json --via gke --image r/s:1 --run gs://bucket/lm --json"
    refused = run(f"{line} --train='--batch 128'", capsys, 2)[1]
    assert "the batch is what plan.json decides; leave its option out" in refused
    refused = run(f"{line} --train='--flags=--xla_c=1'", capsys, 2)[1]
    assert "the flags are set by plan.json" in refused
    assert not Path("launches").exists()
    for words, hours, told in (
        ("--steps 3600", 2.0, ""),
        ("--optimizer.learning-rate 1e-4", 4.0, ""),
        ("--workers 2", 4.0, ""),
        ("--model.layers 2", None, "not the one that plan.json forecast"),
    ):
        out, err = run(f"{line} --train='{words}'", capsys)
        assert json.loads(out)["bill"]["hours"] == hours
        assert told in err


def test_what_the_launch_runs_is_what_train_reads() -> None:
    Path("plan.json").write_text(json.dumps(PLAN))
    words = ["--plan", "plan.json", "--via", "local", "--sequence", "128"]
    source, request = requested("lm", words)
    made = launching.describe(request)

    command = made.command()
    again = planned_request(
        command[2], command[3:], "train", VERBS["train"].forms[0].options.read, pytest.fail
    )
    assert again.verb.continue_
    assert str(again.verb.run) == made.run
    assert again.job == source.job
    assert again.job.steps == 7200
    assert again.verb.flags == "--xla_a=1 --xla_b=2"


def test_a_recipe_file_goes_along_with_its_modules(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(RECIPE)
    Path("part.py").write_text("STEPS = 5\n")
    line = "launch mine.py:job --on v5e-4 --via tpu-vm --zone us-east5-b --run gs://bucket/mine"
    out, _ = run(line, capsys)
    folder = Path("launches/mine-v5e-4")
    assert (folder / "code" / "mine.py").read_text() == RECIPE
    assert (folder / "code" / "part.py").read_text() == "STEPS = 5\n"
    assert (
        "systolic train code/mine.py:job --run bucket/mine --continue"
        in (folder / "host.sh").read_text()
    )
    (wheel,) = (folder / "wheels").iterdir()
    assert wheel.name in out
    pins = (folder / "requirements.txt").read_text()
    assert "\njax==" in pins
    assert f"# Python {'.'.join(map(str, __import__('sys').version_info[:2]))}\n" in pins


def test_a_folder_in_which_no_file_can_be_made_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, err = run("launch digits --on 1xcpu --via local --out /proc/zz", capsys, 1)
    assert "could not be written (No such file or directory); no file can be made there" in err
    assert "in /proc: choose another folder" in err


def test_paths_of_this_machine_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Relative ones are nowhere else, and are refused before anything is written."""
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("some text " * 1000)
    for via in ("gke --image r/s:1", "tpu-vm --zone us-west4-a", "skypilot"):
        there = f"--on v5e-4 --via {via} --run gs://b-b/x"
        _, err = run(f"launch lm --path texts {there}", capsys, 2)
        name = via.split()[0]
        told = f"--path is texts, a path relative to this folder, which the machines of {name} do"
        assert told in err
        _, err = run(f"launch lm {there} --train=--init-from=texts/a.txt", capsys, 2)
        assert "--train is texts/a.txt, a path relative" in err
        _, err = run(f"launch lm --path corpus/ {there}", capsys, 2)
        assert "--path is corpus, a path relative to this folder" in err, "missing ones are too"
        assert not Path("launches").exists()
        out, _ = run(f"launch lm --path {Path('texts').resolve()} {there}", capsys)
        assert f"--path is {Path('texts').resolve()}, a path of this machine" in out
        assert "launch   lm-v5e-4 on" in out
        shutil.rmtree("launches")
    out, _ = run("launch lm --path texts --on v5e-4 --via local", capsys)
    assert "launch   lm-v5e-4 on" in out, "the same name"
    for via in ("local", "docker --image r/s:1"):
        _, err = run(f"launch lm --path corpus/ --on 1xcpu --via {via}", capsys, 2)
        assert "--path is corpus, which does not exist here; give a path that does" in err


def test_processes_of_one_machine_are_no_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run("launch digits --on v5e-4 --via local --processes 2", capsys)
    assert "launch   digits-v5e-4 on v5e-4: 4 chips, 1 host\n" in out
    assert "2 processes with 2 virtual CPU devices each stand in for the host of v5e-4" in out


@pytest.mark.parametrize(
    "via", ["tpu-vm --on v5e-4 --zone us-west4-a --run gs://b-b/x", "slurm --on 8xh100"]
)
def test_a_path_in_a_bucket_keeps_its_slashes(via: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Path has one; and it is no path relative to this folder."""
    out, _ = run(f"launch lm --path gs://b-b/corpus/ --via {via}", capsys)
    assert "systolic train lm --path gs://b-b/corpus --run " in out
    (record,) = Path("launches").glob("*/launch.json")
    assert "gs:/b-b" not in record.read_text()


def test_the_bill_counts_the_steps_that_the_machines_train() -> None:
    words = ["--via", "local", "--on", "v5e-16", "--train=--steps 7 --for-devices 32"]
    _, request = requested("digits", words)
    assert trained(request, launching.describe(request)).steps == 7


def test_only_restarts_after_a_preemption_are_more_with_spot() -> None:
    def restarts(*words: str) -> int:
        return launching.describe(requested("digits", [*words, "--spot"])[1]).restarts

    slice_ = ("--on", "v5e-16")
    # SkyPilot does not count restarts after a preemption, Kubernetes counts some.
    assert restarts("--via", "skypilot", *slice_) == 10
    assert restarts("--via", "tpu-vm", *slice_) == restarts("--via", "gke", *slice_) == 100
    assert restarts("--via", "tpu-vm", *slice_, "--restarts", "3") == 3


def test_no_recipe_has_an_option_that_launch_needs() -> None:
    import inspect

    own = set(inspect.signature(FORM.options.read).parameters)
    for name in recipes.shipped():
        assert not own & set(inspect.signature(recipes.find(name).function).parameters), name


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("launch digits --via gke", "needs a slice; add --on v5e-16"),
        ("launch digits --on v5e-16", "needs a platform; add --via"),
        ("launch digits --on v5e-17 --via gke", "did you mean v5e-16"),
        ("launch digits --on v5e-16 --via gek", "--via is 'gek'; did you mean gke"),
        (f"{GKE} --on v5e-16 --spot --reserved", "--spot and --reserved exclude each other"),
        (f"{GKE} --on v5e-16 --sopt", "did you mean --spot"),
        (f"""{GKE} --on v5e-16 --train '"'""", "which is not valid shell"),
        (f"{GKE} --on v5e-16 --time 1:00:00", "--time is not used by gke; leave it out"),
        (
            f"{GKE} --on v5e-16 --candidate 4",
            "--candidate is 4, which has no effect without --plan",
        ),
        (f"{GKE} --on v5e-16 --project mine-1", "or choose --via tpu-vm"),
        ("launch digits --on 2xcpu --via local --zone us-west4-a", "--zone is not used by local"),
        ("launch digits --on 2xcpu --via local --spot", "--spot is not used by local"),
        ("launch digits --on 2xcpu --via local --quick", "--quick is not used by local"),
        ("launch digits --on 8xcpu --via docker --image r/s:1", "--image is not used by docker"),
        ("launch digits --on 8xh100 --via slurm --time 0:00:00", "--time 24:00:00"),
        (f"{GKE} --on v5e-16 --claim c --run /data/lm", "give --run /runs/FOLDER"),
        (f"{GKE} --on v5e-16 --claim c --run /runs", "give --run /runs/FOLDER"),
        (f"{GKE} --on v5e-16 --claim c --run /runs/../lm", "give --run /runs/FOLDER"),
        (f"{GKE} --on v5e-16 --claim c --run lm", "give --run /runs/FOLDER"),
        (f"{GKE} --on v5e-16 --train='--wokers 4'", "did you mean --workers"),
        (f"{GKE} --on v5e-16 --train='--workers -1'", "workers"),
        (f"{GKE} --on v5e-16 --train='--run x'", "train has --run, which the launch sets"),
        (f"{GKE} --on v5e-16 --train=--help", "train has --help"),
        (f"{GKE} --on v5e-16 --batch 7", "batch of 7 does not divide by 16"),
        (f"{GKE} --on v5e-16 --train='--batch 7'", "batch of 7 does not divide by 16"),
        (f"{TPU} --on v5e-16 --zone us-west4-a --batch 7", "batch of 7 does not divide by 16"),
        (f"{GKE} --on v5e-16 --layout.tensor 3", "layout"),
        ("launch digits --on v5e-16 --via local --batch 7", "does not divide by 16"),
        (
            "launch digits --on 2xv5e-4 --via local --min-slices 1 --train='--for-devices 8'",
            "train has --for-devices, which the launch sets",
        ),
        (f"{GKE} --on v5e-16 --restarts -1", "restarts"),
        (f"{GKE} --on v5e-16 --plan none.json", "none.json"),
        ("launch digits --on 8xcpu --processes 3 --via local", "of 8xcpu; give 1, 2, 4 or 8"),
        ("launch digits --on cpu --processes 2 --via local", "divide the 1 device of cpu; give 1"),
        (
            "launch digits --on v5e-4 --processes 5000 --via local",
            "processes is 5000, but local starts at most 16 processes; give 1, 2 or 4",
        ),
        (
            "launch digits --on v5e-256 --via local",
            "v5e-256 has 64 hosts, but local starts at most 16 processes; choose a smaller slice, or",
        ),
        ("launch digits --on 8xh100 --via local", "8xh100 has GPUs"),
        ("launch digits --on cpu --via local --run gs://bucket/x", "local trains into a folder"),
        ("launch digits --on v5e-16 --via gke --run gs://bucket/x", "--image is not given"),
        ("launch image --on v5e-16 --via gke --run gs://bucket/x", "--path"),
        (f"{GKE} --on 2xv5e-16 --min-slices 1", 'fewer in --on and --train="--for-devices 32"'),
        ("launch digits --on v5e-16 --via local --min-slices 1", "v5e-16 has one slice"),
        ("launch digits --on 2xv5e-4 --via local --min-slices 2", "2xv5e-4 has 2 slices, so none"),
        (
            "launch digits --on 2xv5e-4 --via local --min-slices 1 --processes 1",
            "give a multiple of 2",
        ),
        ("launch digits --on 2xv5e-4 --via local --rejoin-seconds 9", "add --min-slices"),
        (f"{GKE} --on 8xh100", "8xh100 has no TPU node pools in gke"),
        (f"{GKE} --on v5e-16 --name {'a' * 50}", "has 50 characters"),
        (f"{GKE} --on v5e-16 --namespace Mine", "--namespace is 'Mine'"),
        (f"{GKE} --on v5e-16 --project x --setup 'TOKEN=hf_{'a' * 34}'", "looks like a key"),
        ("launch digits --on v5e-16 --via tpu-vm --run gs://bucket/x", "add --zone us-west4-a"),
        (f"{TPU} --on v5e-16 --zone moon", "--zone is 'moon'"),
        (f"{TPU} --on v5e-16 --zone us-west4", "us-west4, which is a region"),
        (f"{TPU} --on tpu7x-8 --zone us-central1-c", "--via gke"),
        (f"{TPU} --on v5e-16 --zone us-west4-a --project My_Project", "--project is 'My_Project'"),
        ("launch digits --on v5e-16 --via tpu-vm --zone us-west4-a", "gs://BUCKET/FOLDER"),
        ("launch digits --on v5e-16 --via slurm", "slurm takes GPU slices; v5e-16 is a TPU"),
        ("launch digits --on 8xh100 --via slurm --time soon", "--time 24:00:00"),
        ("launch digits --on 8xh100 --via slurm --spot", "slurm rents no chips"),
        ("launch digits --on 8xh100 --via slurm --sbatch long", "it takes options as --name=value"),
        ("launch digits --on 16xh100 --via docker", "16xh100 has 2 hosts"),
        ("launch digits --on 2xv5e-16 --via skypilot --run gs://bucket/x", "--via gke or tpu-vm"),
        ("launch digits --on 8xh100 --via skypilot", "lost with the machine"),
        ("launch serve", "needs a Bundle"),
        ("launch serve gs://bucket/chat --on v5e-8 --image r/s:1", "add --via gke"),
        ("launch serve nowhere --via gke --image r/s:1", "nowhere is not a Bundle"),
        (f"{SERVE} --on v5e-16", "v5e-16 has 4 hosts, but a server runs on one"),
        (f"{SERVE} --variant knative", "it takes deployment or kserve"),
        (f"{SERVE} --serve='--contxt 8'", "did you mean --context"),
        (f"{SERVE} --serve='--port 80'", "serve has --port, which the launch sets"),
        (f"{SERVE} --max-replicas 0", "max-replicas"),
        (f"{SERVE} --serve 'sk-{'a' * 30}'", "which is not an option"),
        ("status nope", "there is no launch 'nope'"),
        ("logs nope", "systolic runs lists them"),
        ("stop nope", "there is no launch"),
        ("train digits --continue", "--continue needs the run; add --run DIR"),
    ],
)
def test_mistakes_are_one_line(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = run(line, capsys, 2)
    assert text in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("via", ["local --on 2xcpu", "docker --on 2xcpu", "slurm --on 8xh100"])
def test_a_run_in_a_file_is_refused(via: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("e.sh").touch()
    for run_ in ("e.sh", "e.sh/deeper/run"):
        err = run(f"launch digits --via {via} --run {run_}", capsys, 2)[1]
        assert f"--run is {Path(run_).absolute()}, but {Path('e.sh').absolute()} is a file" in err
    assert not Path("launches").exists()
    Path("runs/mine").mkdir(parents=True)
    run(f"launch digits --via {via} --run runs/mine", capsys)


@pytest.mark.parametrize(
    ("line", "client"),
    [
        (f"{GKE} --on v5e-16", "kubectl"),
        (f"{SERVE}", "kubectl"),
        (f"{TPU} --on v5e-16 --zone us-west4-a", "bash"),
        ("launch digits --on 8xh100 --via slurm", "sbatch"),
        ("launch digits --on 8xcpu --via docker", "mkdir"),
        ("launch digits --on v5e-16 --via skypilot --run gs://bucket/x", "sky"),
    ],
)
def test_a_missing_client_is_one_line(
    line: str, client: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    _, err = run(f"{line} --submit", capsys, 1)
    told = f"systolic: {client} is not installed on this machine"
    assert err.strip().splitlines()[-1].startswith(told)
    assert launches() == []


def test_a_server_on_a_cluster_is_written_with_its_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = f"{SERVE} --serve='--context 8192' --keys-secret keys"
    out, _ = run(line, capsys)
    text = Path("launches/chat-v5e-8/serve.yaml").read_text()
    assert text.startswith("# Made by: systolic launch serve gs://bucket/chat --via gke")
    assert "$9.60 an hour on-demand for 1 pod (minimum) to $38.40 for 4 (maximum)" in out
    assert "systolic serve chat=/gcs/bucket/chat --host 0.0.0.0" in out
    assert "\nbundle   gs://bucket/chat\n" in out
    assert "- --context\n" in text
    assert "kubectl create secret generic keys --from-file=keys.txt" in out
    assert "submit   systolic launch serve gs://bucket/chat" in out
    Path("chat").mkdir()
    Path("chat/bundle.json").touch()
    told = json.loads(
        run(f"{SERVE.replace('gs://bucket/chat', 'chat')} --variant kserve --json", capsys)[0]
    )
    assert told["bill"]["usd_per_hour"] == pytest.approx(9.6)
    assert told["bill"]["usd_per_hour_most"] == pytest.approx(38.4)
    assert "chat=/srv/model" in Path("launches/chat-v5e-8/serve.yaml").read_text()


def test_every_client_has_a_place_to_get_it() -> None:
    assert {"kubectl", "gcloud"} <= set(CLIENTS)
    assert {"launch", "runs", "status", "logs", "stop"} <= set(VERBS)


def state(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(run(f"status {name} --json", capsys)[0])


@pytest.mark.slow
def test_a_local_launch_that_cannot_train_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """End to end with real processes; the first finds at once that its folder is not empty."""
    Path("runs/taken").mkdir(parents=True)
    Path("runs/taken/something").touch()
    line = "launch digits --on cpu --via local --name taken --submit"
    run(line, capsys)
    assert "taken is running" in run(line, capsys, 1)[1]
    while (told := state("taken", capsys))["phase"] in ("starting", "running"):
        time.sleep(0.2)
    assert (told["phase"], told["codes"]) == ("failed", [2])
    out, _ = run("logs -f taken", capsys)
    assert "is not empty and not a run" in out
    assert "--submit continues it" in run("status taken", capsys)[0]
    assert "not running (failed)" in run("stop taken", capsys)[0]
    assert "taken  local  cpu    failed" in run("runs", capsys)[0]
    # After a second start, the state file of the first supervisor is not used.
    run(line, capsys)
    told = json.loads((Path("launches/taken/process.json")).read_text())
    (first,) = json.loads(run("runs --json", capsys)[0])["runs"]
    assert first["phase"] in ("starting", "running") or first["pid"] == told["pid"]
    run("stop taken", capsys)


@pytest.mark.slow
def test_a_killed_process_costs_at_most_a_checkpoint_interval(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two processes train; one is killed and all restart; a stop saves, and the same command continues."""
    root = Path(__file__).parents[2]
    recipe = root / "tests" / "training" / "tiny.py"
    line = f"launch {recipe}:job --on 4xcpu --processes 2 --via local --name two --checkpoints.every 20 --steps 100000 --submit"
    checkpoints = tmp_path / "runs" / "two" / "checkpoints"
    run(line, capsys)

    def saved() -> int:
        return max((int(p.name) for p in checkpoints.glob("[0-9]*") if p.name.isdigit()), default=0)

    def reach(step: int) -> None:
        while saved() < step:
            assert state("two", capsys)["phase"] in ("starting", "running")
            time.sleep(0.1)

    reach(40)
    os.kill(state("two", capsys)["running"][1]["pid"], 9)
    while state("two", capsys).get("attempt", 0) == 0:
        time.sleep(0.1)
    before = saved()
    reach(before + 40)
    assert "two: stopped" in run("stop two", capsys)[0]
    last = saved()
    run(line, capsys)
    reach(last + 20)
    run("stop two", capsys)
    starts = [
        json.loads(text)
        for text in (tmp_path / "runs" / "two" / "metrics.jsonl").read_text().splitlines()
        if '"kind": "start"' in text
    ]
    assert [one["resumed_from"] for one in starts][1:] == [pytest.approx(before, abs=20), last]
