"""Cloud TPU VMs: names, runtimes and sizes of every slice, and the scripts run with a stand-in for gcloud."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from systolic.core.errors import OptionError
from systolic.launching import Purchase, Site, prepare
from systolic.launching.tpu_vm import RUNTIMES, TRIES, create_flags
from tests.launching.gcloud import ANSWERS, gcloud
from tests.launching.made import HEADER, executable, launch, shellcheck, slices

RENTED = [one for one in slices() if one.chip.name in RUNTIMES]
FLAGS = {
    "accelerator-type",
    "runtime-version",
    "node-id",
    "node-count",
    "node-prefix",
    "spot",
    "reserved",
    "network",
    "service-account",
    "labels",
    "topology",
    "type",
}
"""Some of the flags that ``gcloud compute tpus queued-resources create --help`` lists in Google Cloud SDK 528.0.0."""


def flags(*args: Any, **fields: Any) -> dict[str, str]:
    made = launch(*args, **fields)
    words = create_flags(made, made.on.num_slices)
    assert all(word.startswith("--") for word in words)
    return {word[2:].partition("=")[0]: word.partition("=")[2] for word in words}


def test_all_slices_agree_with_the_catalogue() -> None:
    assert {one.chip.name for one in RENTED} == set(RUNTIMES)
    for on in RENTED:
        found = flags(on.name)
        kind, _, number = found["accelerator-type"].rpartition("-")
        cores = 1 if kind in ("v5litepod", "v6e") else 2
        assert set(found) <= FLAGS
        assert int(number) == on.num_chips // on.num_slices * cores, on.name
        assert kind == ("v5litepod" if on.chip.name == "v5e" else on.chip.name), on.name
        assert found["runtime-version"] == RUNTIMES[on.chip.name], on.name
        assert int(found.get("node-count", 1)) == on.num_slices, on.name
        assert ("node-id" in found) == (on.num_slices == 1), on.name
        hosts = prepare("tpu-vm", launch(on.name)).hosts
        assert hosts == on.num_hosts, on.name


def test_how_the_chips_are_paid_for() -> None:
    assert "spot" in flags(purchase=Purchase.spot)
    assert "reserved" in flags(purchase=Purchase.reserved)
    assert not {"spot", "reserved"} & set(flags())


def test_shapes_without_a_name() -> None:
    found = flags("v4:4x4x16")
    assert (found["type"], found["topology"]) == ("v4", "4x4x16")
    with pytest.raises(OptionError, match="v5p:4x4x64 has no accelerator type in Cloud TPU"):
        prepare("tpu-vm", launch("v5p:4x4x64"))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"on": "tpu7x-8"}, "through GKE only, not as Cloud TPU VMs; give --via gke"),
        ({"on": "8xh100"}, "not a slice of Cloud TPU"),
        ({"site": Site()}, "needs a zone; add --zone us-west4-a"),
        ({"site": Site(zone="us-east5")}, "is a region.*--zone us-east5-a"),
        ({"site": Site(zone="moon")}, "zone is 'moon'"),
        ({"site": Site(zone="us-east5-b", project="x")}, "project is 'x'"),
        ({"site": Site(zone="us-east5-b", network="a b")}, "network is 'a b'"),
        ({"site": Site(zone="us-east5-b", service_account="$x")}, "service-account is"),
        ({"site": Site(zone="us-east5-b", reservation="mine")}, "can't select one by name; give"),
        ({"run": "runs/lm"}, "lost with the 4 machines"),
        ({"on": "v5e-8", "run": "/runs/lm"}, "lost with the machine"),
        ({"name": "a" * 59}, "has 59 characters; a TPU's name takes at most 58"),
    ],
)
def test_mistakes_are_one_line(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        prepare("tpu-vm", launch(**fields))
    assert "\n" not in str(caught.value)


def test_a_zone_that_is_not_listed_for_the_chip_is_named() -> None:
    def notes(zone: str, **fields: Any) -> str:
        return "\n".join(prepare("tpu-vm", launch(site=Site(zone=zone), **fields)).notes)

    assert "us-east5-b may have no v5e; Google lists it in us-west4-a" in notes("us-east5-b")
    assert "may have no" not in notes("us-west4-a")
    assert "may have no" not in notes("europe-west4-a")
    assert "may have no" not in notes("us-east5-b", purchase=Purchase.reserved)
    assert "us-central1-ai1a may have no v6e" in notes("us-central1-ai1a", on="v6e-16")


@pytest.mark.parametrize("fields", [{"keep": True}, {}, {"min_slices": 1}], ids=str)
def test_scripts_pass_shellcheck(tmp_path: Path, fields: dict[str, Any]) -> None:
    for name, text in prepare("tpu-vm", launch("2xv5e-16", **fields)).files.items():
        assert text.split("\n", 1)[1].startswith(HEADER)
        (tmp_path / name).write_text(text)
        shellcheck(tmp_path / name)


def run_script(
    folder: Path, states: str, codes: str, *words: str, scp: bool = True, **fields: Any
) -> Any:
    for name, text in prepare("tpu-vm", launch(**fields)).files.items():
        (folder / name).write_text(text)
    gcloud(folder, states, codes)
    if not scp:
        (folder / "scp").touch()
    return subprocess.run(
        ["bash", folder / "tpu.sh", *(words or ["run"])],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SYSTOLIC_WAIT_SECONDS": "0"},
        text=True,
        capture_output=True,
        timeout=60,
    )


def verbs(folder: Path) -> list[str]:
    calls = [line.split()[0] for line in (folder / "calls").read_text().splitlines()]
    return [verb for verb in calls if verb != "describe"]


def times(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "times.log").read_text().splitlines()]


def ended(folder: Path) -> str:
    return (folder / "ended").read_text().strip()


STARTED = ["ssh", "ssh", "scp", "ssh", "ssh"]
FAILED = [*STARTED, "ssh"]
TRAINED = [*FAILED, "ssh"]
"""Commands over SSH: whether a machine answers, copy, installation, start, then waiting for the end and its exit code."""


def test_the_training_ends_with_the_deletion(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ABSENT WAITING_FOR_RESOURCES PROVISIONING ACTIVE", "0")
    assert done.returncode == 0, done.stderr
    assert verbs(tmp_path) == ["create", *TRAINED, "delete"]
    calls = (tmp_path / "calls").read_text()
    assert (
        "create lm --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite" in calls
    )
    assert "--labels=systolic_launch=0a1b2c3d" in calls
    assert calls.count("--zone=us-east5-b --project=my-project") == len(calls.splitlines())
    assert "TPUs: WAITING_FOR_RESOURCES\nTPUs: PROVISIONING\nTPUs: ACTIVE" in done.stdout
    assert (times(tmp_path), ended(tmp_path)) == (["up", "down"], "0")


def test_a_preemption_costs_one_restart_however_long_it_lasts(tmp_path: Path) -> None:
    states = "ABSENT ACTIVE SUSPENDING SUSPENDING SUSPENDING SUSPENDED PROVISIONING ACTIVE"
    done = run_script(tmp_path, states, "255 0", purchase=Purchase.spot, restarts=1)
    assert done.returncode == 0, done.stderr
    assert verbs(tmp_path) == ["create", *FAILED, "delete", "create", *TRAINED, "delete"]
    assert "restart 1 of 1: continuing" in done.stdout
    assert times(tmp_path) == ["up", "down", "up", "down"]


def test_tpus_that_vanish_are_not_billed_while_new_ones_are_waited_for(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ABSENT ACTIVE ABSENT PROVISIONING ACTIVE", "255 0", restarts=1)
    assert done.returncode == 0, done.stderr
    assert times(tmp_path) == ["up", "down", "up", "down"]


def test_after_a_loss_fewer_slices_are_asked_for(tmp_path: Path) -> None:
    lost = "ABSENT PROVISIONING ACTIVE SUSPENDED WAITING_FOR_RESOURCES WAITING_FOR_RESOURCES ACTIVE"
    fewer = {"on": "2xv5e-16", "min_slices": 1, "rejoin_seconds": 0}
    done = run_script(tmp_path, lost, "255 0", **fewer)
    assert done.returncode == 0, done.stderr
    lost = ["create", *FAILED, "delete"]
    assert verbs(tmp_path) == [*lost, "create", "delete", "create", *TRAINED, "delete"]
    calls = [one for one in (tmp_path / "calls").read_text().splitlines() if one[:6] == "create"]
    # First it waits for all of them.
    assert ["--node-count=2" in one for one in calls] == [True, True, False]
    assert "--node-id=lm" in calls[-1]
    assert "have not come back in 0 s; the run continues with 1 of 2" in done.stdout
    up = [line.split()[2:] for line in (tmp_path / "times.log").read_text().splitlines()]
    assert [one for one in up if one] == [["2"], ["1"]]
    host = (tmp_path / "host.sh").read_text()
    assert "--for-devices 32 --run bucket/runs/lm" in host


def test_a_connection_that_breaks_is_no_restart(tmp_path: Path) -> None:
    (tmp_path / "connections").write_text("255 0 0 255 255 0")
    done = run_script(tmp_path, "ABSENT ACTIVE", "255 255 0", restarts=0)
    assert done.returncode == 0, done.stderr
    # It is started once; only the wait is repeated.
    broken, again = ["ssh"], ["ssh", "ssh"]
    tried = [*broken, *FAILED, *again, *broken, *broken, *again, "ssh"]
    assert verbs(tmp_path) == ["create", *tried, "delete"]
    assert "a running training continues meanwhile" in done.stderr
    assert "restart" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("code", ["nobody", "255"])
def test_machines_that_no_longer_answer_are_given_back_and_asked_for_again(
    tmp_path: Path, code: str
) -> None:
    """Cloud TPU still reports them as active; its client exits with 0 if a machine is gone."""
    (tmp_path / "connections").write_text(" ".join(["0", *[code] * (TRIES - 1), "0"]))
    done = run_script(tmp_path, "ABSENT ACTIVE", "255 0", restarts=1)
    assert done.returncode == 0, done.stderr
    lost = [*FAILED, *["ssh"] * (TRIES - 1)]
    assert verbs(tmp_path) == ["create", *lost, "delete", "create", *TRAINED, "delete"]
    assert "restart 1 of 1" in done.stdout
    assert "did not answer over SSH 10 times" in done.stderr


def test_machines_that_never_answer_are_not_asked_for_again(tmp_path: Path) -> None:
    (tmp_path / "connections").write_text("255")
    done = run_script(tmp_path, "ABSENT ACTIVE", "0", restarts=3)
    assert (done.returncode, ended(tmp_path)) == (1, "1")
    assert verbs(tmp_path) == ["create", *["ssh"] * TRIES, "delete"]
    assert "its network must allow this machine on port 22" in done.stderr


def test_machines_that_do_not_say_how_the_training_ended_have_not_trained(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ABSENT ACTIVE", "nobody 1", restarts=0)
    assert done.returncode == 1
    assert "no restarts left" in done.stderr


def test_tpus_without_their_label_are_known_by_their_time(tmp_path: Path) -> None:
    (tmp_path / "unlabelled").touch()
    done = run_script(tmp_path, "ABSENT ACTIVE", "0", keep=True)
    assert done.returncode == 0, done.stderr
    assert run_script(tmp_path, "ACTIVE", "0", "check").returncode == 0
    # Others of the same name were created at another time.
    (tmp_path / "made").write_text("2026-11-23T11:00:00.123456Z")
    done = run_script(tmp_path, "ACTIVE", "0", "check")
    assert "are not from this launch" in done.stderr
    assert (tmp_path / "created").read_text().strip() == "2026-11-23T10:00:00.123456Z"


def test_a_training_that_fails_for_good_leaves_no_tpus(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ABSENT ACTIVE", "1 1", restarts=1)
    assert done.returncode == 1
    assert verbs(tmp_path) == ["create", *FAILED * 2, "delete"]
    assert "no restarts left" in done.stderr
    assert ended(tmp_path) == "1"


def test_a_command_that_the_training_refuses_is_not_tried_again(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ABSENT ACTIVE", "64 0")
    assert (done.returncode, ended(tmp_path)) == (2, "2")
    assert verbs(tmp_path) == ["create", *FAILED, "delete"]
    assert "rejected its command line" in done.stderr


def test_what_an_earlier_launch_left_does_not_train_when_copying_fails(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ABSENT ACTIVE", "0", restarts=1, scp=False)
    assert done.returncode == 1
    assert verbs(tmp_path) == ["create", *["ssh", "ssh", "scp"] * 2, "delete"]


def test_machines_are_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    run_script(tmp_path, "ABSENT ACTIVE", "0", keep=True)
    assert verbs(tmp_path) == ["create", *TRAINED]
    (tmp_path / "calls").unlink()
    # The same launch command uses its own TPUs.
    done = run_script(tmp_path, "ACTIVE", "0", keep=True)
    assert done.returncode == 0, done.stderr
    assert verbs(tmp_path) == TRAINED


@pytest.mark.parametrize("words", [("check",), ("run",), ("stop",)], ids=str)
@pytest.mark.parametrize("owner", ["ffff0000", " "], ids=["of another launch", "without a label"])
def test_tpus_of_others_are_left(tmp_path: Path, owner: str, words: tuple[str, ...]) -> None:
    done = run_script(tmp_path, f"ACTIVE:{owner.strip() or 'None'}", "0", *words)
    assert verbs(tmp_path) == []
    assert "TPUs lm exist (ACTIVE) but are not from this launch" in done.stderr
    assert (done.returncode == 0) == (words == ("stop",))


def test_a_name_that_is_taken_meanwhile_is_not_deleted(tmp_path: Path) -> None:
    """Another request for the name comes between the check and the creation."""
    done = run_script(tmp_path, "ANYTHING ABSENT", "0", "check")
    assert done.returncode == 0, done.stderr
    done = run_script(tmp_path, "ANYTHING ANYTHING ACTIVE:ffff0000", "0")
    assert done.returncode == 1
    assert verbs(tmp_path) == ["create"]
    assert "ALREADY_EXISTS" in done.stderr


def test_a_stop_asks_the_training_to_save_first(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ACTIVE", "0", "stop")
    assert done.returncode == 0, done.stderr
    assert verbs(tmp_path) == ["ssh", "delete"]
    assert "host.sh stop && echo here" in (tmp_path / "calls").read_text()


def test_a_stop_says_where_there_is_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ABSENT", "0", "stop")
    assert done.returncode == 0, done.stderr
    assert "no TPUs lm exist (--zone=us-east5-b --project=my-project)" in done.stdout
    assert times(tmp_path) == ["down"]


@pytest.mark.parametrize("answer", ["EXPIRED", "DENIED", "NO_PROJECT"])
def test_a_stop_without_an_answer_is_none(tmp_path: Path, answer: str) -> None:
    done = run_script(tmp_path, answer, "0", "stop")
    assert done.returncode == 1
    assert ANSWERS[answer] in done.stderr
    assert "they may exist, and cost money" in done.stderr
    assert verbs(tmp_path) == []
    assert not (tmp_path / "times.log").exists()
    assert run_script(tmp_path, answer, "0", "status").returncode == 1


def test_a_deletion_that_fails_is_not_the_end(tmp_path: Path) -> None:
    """The session expires during the training; after the user logs in again, the TPUs are deleted."""
    states = "ABSENT EXPIRED ACTIVE EXPIRED ACTIVE EXPIRED ACTIVE"
    done = run_script(tmp_path, states, "0")
    assert done.returncode == 0, done.stderr
    assert verbs(tmp_path) == ["create", *TRAINED, "delete", "delete"]
    assert "could not delete TPUs lm, which cost money as long as they exist" in done.stderr
    assert times(tmp_path) == ["up", "down"]
    failed = run_script(tmp_path, "ACTIVE EXPIRED", "0", "stop")
    assert failed.returncode == 1
    assert times(tmp_path) == ["up", "down"]


def test_the_project_is_always_given(tmp_path: Path) -> None:
    nowhere = Site(zone="us-east5-b")
    done = run_script(tmp_path, "ABSENT ACTIVE", "0", "stop", site=nowhere)
    assert (done.returncode, done.stdout) == (2, "")
    assert "bash tpu.sh stop --project=PROJECT" in done.stderr
    assert not (tmp_path / "calls").exists()
    done = run_script(tmp_path, "ABSENT ACTIVE", "0", "run", "--project=mine", site=nowhere)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text()
    assert calls.count("--zone=us-east5-b --project=mine") == len(calls.splitlines())


GCSFUSE = """#!{python}
import pathlib, sys
(pathlib.Path(__file__).parent / "mounted").write_text(" ".join(sys.argv[1:]))
"""
CURL = """#!{python}
import sys
name = sys.argv[-1].rpartition("/")[2]
values = {values!r}
if name not in values:
    sys.exit(22)
print(values[name])
"""
SYSTOLIC = """#!{python}
import os, pathlib, signal, sys, time
names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_PLATFORMS")
print([os.environ.get(name) for name in names], flush=True)
assert sys.argv[sys.argv.index("--run") + 1] == "bucket/runs/lm"
if "--sleep" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(143)))
    pathlib.Path("ready").touch()
    time.sleep(60)
sys.exit(3 if "--fail" in sys.argv else 2 if "--refuse" in sys.argv else 0)
"""
SLEEP = "#!/bin/sh\nexec /bin/sleep 0.1\n"
TAIL = '#!/bin/sh\nexec /usr/bin/tail --sleep-interval=0.05 "$@"\n'
"""Both look at a training again sooner than after a second."""
REAPING = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Runs a command that collects a training whose parent has ended, as a machine's init does; a container's may do so late."""
PYTHON = """#!{python}
import pathlib, shutil, sys
words = sys.argv[1:]
if words[:3] == ["-m", "uv", "venv"]:
    pathlib.Path(words[-1], "bin").mkdir(parents=True)
elif words[:3] == ["-m", "uv", "pip"]:
    (wheel,) = [word for word in words if word.endswith(".whl")]
    shutil.copy(wheel, "env/bin/systolic")
    pathlib.Path("env/bin/systolic").chmod(0o755)
    with open("installed", "a") as out:
        out.write(wheel + "\\n")
"""
"""Python of the machine, whose uv installs a wheel that is the command itself."""


def host(folder: Path, values: dict[str, str], *options: str) -> tuple[list[Any], dict[str, str]]:
    """Command that runs host.sh with a machine's metadata, and its environment."""
    text = prepare("tpu-vm", launch(options=options)).files["host.sh"]
    for name in ("wheels", "code"):
        (folder / name).mkdir()
    (folder / "host.sh").write_text(text)
    (folder / "requirements.txt").write_text("# Python 3.11\n")
    tools = {"curl": CURL, "python3": PYTHON, "gcsfuse": GCSFUSE, "sleep": SLEEP, "tail": TAIL}
    for name, content in tools.items():
        executable(folder / name, content.replace("{values!r}", repr(values)))
    (folder / "wheels" / "systolic-1.whl").write_text(SYSTOLIC.format(python=sys.executable))
    environ = {n: v for n, v in os.environ.items() if not n.startswith("JAX_")}
    steps = 'for step in ${1:-install start wait}; do bash "$0" "$step" || exit; done'
    reaping = [sys.executable, "-S", "-c", REAPING]
    return [*reaping, "bash", "-c", steps, folder / "host.sh"], environ | {
        "PATH": f"{folder}:{os.environ['PATH']}"
    }


def trained(folder: Path, values: dict[str, str], *options: str) -> str:
    """What a training prints that host.sh starts with a machine's metadata, without host.sh's own wait for it."""
    command, environ = host(folder, values, *options)
    done = subprocess.run([*command, "install start"], env=environ, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    while not (folder / "code_of_exit").exists():
        time.sleep(0.02)
    return (folder / "host.log").read_text()


ENDPOINTS = {
    "unknown:unknown:10.0.0.3,unknown:unknown:10.0.0.4": "10.0.0.3",
    "10.0.0.3,10.0.0.4": "10.0.0.3",
}


@pytest.mark.skipif(not shutil.which("setsid"), reason="a Linux script")
@pytest.mark.parametrize("endpoints", ENDPOINTS)
def test_a_machine_finds_its_peers_in_the_metadata(tmp_path: Path, endpoints: str) -> None:
    values = {
        "agent-worker-number": "1",
        "worker-network-endpoints": endpoints,
        "tpu-env": "ZONE: 'x'",
    }
    assert "['10.0.0.3:8476', '2', '1', 'tpu,cpu']" in trained(tmp_path, values)
    assert (tmp_path / "mounted").read_text().endswith(" bucket bucket")


def test_machines_of_several_slices_are_numbered_through(tmp_path: Path) -> None:
    several = "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.9:8080'"
    values = {"agent-worker-number": "1", "worker-network-endpoints": "a,b", "tpu-env": several}
    assert "['10.0.0.9:8476', '4', '3', 'tpu,cpu']" in trained(tmp_path, values)


def test_a_machine_alone_is_no_job_of_several_and_its_exit_code_is_told(tmp_path: Path) -> None:
    command, environ = host(tmp_path, ALONE, "--fail")
    done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert "[None, None, None, 'tpu,cpu']" in done.stdout


ALONE = {"agent-worker-number": "0", "worker-network-endpoints": "a", "tpu-env": ""}


def test_a_command_that_is_refused_has_a_code_of_its_own(tmp_path: Path) -> None:
    command, environ = host(tmp_path, ALONE, "--refuse")
    assert subprocess.run(command, env=environ, capture_output=True, timeout=60).returncode == 64


def test_kept_machines_get_the_packages_of_the_next_launch(tmp_path: Path) -> None:
    command, environ = host(tmp_path, ALONE)

    def trained(*words: str) -> str:
        options = {"text": True, "capture_output": True, "timeout": 60}
        done = subprocess.run([*command, *words], env=environ, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    trained()
    trained()
    assert (tmp_path / "installed").read_text() == "wheels/systolic-1.whl\n"
    trained("clear")
    assert not (tmp_path / "wheels").exists()
    assert not (tmp_path / "code").exists()
    (tmp_path / "code").mkdir()
    (tmp_path / "wheels").mkdir()
    newer = SYSTOLIC.format(python=sys.executable) + "# newer\n"
    newer = newer.replace("sys.exit(3", "print('newer')\nsys.exit(3")
    (tmp_path / "wheels" / "systolic-2.whl").write_text(newer)
    assert "newer" in trained()
    assert (tmp_path / "installed").read_text().splitlines()[1:] == ["wheels/systolic-2.whl"]


def test_the_training_outlives_its_connection_and_saves_at_a_stop(tmp_path: Path) -> None:
    command, environ = host(tmp_path, ALONE, "--sleep")
    first = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    while not (tmp_path / "ready").exists():
        assert first.poll() is None
        time.sleep(0.02)
    first.kill()
    first.wait()
    # Its files are left unchanged, and the script reports that the files now differ.
    subprocess.run([*command, "clear"], env=environ, timeout=60, check=True)
    (tmp_path / "code" / "recipe.py").touch()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    again = subprocess.Popen(command, env=environ, text=True, **pipes)
    assert again.stdout is not None
    first_line = again.stdout.readline()
    stopped = subprocess.run([*command, "stop"], env=environ, timeout=60)
    assert stopped.returncode == 0
    told, errors = again.communicate(timeout=60)
    assert "was started with other files" in errors
    log = (tmp_path / "host.log").read_text()
    assert log.endswith("saved\n")
    assert len(re.findall("JAX_|tpu,cpu", log)) == 1, "started once"
    assert "tpu,cpu" in first_line + told
