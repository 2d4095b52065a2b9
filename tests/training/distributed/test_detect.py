"""Detection of peers from environments recorded on each platform."""

import http.server
import json
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from systolic.core.errors import OptionError, RunError
from systolic.training.distributed import detect
from systolic.training.distributed.detect import Member, find, slurm_hosts

RECORDED = json.loads((Path(__file__).parents[2] / "recorded" / "platforms.json").read_text())


@pytest.fixture
def met(tmp_path: Path, request: Any) -> Generator[tuple[dict[str, str], Path]]:
    """Environment and root folder of a recorded platform, with its metadata behind a local server."""
    recorded = RECORDED[request.param]
    for name in recorded.get("files", []):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    attributes = recorded.get("metadata", {})

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, _, name = self.path.partition("/computeMetadata/v1/instance/attributes/")
            known = name in attributes and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(attributes.get(name, "").encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        detect._attribute.cache_clear()
        yield (
            recorded["environment"] | {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"},
            tmp_path,
        )
        server.shutdown()
    detect._attribute.cache_clear()


@pytest.mark.parametrize("met", ["cloud-tpu"], indirect=True)
def test_a_metadata_server_that_fails_is_not_taken_for_a_single_host(
    met: tuple[dict[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ, root = met
    monkeypatch.setattr(detect.time, "sleep", lambda _: None)
    with pytest.raises(RunError, match=r"does not answer .*refused"):
        find(environ | {"GCE_METADATA_IP": "127.0.0.1:1"}, root)
    # Outside Google Cloud the server has no address, and other devices have such files.
    assert find(environ | {"GCE_METADATA_IP": "metadata.invalid"}, root) is None


def told(place: Member) -> tuple[str, int, int, str]:
    return place.by, place.index, place.count, place.coordinator


FOUND = {
    "slurm": ("Slurm", 1, 2, "node1:61441"),
    "open-mpi": ("Open MPI", 1, 2, "127.0.0.1:65128"),
    "gke": ("GKE", 3, 4, "train-slice-0-0.train:8476"),
    "cloud-tpu": ("Cloud TPU", 1, 2, "10.130.0.10:8476"),
    "cloud-tpu-slices": ("Cloud TPU", 2, 4, "10.130.0.10:8476"),
    "skypilot": ("SkyPilot", 1, 2, "172.31.10.4:8476"),
}
ALONE = ["slurm-batch", "gke-one-host", "gke-gpu-pod", "cloud-tpu-one", "colab-tpu", "kaggle-tpu"]


@pytest.mark.parametrize(("met", "expected"), FOUND.items(), indirect=["met"])
def test_peers_are_found(met: Any, expected: tuple[str, int, int, str]):
    place = find(*met)
    assert place is not None
    assert told(place) == expected
    assert detect.belongs(*met)


@pytest.mark.parametrize("met", [*ALONE, "local"], indirect=True)
def test_a_process_on_its_own(met: Any):
    assert find(*met) is None
    assert not detect.belongs(*met)


@pytest.mark.parametrize("met", ["mpich"], indirect=True)
def test_mpi_that_tells_no_address_needs_a_coordinator(met: Any):
    environ, root = met
    with pytest.raises(OptionError, match=r"process 1 of 2.*--coordinator HOST:PORT"):
        find(environ, root)
    place = find(environ | {detect.ADDRESS: "10.0.0.2:4000"}, root)
    assert place is not None
    assert told(place) == ("MPI", 1, 2, "10.0.0.2:4000")


def test_open_mpi_4_and_5_over_several_hosts():
    several = RECORDED["open-mpi"]["environment"] | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    place = find(several)
    assert place is not None
    assert place.coordinator.startswith("node1:")
    uri = "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
    place = find(several | {"OMPI_MCA_orte_hnp_uri": uri})
    assert place is not None
    assert place.coordinator.startswith("10.96.0.1:")


@pytest.mark.parametrize("met", ["cloud-tpu"], indirect=True)
def test_processes_are_named_by_their_hosts(met: Any):
    place = find(*met)
    assert place is not None
    assert place.name(1) == "process 1 on 10.130.0.31"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[001-003,007],login1", ["node001", "node002", "node003", "node007", "login1"]),
        ("a[1-2]-gpu,b", ["a1-gpu", "a2-gpu", "b"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("", []),
    ],
)
def test_lists_of_slurm(text: str, hosts: list[str]):
    assert slurm_hosts(text) == hosts


def test_tasks_of_slurm_by_host():
    environ = RECORDED["slurm"]["environment"] | {
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_NODELIST": "n[1-3]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    }
    place = find(environ)
    assert place is not None
    assert place.hosts == ("n1", "n1", "n2", "n2", "n3")


COMPLETE = {detect.ADDRESS: "10.0.0.2:1234", detect.COUNT: "4", detect.INDEX: "3"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({detect.INDEX: "4"}, "process is 4 of 4"),
        ({detect.COUNT: "four"}, "'four'"),
        ({detect.ADDRESS: "10.0.0.2"}, "HOST:PORT"),
        ({detect.ADDRESS: "10.0.0.2:99999"}, "a port from 1 to 65535"),
    ],
)
def test_a_wrong_description_is_refused(changed: dict[str, str], message: str):
    place = find(COMPLETE)
    assert place is not None
    assert told(place) == ("an explicit coordinator", 3, 4, "10.0.0.2:1234")
    with pytest.raises(OptionError, match=message):
        find(COMPLETE | changed)


def test_an_address_alone_is_no_description():
    with pytest.raises(OptionError, match="JAX_NUM_PROCESSES is not set"):
        find({detect.ADDRESS: "10.0.0.2:1234"})


@pytest.mark.parametrize("given", [{detect.COUNT: "2"}, {detect.INDEX: "1"}])
def test_a_number_alone_does_not_train_alone(given: dict[str, str]):
    assert detect.belongs(given)
    with pytest.raises(OptionError, match="JAX_COORDINATOR_ADDRESS is not set"):
        find(given)


@pytest.mark.parametrize(
    ("platform", "missing", "count"),
    [
        ("gke", "TPU_WORKER_ID", "MEGASCALE_NUM_SLICES is 2"),
        ("gke", "TPU_WORKER_HOSTNAMES", "MEGASCALE_NUM_SLICES is 2"),
        ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS is 2"),
        ("skypilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES is 2"),
        ("open-mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE is 2"),
        ("mpich", "PMI_RANK", "PMI_SIZE is 2"),
    ],
)
def test_one_of_several_that_nothing_places_does_not_train_alone(
    platform: str, missing: str, count: str, tmp_path: Path
):
    environ = dict(RECORDED[platform]["environment"])
    del environ[missing]
    assert detect.belongs(environ, tmp_path)
    with pytest.raises(OptionError, match=f"{count}, and {missing} is not set.*--coordinator"):
        find(environ, tmp_path)


def test_slices_without_a_coordinator_are_refused(tmp_path: Path):
    environ = dict(RECORDED["gke"]["environment"])
    del environ["MEGASCALE_COORDINATOR_ADDRESS"]
    with pytest.raises(OptionError, match=r"process 3 of 4.*--coordinator HOST:PORT"):
        find(environ, tmp_path)


def test_addresses_of_version_6(tmp_path: Path):
    hosts = {"TPU_WORKER_HOSTNAMES": "fd00::1,fd00::2", "TPU_WORKER_ID": "1"}
    place = find(hosts, tmp_path)
    assert place is not None
    assert told(place) == ("TPU", 1, 2, "[fd00::1]:8476")
