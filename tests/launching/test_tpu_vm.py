"""Queued resources: names, runtimes and sizes of every slice, and the scripts run with a client that is recorded."""

import os
import re
import shutil
import subprocess
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest

from systolic.core.errors import OptionError
from systolic.launching import Purchase, Site, prepare
from systolic.launching.tpu_vm import RUNTIMES, create_flags
from tests.launching.made import HEADER, launch, shellcheck, slices

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
    "topology",
    "type",
}
"""Of those that ``gcloud compute tpus queued-resources create --help`` lists in Google Cloud SDK 528.0.0."""


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
        one_machine = prod(on.topology) == 8 and on.chip.name in ("v5e", "v6e")
        assert hosts == (on.num_slices if one_machine else on.num_hosts), on.name


def test_how_the_chips_are_paid_for() -> None:
    assert "spot" in flags(purchase=Purchase.spot)
    assert "reserved" in flags(purchase=Purchase.reserved)
    assert not {"spot", "reserved"} & set(flags())


def test_shapes_without_a_name() -> None:
    found = flags("v4:4x4x16")
    assert (found["type"], found["topology"]) == ("v4", "4x4x16")
    with pytest.raises(OptionError, match="v5p:4x4x64 has no name in Cloud TPU"):
        prepare("tpu-vm", launch("v5p:4x4x64"))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"on": "tpu7x-8"}, "through GKE: --via gke"),
        ({"on": "8xh100"}, "not a slice of Cloud TPU"),
        ({"site": Site()}, "needs a zone; add --zone us-west4-a"),
        ({"site": Site(zone="us-east5")}, "is a region.*--zone us-east5-a"),
        ({"site": Site(zone="moon")}, "zone is 'moon'"),
        ({"site": Site(zone="us-east5-b", project="x")}, "project is 'x'"),
        ({"site": Site(zone="us-east5-b", network="a b")}, "network is 'a b'"),
        ({"site": Site(zone="us-east5-b", service_account="$x")}, "service-account is"),
        ({"run": "runs/lm"}, "lost with 4 machines"),
        ({"on": "v5e-8", "run": "/runs/lm"}, "lost with the machine"),
        ({"name": "a" * 59}, "has 59 characters; a TPU's name takes 58"),
    ],
)
def test_mistakes_are_one_line(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        prepare("tpu-vm", launch(**fields))
    assert "\n" not in str(caught.value)


def test_a_zone_that_is_not_listed_for_the_chip_is_named() -> None:
    def notes(zone: str, **fields: Any) -> str:
        return "\n".join(prepare("tpu-vm", launch(site=Site(zone=zone), **fields)).notes)

    assert "us-east5-b may have no v5e: Google's list of zones has it in us-west4-a" in notes(
        "us-east5-b"
    )
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


GCLOUD = """#!{python}
import pathlib, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
verb = words[3]
with (here / "calls").open("a") as out:
    out.write(" ".join(words[3:]) + "\\n")
states = here / "states"
if verb == "describe":
    left = states.read_text().split()
    if left[0] == "ABSENT":
        sys.exit("NOT_FOUND")
    print(left[0])
    if len(left) > 1:
        states.write_text(" ".join(left[1:]))
elif verb in ("create", "delete"):
    left = states.read_text().split()
    if left[0] in ("ABSENT", "FAILED", "SUSPENDED"):
        states.write_text(" ".join(left[1:]) or "ABSENT")
elif verb == "ssh" and "host.sh" in words[-3]:
    codes = (here / "codes").read_text().split()
    (here / "codes").write_text(" ".join(codes[1:]))
    sys.exit(int(codes[0]))
"""
"""A client that notes its calls; states of the TPUs and exit codes of the training come from files."""


def run_script(folder: Path, states: str, codes: str, verb: str = "run", **fields: Any) -> Any:
    for name, text in prepare("tpu-vm", launch(**fields)).files.items():
        (folder / name).write_text(text)
    client = folder / "gcloud"
    client.write_text(GCLOUD.format(python=sys.executable))
    client.chmod(0o755)
    (folder / "states").write_text(states)
    (folder / "codes").write_text(codes)
    return subprocess.run(
        ["bash", folder / "tpu.sh", verb],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SYSTOLIC_WAIT_SECONDS": "0"},
        text=True,
        capture_output=True,
        timeout=60,
    )


def verbs(folder: Path) -> list[str]:
    calls = [line.split()[0] for line in (folder / "calls").read_text().splitlines()]
    return [verb for verb in calls if verb != "describe"]


def test_the_training_ends_with_the_deletion(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ABSENT WAITING_FOR_RESOURCES PROVISIONING ACTIVE", "0")
    assert done.returncode == 0, done.stderr
    assert verbs(tmp_path) == ["create", "ssh", "scp", "ssh", "delete"]
    calls = (tmp_path / "calls").read_text()
    assert (
        "create lm --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite" in calls
    )
    assert calls.count("--zone=us-east5-b --project=my-project") == len(calls.splitlines())
    assert "TPUs: WAITING_FOR_RESOURCES\nTPUs: PROVISIONING\nTPUs: ACTIVE" in done.stdout


def test_after_a_preemption_the_tpus_are_asked_for_again(tmp_path: Path) -> None:
    states = "ABSENT ACTIVE SUSPENDED SUSPENDED PROVISIONING ACTIVE"
    done = run_script(tmp_path, states, "255 0", purchase=Purchase.spot)
    assert done.returncode == 0, done.stderr
    assert verbs(tmp_path) == [
        "create",
        "ssh",
        "scp",
        "ssh",
        "delete",
        "create",
        "ssh",
        "scp",
        "ssh",
        "delete",
    ]
    assert "restart 1 of 10: the run continues" in done.stdout
    times = [line.split()[0] for line in (tmp_path / "times.log").read_text().splitlines()]
    assert times == ["up", "down", "up", "down"]


def test_after_a_loss_fewer_slices_are_asked_for(tmp_path: Path) -> None:
    lost = "ABSENT PROVISIONING ACTIVE SUSPENDED SUSPENDED WAITING_FOR_RESOURCES ACTIVE"
    fewer = {"on": "2xv5e-16", "min_slices": 1, "rejoin_seconds": 0}
    done = run_script(tmp_path, lost, "255 0", **fewer)
    assert done.returncode == 0, done.stderr
    again = ["create", "ssh", "scp", "ssh", "delete"]
    assert verbs(tmp_path) == [*again, "create", "delete", *again]
    calls = [one for one in (tmp_path / "calls").read_text().splitlines() if "create" in one]
    # It waits for all of them at first.
    assert ["--node-count=2" in one for one in calls] == [True, True, False]
    assert "--node-id=lm" in calls[-1]
    assert "have not come back in 0 s; the run goes on with 1 of 2" in done.stdout
    host = (tmp_path / "host.sh").read_text()
    assert "--for-devices 32 --run bucket/runs/lm" in host


def test_a_training_that_fails_for_good_leaves_no_tpus(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ABSENT ACTIVE", "1 1", restarts=1)
    assert done.returncode == 1
    assert verbs(tmp_path) == ["create", *["ssh", "scp", "ssh"] * 2, "delete"]
    assert "no restarts are left" in done.stderr


def test_machines_are_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    run_script(tmp_path, "ABSENT ACTIVE", "0", keep=True)
    assert verbs(tmp_path) == ["create", "ssh", "scp", "ssh"]


def test_a_stop_asks_the_training_to_save_first(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ACTIVE", "0", "stop")
    assert done.returncode == 0, done.stderr
    assert verbs(tmp_path) == ["ssh", "delete"]
    assert "host.sh stop" in (tmp_path / "calls").read_text()


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
sys.exit(3 if "--fail" in sys.argv else 0)
"""


def host(folder: Path, values: dict[str, str], *options: str) -> tuple[list[Any], dict[str, str]]:
    """The command that runs host.sh with a machine's metadata, and its environment."""
    text = prepare("tpu-vm", launch(options=options)).files["host.sh"]
    (folder / "env" / "bin").mkdir(parents=True)
    (folder / "host.sh").write_text(text)
    for name, content in (("curl", CURL), ("env/bin/systolic", SYSTOLIC), ("gcsfuse", GCSFUSE)):
        (folder / name).write_text(content.format(python=sys.executable, values=values))
        (folder / name).chmod(0o755)
    environ = {n: v for n, v in os.environ.items() if not n.startswith("JAX_")}
    return ["bash", folder / "host.sh"], environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


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
    command, environ = host(tmp_path, values)
    done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "['10.0.0.3:8476', '2', '1', 'tpu,cpu']" in done.stdout
    assert (tmp_path / "mounted").read_text().endswith(" bucket bucket")


def test_machines_of_several_slices_are_numbered_through(tmp_path: Path) -> None:
    several = "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.9:8080'"
    values = {"agent-worker-number": "1", "worker-network-endpoints": "a,b", "tpu-env": several}
    command, environ = host(tmp_path, values)
    done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=60)
    assert "['10.0.0.9:8476', '4', '3', 'tpu,cpu']" in done.stdout, done.stderr


def test_a_machine_alone_is_no_job_of_several_and_its_exit_code_is_told(tmp_path: Path) -> None:
    values = {"agent-worker-number": "0", "worker-network-endpoints": "a", "tpu-env": ""}
    command, environ = host(tmp_path, values, "--fail")
    done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert "[None, None, None, 'tpu,cpu']" in done.stdout


def test_the_training_outlives_its_connection_and_saves_at_a_stop(tmp_path: Path) -> None:
    values = {"agent-worker-number": "0", "worker-network-endpoints": "a", "tpu-env": ""}
    command, environ = host(tmp_path, values, "--sleep")
    first = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    while not (tmp_path / "ready").exists():
        assert first.poll() is None
        time.sleep(0.02)
    first.kill()
    first.wait()
    again = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    stopped = subprocess.run([*command, "stop"], env=environ, timeout=60)
    assert stopped.returncode == 0
    told, _ = again.communicate(timeout=60)
    log = (tmp_path / "host.log").read_text()
    assert log.endswith("saved\n")
    assert len(re.findall("JAX_|tpu,cpu", log)) == 1, "started once"
    assert "tpu,cpu" in told
