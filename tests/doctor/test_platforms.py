"""Recorded environments of platforms: the detected kind, and findings about missing parts."""

from dataclasses import replace
from pathlib import Path

import pytest

from systolic.doctor import Finding, Machine, Status, gather
from systolic.doctor.checks import platform
from systolic.doctor.machine import MachineKind, Nvidia
from systolic.training.distributed import detect
from tests.doctor.machines import LAPTOP
from tests.training.distributed.test_detect import RECORDED

KINDS = {
    "cloud-tpu-one": MachineKind.cloud_tpu_vm,
    "gke": MachineKind.gke,
    "gke-one-host": MachineKind.gke,
    "gke-gpu-pod": MachineKind.pod,
    "colab-tpu": MachineKind.colab,
    "kaggle-tpu": MachineKind.kaggle,
    "skypilot": MachineKind.skypilot,
    "slurm": MachineKind.slurm,
    "slurm-batch": MachineKind.slurm,
    "local": MachineKind.cpu_host,
}


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata server, which does not answer here, is asked again at once."""
    monkeypatch.setattr(detect.time, "sleep", lambda _: None)


def met(name: str, root: Path, **changed: str) -> Machine:
    """A recorded platform as ``gather`` reads it, with variables changed; "" removes one."""
    for file in RECORDED[name].get("files", []):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    if "cloud-tpu" in name:
        bus = root / "sys/bus/pci/devices/0000:00:04.0"
        bus.mkdir(parents=True)
        (bus / "vendor").write_text("0x1ae0\n")
        (bus / "device").write_text("0x0062\n")
    environment = RECORDED[name]["environment"] | {"GCE_METADATA_IP": "127.0.0.1:1"} | changed
    detect._attribute.cache_clear()
    return gather(root, {key: value for key, value in environment.items() if value})


def loud(machine: Machine) -> list[Finding]:
    return [f for f in platform(machine) if f.status in (Status.warning, Status.failed)]


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_a_platform_is_known(name: str, kind: MachineKind, tmp_path: Path) -> None:
    assert met(name, tmp_path).place is kind


@pytest.mark.parametrize("name", ["gke", "colab-tpu", "kaggle-tpu", "slurm", "local"])
def test_nothing_is_missing_where_it_was_recorded(name: str, tmp_path: Path) -> None:
    assert not loud(met(name, tmp_path))


@pytest.mark.parametrize(
    ("name", "changed", "finding", "words"),
    [
        ("slurm-batch", {}, "Slurm", "has 2 tasks, but this process is no task of a step"),
        (
            "slurm-batch",
            {"SLURM_NTASKS": "", "SLURM_JOB_NUM_NODES": "2"},
            "Slurm",
            "has 2 nodes, but this process is no task",
        ),
        ("slurm", {"SLURM_JOB_GPUS": "0,1"}, "Slurm", "was allocated GPUs, but none"),
        ("gke-one-host", {}, "slice's hosts", "has 8 chips and this pod sees 4"),
        ("gke", {"MEGASCALE_SLICE_ID": ""}, "slices", "MEGASCALE_SLICE_ID is not"),
        ("skypilot", {}, "SkyPilot", "requested 8 GPUs per node, but this node shows 0"),
        ("mpich", {}, "peers", "but no coordinator"),
    ],
)
def test_what_is_missing(
    name: str, changed: dict[str, str], finding: str, words: str, tmp_path: Path
) -> None:
    [found] = loud(met(name, tmp_path, **changed))
    assert found.name == finding
    assert words in found.text


def test_a_pod_of_a_tpu_without_tpus(tmp_path: Path) -> None:
    machine = replace(met("gke", tmp_path), tpu_chips=0)
    assert "google.com/tpu" in loud(machine)[0].fix


def test_a_node_with_its_gpus_has_nothing_missing(tmp_path: Path) -> None:
    machine = replace(met("skypilot", tmp_path), nvidia=Nvidia(num_gpus=8, driver="580.82.07"))
    assert not loud(machine)


def test_one_of_several_is_told(tmp_path: Path) -> None:
    texts = [finding.text for finding in platform(met("gke", tmp_path))]
    assert any(text.startswith("process 3 of 4 (from GKE)") for text in texts)


def test_nothing_secret_is_read(tmp_path: Path) -> None:
    secret = "a token of the user's"
    machine = met("kaggle-tpu", tmp_path, KAGGLE_USER_SECRETS_TOKEN=secret)
    assert secret not in str(machine.to_json())


def test_a_laptop_is_silent() -> None:
    assert not platform(LAPTOP)
