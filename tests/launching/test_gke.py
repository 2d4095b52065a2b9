"""JobSets: chips, hosts, topology and selectors agree with ``systolic.slice`` for every slice of the catalogue."""

import importlib.util
import re
import subprocess
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systolic.chips import Slice, slice
from systolic.core.errors import LostError, OptionError
from systolic.launching import Purchase, Site, prepare
from systolic.launching.gke import escaped
from tests.launching.kubectl import stand_in
from tests.launching.made import (
    HEADER,
    documents,
    expanded,
    jobset,
    launch,
    passed,
    pod_of,
    shellcheck,
    slices,
)

ON_GKE = [one for one in slices() if one.chip.gke_accelerator is not None]
ACTIONS = {
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
}


def unread(given: Any, read: Any, path: str = "") -> list[str]:
    """Fields that are unknown, or parsed to another value."""
    if isinstance(given, dict) and isinstance(read, dict):
        found = [f"{path}.{name} is unknown" for name in given if name not in read]
        known = [name for name in given if name in read]
        return [*found, *(x for n in known for x in unread(given[n], read[n], f"{path}.{n}"))]
    if isinstance(given, list) and isinstance(read, list):
        return [x for one in zip(given, read, strict=True) for x in unread(*one, f"{path}[]")]
    return [] if given == read else [f"{path} is {read!r}"]


def unread_by_its_models(found: dict[str, Any]) -> list[str]:
    """Fields unknown to JobSet's models, which Kubeflow generates from its definition and Kubernetes'."""
    if importlib.util.find_spec("kubeflow_trainer_api") is None:
        return []
    models = importlib.import_module("kubeflow_trainer_api.models")
    return unread(found, models.JobsetV1alpha2JobSet.from_dict(found).to_dict())


def test_jobsets_own_models_read_every_field() -> None:
    pytest.importorskip("kubeflow_trainer_api")
    site = Site(namespace="ml", claim="shared", queue="research", service_account="trainer")
    fields = {"run": "/runs/lm", "code": {"a.py": "x"}, "purchase": Purchase.spot}
    found = jobset(prepare("gke", launch(site=site, **fields)))
    assert not unread_by_its_models(found)
    rule = found["spec"]["failurePolicy"]["rules"][0]
    rule["onJobFailureReason"] = rule.pop("onJobFailureReasons")
    told = [".spec.failurePolicy.rules[].onJobFailureReason is unknown"]
    assert unread_by_its_models(found) == told
    found["spec"]["replicatedJobs"][0]["replicas"] = "2"
    with pytest.raises(ValueError, match="replicas"):
        unread_by_its_models(found)


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_all_slices_agree_with_the_catalogue(chip: str) -> None:
    of_chip = [one for one in ON_GKE if one.chip.name == chip]
    assert len(of_chip) > 10
    for on in of_chip:
        prepared = prepare("gke", launch(on.name))
        found = jobset(prepared)
        agrees(on, found)
        # A pool of eight v5e or v6e chips has two nodes of four.
        assert prepared.hosts == max(on.num_hosts, on.num_chips // 4)


def agrees(on: Slice, found: dict[str, Any]) -> None:
    (replicated,) = found["spec"]["replicatedJobs"]
    job, pod = replicated["template"]["spec"], pod_of(found)
    (container,) = pod["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    labels = pod["nodeSelector"]
    topology = labels["cloud.google.com/gke-tpu-topology"].split("x")
    assert not unread_by_its_models(found), on.name
    assert replicated["replicas"] == on.num_slices, on.name
    nodes = max(on.num_hosts, on.num_chips // 4) // on.num_slices
    assert job["parallelism"] == job["completions"] == nodes, on.name
    assert chips * job["parallelism"] * on.num_slices == on.num_chips, on.name
    assert prod(map(int, topology)) * on.num_slices == on.num_chips, on.name
    assert tuple(map(int, topology)) == on.topology, on.name
    assert chips == prod(on.chips_per_host_bounds or ()), on.name
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert labels["cloud.google.com/gke-tpu-accelerator"] == on.chip.gke_accelerator
    assert len(labels["cloud.google.com/gke-tpu-topology"].split("x")) == len(on.topology)


def test_jobs_pass_kubernetes_own_schema() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    variants: list[dict[str, Any]] = [
        {"on": "v5e-1"},
        {"on": "v6e-8", "purchase": Purchase.spot},
        {"on": "2xv5p-128", "site": Site(service_account="trainer", namespace="ml")},
        {"on": "tpu7x-8", "run": "/runs/lm", "site": Site(claim="shared", queue="research")},
        {"on": "v4-16", "code": {"recipe.py": "x = 1\n", "more/part.py": "y = 2\n"}},
        {"on": "v5p-8", "purchase": Purchase.reserved, "site": Site(reservation="ours")},
    ]
    for fields in variants:
        for one in documents(prepare("gke", launch(**fields))):
            if one["kind"] == "JobSet":
                job = one["spec"]["replicatedJobs"][0]["template"]["spec"]
                one = {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "metadata": {"name": "x"},
                    "spec": job,
                }
            kubernetes.validate(one, "1.31", strict=True)


def message(rules: list[dict[str, Any]], code: int, *, disrupted: bool = False) -> str:
    """Message of Kubernetes' Job controller on a pod that ended, by its rule: the first that matches decides."""
    pod = "Pod default/lm-slice-0-3 has condition DisruptionTarget"
    container = f"Container train for pod default/lm-slice-0-3 failed with exit code {code}"
    for index, rule in enumerate(rules):
        assert rule["action"] == "FailJob"
        if any(one["type"] == "DisruptionTarget" for one in rule.get("onPodConditions", [])):
            if disrupted:
                return f"{pod} matching FailJob rule at index {index}"
        elif code in rule["onExitCodes"]["values"]:
            assert rule["onExitCodes"]["operator"] == "In"
            return f"{container} matching FailJob rule at index {index}"
    return "Job has reached the specified backoff limit"


def test_a_lost_node_costs_no_restart_a_failure_does_and_a_refused_command_ends_it() -> None:
    found = jobset(prepare("gke", launch(restarts=7)))
    policy = found["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0
    rules = job["podFailurePolicy"]["rules"]
    names = {one["onExitCodes"]["containerName"] for one in rules if "onExitCodes" in one}
    assert names == {pod_of(found)["containers"][0]["name"]}

    def actions(code: int, *, disrupted: bool = False) -> list[str]:
        told = message(rules, code, disrupted=disrupted)
        return [
            rule["action"]
            for rule in policy["rules"]
            if re.search(rule["onJobFailureMessagePatterns"][0], told)
        ]

    free = ["RestartJobSetAndIgnoreMaxRestarts"]
    # The node of the pod was taken back, whatever the training made of it.
    assert all(actions(code, disrupted=True) == free for code in (143, 137, 1, 0))
    # Another's was: this one lost a process, or all of them saved after its SIGTERM.
    assert actions(LostError.exit_code) == actions(143) == free
    assert actions(2) == ["FailJobSet"]
    # Failures count: of the training, out of memory, and of JAX where process 0 is gone.
    assert all(actions(code) == [] for code in (1, 137, 134, 139))
    assert {rule["action"] for rule in policy["rules"]} <= ACTIONS
    assert all(rule["onJobFailureReasons"] == ["PodFailurePolicy"] for rule in policy["rules"])


def test_the_pods_run_the_command_that_continues() -> None:
    found = pod_of(jobset(prepare("gke", launch())))
    words = found["containers"][0]["command"]
    assert words[:5] == ["systolic", "train", "lm", "--steps", "10"]
    assert words[5:] == ["--run", "/gcs/bucket/runs/lm", "--continue"]


DOLLARS = (
    "cost $$5",
    "$(JAX_PLATFORMS)",
    "$$(JAX_PLATFORMS)",
    "$(",
    "$",
    "$x ${y} $(NOT_SET)",
    "$$$",
)


def test_kubernetes_replaces_nothing_in_options() -> None:
    assert [expanded(text, {"JAX_PLATFORMS": "tpu,cpu"}) for text in DOLLARS[:3]] == [
        "cost $5",
        "tpu,cpu",
        "$(JAX_PLATFORMS)",
    ]
    container = pod_of(jobset(prepare("gke", launch(options=DOLLARS))))["containers"][0]
    assert container["env"][0]["name"] == "JAX_PLATFORMS"
    assert passed(container)[3:-3] == list(DOLLARS)


@given(st.lists(st.text("$()JAX_PLATFORMS x", max_size=20)))
def test_kubernetes_replaces_nothing_in_any_words(words: list[str]) -> None:
    environ = {"JAX_PLATFORMS": "tpu,cpu", "": "empty"}
    assert [expanded(word, environ) for word in escaped(words)] == words


def test_the_bucket_of_the_run_is_mounted() -> None:
    job = jobset(prepare("gke", launch("2xv5e-16")))["spec"]["replicatedJobs"][0]["template"][
        "spec"
    ]
    assert job["template"]["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    pod = job["template"]["spec"]
    (volume,) = pod["volumes"]
    assert volume["csi"]["volumeAttributes"]["bucketName"] == "bucket"
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/gcs/bucket"
    assert "hostNetwork" not in pod
    claimed = launch("2xv5e-16", run="/runs/lm", site=Site(claim="shared"))
    pod = pod_of(jobset(prepare("gke", claimed)))
    assert pod["hostNetwork"]
    assert pod["containers"][0]["command"][-2] == "/runs/lm"


def test_a_recipe_of_the_users_goes_along() -> None:
    code = {"mine.py": "import part\n# ä: |\n\tx\n", "part.py": "y = 2\n"}
    prepared = prepare("gke", launch(target="mine.py:job", code=code))
    config, _ = documents(prepared)
    pod = pod_of(jobset(prepared))
    items = pod["volumes"][0]["configMap"]["items"]
    assert {one["path"]: config["data"][one["key"]] for one in items} == code
    assert pod["containers"][0]["command"][2] == "/srv/recipe/mine.py:job"
    assert [words[2] for words in prepared.stop] == ["jobset,configmap"]
    with pytest.raises(OptionError, match="1000008 bytes, but a ConfigMap holds at most"):
        prepare("gke", launch(code={"mine.py": "x" * 1_000_008}))


@pytest.mark.parametrize(
    ("before", "code", "after", "text"),
    [
        ("", 0, "", ""),
        ("0a1b2c3d,Completed", 0, "", "has ended; deleting it"),
        ("0a1b2c3d,StartupPolicyCompleted Failed", 0, "", "has ended; deleting it"),
        (
            "0a1b2c3d,StartupPolicyCompleted",
            1,
            "stays",
            "is running or pending (--context=mine); stop",
        ),
        ("0a1b2c3d,", 1, "stays", "stop it with systolic stop lm"),
        ("ffff0000,Completed", 1, "stays", "is not from this launch"),
        (",Failed", 1, "stays", "is not from this launch"),
    ],
)
def test_a_jobset_that_has_ended_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, code: int, after: str, text: str
) -> None:
    clusters = stand_in(tmp_path, monkeypatch, "mine")
    (tmp_path / "free.sh").write_text(prepare("gke", launch()).files["free.sh"])
    path = clusters / "mine" / "jobset"
    if before:
        path.write_text(before)
    command = ["bash", tmp_path / "free.sh", "--context=mine"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
    assert path.exists() == bool(after)
    (clusters / "down").touch()
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert "was refused" in done.stderr


def test_recipe_files_of_another_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = stand_in(tmp_path, monkeypatch, "mine")
    given = launch(code={"mine.py": "x = 1\n"})
    (tmp_path / "free.sh").write_text(prepare("gke", given).files["free.sh"])
    for label, code in (("0a1b2c3d", 0), ("ffff0000", 1), ("", 1)):
        (clusters / "mine" / "configmap").write_text(label)
        command = ["bash", tmp_path / "free.sh", "--context=mine"]
        done = subprocess.run(command, text=True, capture_output=True, timeout=60)
        assert done.returncode == code, done.stderr
        assert ("configmap lm exists (--context=mine) but is not from" in done.stderr) == bool(code)


@pytest.mark.parametrize("code", [{}, {"mine.py": "x = 1\n"}], ids=["shipped", "mine"])
def test_the_script_passes_shellcheck(tmp_path: Path, code: dict[str, str]) -> None:
    (tmp_path / "free.sh").write_text(prepare("gke", launch(code=code)).files["free.sh"])
    shellcheck(tmp_path / "free.sh")


def test_spot_nodes_are_selected_and_tolerated() -> None:
    pod = pod_of(jobset(prepare("gke", launch(purchase=Purchase.spot))))
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["tolerations"][0]["key"] == "cloud.google.com/gke-spot"
    plain = pod_of(jobset(prepare("gke", launch())))
    assert "tolerations" not in plain
    assert "cloud.google.com/gke-spot" not in plain["nodeSelector"]


def test_two_nodes_of_four_chips_are_not_one_of_eight() -> None:
    for name, kind in (("v5e-8", "ct5lp-hightpu-4t"), ("v6e-8", "ct6e-standard-4t")):
        pod = pod_of(jobset(prepare("gke", launch(name))))
        assert pod["nodeSelector"]["node.kubernetes.io/instance-type"] == kind
    assert "instance-type" not in str(pod_of(jobset(prepare("gke", launch("v5e-16")))))


def test_the_node_pools_that_are_needed_are_named() -> None:
    notes = "\n".join(prepare("gke", launch("2xv6e-16", purchase=Purchase.spot)).notes)
    assert "2 node pools" in notes
    assert "--machine-type=ct6e-standard-4t --num-nodes=4 --tpu-topology=4x4 --spot" in notes
    reserved = launch("v6e-1", purchase=Purchase.reserved, site=Site(reservation="ours"))
    notes = "\n".join(prepare("gke", reserved).notes)
    assert "--num-nodes=1 --reservation-affinity=specific --reservation=ours" in notes
    alone = "\n".join(prepare("gke", launch("v6e-1")).notes)
    assert "--machine-type=ct6e-standard-1t --num-nodes=1" in alone
    assert "topology" not in alone


def test_the_file_says_what_made_it() -> None:
    assert prepare("gke", launch()).files["jobset.yaml"].startswith(HEADER)


@pytest.mark.parametrize("on", ["v3-8", "8xh100", "cpu"])
def test_a_slice_that_gke_lacks_is_one_line(on: str) -> None:
    with pytest.raises(OptionError, match="no TPU node pools in gke"):
        prepare("gke", launch(on))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "My_Run"}, r"name is 'My_Run'.*--name my-run"),
        ({"name": "9lives"}, "--name job-9lives"),
        ({"name": "a" * 49}, r"has 49 characters.*takes at most 47"),
        ({"image": ""}, "--image is not given"),
        ({"image": "Upper/case"}, "image is 'Upper/case'"),
        ({"run": "runs/lm"}, "4 machines.*gs://BUCKET"),
        ({"run": "gs://B"}, "gs://BUCKET/FOLDER"),
        ({"run": "s3://bucket/x"}, "gs://BUCKET/FOLDER"),
        ({"site": Site(namespace="a_b")}, "namespace is 'a_b'"),
        ({"site": Site(claim="c"), "run": "relative"}, "give --run /runs/FOLDER"),
        ({"options": ("--token", "hf_" + "a" * 34)}, "looks like a key"),
        ({"options": ("--data=https://me:secret@host/x",)}, "--data contains what looks like"),
    ],
)
def test_mistakes_are_one_line(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        prepare("gke", launch(**fields))
    assert "\n" not in str(caught.value)
    assert "secret@" not in str(caught.value)


def test_the_longest_name_fits_the_names_of_its_pods() -> None:
    for on in ("v5e-1", "2xv5e-256", "2xv5p-12288"):
        hosts = slice(on).num_hosts // slice(on).num_slices
        end = f"-slice-{slice(on).num_slices - 1}-{hosts - 1}-abcde"
        prepare("gke", launch(on, name="a" * (63 - len(end))))
        with pytest.raises(OptionError, match="characters"):
            prepare("gke", launch(on, name="a" * (64 - len(end))))


@pytest.mark.parametrize("on", ["v5e:8x4", "v6e:2x8", "v5p:8x4x4", "v4:8x4x4"])
def test_shapes_that_no_node_pool_has_are_refused(on: str) -> None:
    with pytest.raises(OptionError, match="is not a topology of gke; give v"):
        prepare("gke", launch(on))


@pytest.mark.parametrize("on", ["v5p:4x4x8", "v4:4x4x16", "v5p-8", "v4-16", "v6e-8"])
def test_shapes_that_node_pools_have_are_taken(on: str) -> None:
    assert prepare("gke", launch(on)).files
