"""SkyPilot: names and sizes of every slice, SkyPilot's own parser, and the script of the machines."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from systolic.chips import ChipKind
from systolic.core.errors import OptionError
from systolic.launching import Purchase, Site, prepare
from systolic.launching.skypilot import AGAIN, GPUS
from systolic.launching.tpu_vm import RUNTIMES
from tests.launching.made import HEADER, executable, launch, shellcheck, slices

RENTED = [
    one
    for one in slices()
    if one.chip.name in GPUS or (one.chip.name in RUNTIMES and one.num_slices == 1)
]
PARSER = """
import json, sys
import sky
for text in json.load(sys.stdin):
    task = sky.Task.from_yaml_str(text)
    (one,) = task.resources
    (name, count), = one.accelerators.items()
    print(json.dumps([task.name, task.num_nodes, name, count, one.use_spot, one.zone, one.accelerator_args]))
"""


def made(on: str = "v5e-16", **fields: Any) -> Any:
    return prepare("skypilot", launch(on, **{"site": Site(), **fields}))


def task(on: str = "v5e-16", **fields: Any) -> dict[str, Any]:
    return yaml.safe_load(made(on, **fields).files["task.yaml"])


def test_all_slices_agree_with_the_catalogue() -> None:
    assert {one.chip.name for one in RENTED} == {*GPUS, *RUNTIMES}
    for on in RENTED:
        found = task(on.name)
        ((name, count),) = found["resources"]["accelerators"].items()
        if on.chip.kind is ChipKind.gpu:
            assert (name, count * found["num_nodes"]) == (GPUS[on.chip.name], on.num_chips)
            assert found["num_nodes"] == on.num_hosts
            continue
        kind, _, number = name.rpartition("-")
        cores = 1 if on.chip.name in ("v5e", "v6e") else 2
        assert kind == f"tpu-{ {'v5e': 'v5litepod'}.get(on.chip.name, on.chip.name) }"
        assert (count, int(number), found["num_nodes"]) == (1, on.num_chips * cores, 1), on.name
        version = found["resources"]["accelerator_args"]["runtime_version"]
        assert version == RUNTIMES[on.chip.name]


def test_skypilots_own_parser_takes_the_tasks() -> None:
    """``SYSTOLIC_SKY_PYTHON`` is the Python of an environment with SkyPilot, whose requirements conflict with ours."""
    python = os.environ.get("SYSTOLIC_SKY_PYTHON")
    if not python:
        pytest.skip("SYSTOLIC_SKY_PYTHON is not set")
    names = [one.name for one in RENTED]
    texts = [made(name, purchase=Purchase.spot).files["task.yaml"] for name in names]
    site = Site(zone="us-west4-a")
    texts.append(made(site=site).files["task.yaml"])
    done = subprocess.run(
        [python, "-c", PARSER], input=json.dumps(texts), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(parsed) == len(texts)
    for text, one in zip(texts, parsed, strict=True):
        found = yaml.safe_load(text)
        ((name, count),) = found["resources"]["accelerators"].items()
        assert one[:5] == [
            found["name"],
            found["num_nodes"],
            name,
            count,
            found["resources"]["use_spot"],
        ]
    assert parsed[-1][5] == "us-west4-a"


RECOVERY = """
import json, sys, types
from sky.jobs.recovery_strategy import StrategyExecutor
given = json.load(sys.stdin)
for codes in ([75], [137, 75], [2], [2, 2], [1]):
    job = types.SimpleNamespace(restart_cnt_on_failure=0, **given)
    print([StrategyExecutor.should_restart_on_failure(job, codes) for _ in range(20)])
"""


def test_skypilot_starts_again_what_the_script_asks_for_only() -> None:
    python = os.environ.get("SYSTOLIC_SKY_PYTHON")
    if not python:
        pytest.skip("SYSTOLIC_SKY_PYTHON is not set")
    given = json.dumps(task()["resources"]["job_recovery"])
    words = [python, "-c", RECOVERY]
    done = subprocess.run(words, input=given, text=True, capture_output=True, check=True)
    again = [json.loads(line.lower()) for line in done.stdout.splitlines() if line[0] == "["]
    assert again == [[True] * 20] * 2 + [[False] * 20] * 3


ENDING = """#!{python}
import pathlib, sys
sys.exit(int((pathlib.Path(__file__).parent / "code").read_text()))
"""


def test_failures_are_counted_beside_the_run_and_a_refused_command_ends_the_job(
    tmp_path: Path,
) -> None:
    """Each attempt runs on new machines, which share only the bucket."""

    def ended(code: int, *words: str, machine: str = "a", job: str = "sky-1") -> int:
        folder = tmp_path / machine
        folder.mkdir(exist_ok=True)
        text = made("8xh100", restarts=2).files["run.sh"]
        (folder / "run.sh").write_text(text.replace("/gcs/", f"{tmp_path}/gcs/"))
        executable(folder / "env" / "bin" / "systolic", ENDING)
        (folder / "env" / "bin" / "code").write_text(str(code))
        executable(folder / "bin" / "python3", "#!/bin/sh\nexit 2\n")
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        environ = os.environ | {"PATH": path, "SKYPILOT_TASK_ID": job}
        command = ["bash", folder / "run.sh", *words]
        return subprocess.run(command, env=environ, capture_output=True, timeout=60).returncode

    noted = tmp_path / "gcs" / "bucket" / "runs" / "lm.failures"
    assert ended(2) == 2
    assert not noted.exists()
    assert ended(1) == AGAIN
    # A failed installation also counts: uv exits with 2.
    assert ended(0, "install", machine="b") == AGAIN
    assert ended(139, machine="c") == 1
    assert sorted(one.name for one in (noted / "sky-1").iterdir()) == ["0", "1", "2"]
    assert ended(1, job="sky-2") == AGAIN
    assert ended(0, job="sky-2") == 0
    assert [one.name for one in noted.iterdir()] == ["sky-1"]


def test_spot_zone_restarts_and_the_bucket() -> None:
    found = task(purchase=Purchase.spot, site=Site(zone="us-west4-a"), restarts=4)
    assert found["resources"]["use_spot"] is True
    assert found["resources"]["infra"] == "gcp/us-west4/us-west4-a"
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [AGAIN]}
    assert found["resources"]["job_recovery"] == recovery
    assert found["file_mounts"] == {"/gcs/bucket": {"source": "gs://bucket", "mode": "MOUNT"}}
    assert "infra" not in task("8xh100")["resources"]


@pytest.mark.parametrize("on", ["v5e-16", "16xh100"])
def test_files_say_what_made_them_and_the_script_passes_shellcheck(tmp_path: Path, on: str) -> None:
    files = made(on).files
    assert files["task.yaml"].startswith(HEADER)
    for name in ("run.sh", "managed.sh"):
        assert files[name].split("\n", 1)[1].startswith(HEADER)
        (tmp_path / name).write_text(files[name])
        shellcheck(tmp_path / name)


TRAIN = """#!{python}
import os, sys
from systolic.training.distributed.detect import find
found = find(os.environ)
place = found and [found.by, found.coordinator, found.count, found.index]
print(place, os.environ["JAX_PLATFORMS"], sys.argv[1:])
"""


def test_machines_with_gpus_find_their_peers_in_skypilots_environment(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(made("16xh100").files["run.sh"])
    executable(tmp_path / "env" / "bin" / "systolic", TRAIN)
    told = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    plain = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    words = ["bash", str(tmp_path / "run.sh")]
    out = subprocess.run(words, env=plain | told, text=True, capture_output=True, check=True).stdout
    found = "['SkyPilot', '10.0.0.1:8476', 2, 1] cuda,cpu ['train', 'lm', '--steps', '10'"
    assert out.startswith(found)
    told |= {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"}
    out = subprocess.run(words, env=plain | told, text=True, capture_output=True, check=True).stdout
    assert out.startswith("None cuda,cpu")
    assert "'/gcs/bucket/runs/lm', '--continue'" in out


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"on": "2xv5e-16"}, "2 slices, but a task of skypilot has one"),
        ({"on": "tpu7x-8"}, "not in SkyPilot's catalogue"),
        ({"on": "cpu"}, "not in SkyPilot's catalogue"),
        ({"run": "runs/lm"}, "lost with the 4 machines"),
        ({"purchase": Purchase.reserved}, "leave out --reserved"),
        ({"site": Site(zone="us-west4")}, "is a region"),
        ({"name": "a" * 41}, "a managed job takes at most 40"),
    ],
)
def test_mistakes_are_one_line(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        made(**fields)
    assert "\n" not in str(caught.value)
