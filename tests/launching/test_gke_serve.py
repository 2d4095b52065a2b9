"""Servers on GKE, for every slice with one host: schemas, and paths, metrics and times that agree with the server's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from systolic.chips import slice
from systolic.core.errors import OptionError
from systolic.launching import Prepared, Purchase, Site
from systolic.launching.gke_serve import KSERVE, METRICS, GkeServer, check_slice, prepare
from tests.launching.made import HEADER, YAML, launch, passed, shellcheck, slices

IMAGE = "us-docker.pkg.dev/project/repository/chat:1"
NAMED = {"name": str, "namespace": str, "labels": dict}
MONITORING: Mapping[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": NAMED,
    "spec": {
        "selector": {"matchLabels": dict},
        "endpoints": [{"port": str, "path": str, "interval": str}],
    },
}
"""Used fields of a PodMonitoring, from its definition in prometheus-engine at c1318317."""


def wrong(value: Any, form: Any, path: str = "") -> list[str]:
    """Fields that are unknown, missing or of another type."""
    if isinstance(form, type):
        return [] if isinstance(value, form) else [f"{path} is no {form.__name__}"]
    if isinstance(form, list):
        return [text for one in value for text in wrong(one, form[0], f"{path}[]")]
    found = [f"{path}.{name} is unknown" for name in value if name not in form]
    found += [f"{path}.{n} is missing" for n in form if n not in value]
    return found + [
        text for n, one in value.items() if n in form for text in wrong(one, form[n], f"{path}.{n}")
    ]


def made(on: str = "v5e-8", server: GkeServer | None = None, **fields: Any) -> Prepared:
    given = {
        "target": "chat",
        "name": "chat",
        "run": "",
        "options": (),
        "image": IMAGE,
        "site": Site(),
    }
    return prepare(launch(on, **{**given, **fields}), server or GkeServer())


def objects(prepared: Prepared) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.load_all(prepared.files["serve.yaml"], Loader=YAML)}


def pod(on: str = "v5e-8", server: GkeServer | None = None, **fields: Any) -> dict[str, Any]:
    return objects(made(on, server, **fields))["Deployment"]["spec"]["template"]["spec"]


def fits(name: str) -> bool:
    try:
        check_slice(launch(name))
    except OptionError:
        return False
    return True


def test_all_slices_of_one_host_agree_with_the_catalogue() -> None:
    alone = [one for one in slices() if fits(one.name)]
    names = {one.name for one in alone}
    assert {"v4-8", "v5e-1", "v5e-4", "v5e-8", "v6e-1", "v6e-8", "v5p-8", "tpu7x-8"} <= names
    for on in alone:
        spec = pod(on.name)
        (container,) = spec["containers"]
        labels = spec["nodeSelector"]
        assert container["resources"]["limits"] == {"google.com/tpu": on.num_chips}, on.name
        assert container["resources"]["requests"] == container["resources"]["limits"]
        topology = "x".join(map(str, on.topology))
        assert labels["cloud.google.com/gke-tpu-topology"] == topology, on.name
        assert labels["cloud.google.com/gke-tpu-accelerator"] == on.chip.gke_accelerator
        assert f"-{on.num_chips}t " in "\n".join(made(on.name).notes), on.name
    assert pod("v5e-8")["nodeSelector"]["node.kubernetes.io/instance-type"] == "ct5lp-hightpu-8t"


@pytest.mark.parametrize("variant", ["deployment", KSERVE])
def test_kubernetes_objects_pass_its_own_schema(variant: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    server = GkeServer(variant=variant, keys_secret="keys")
    fields = {"run": "gs://bucket/chat", "site": Site(namespace="ml", service_account="server")}
    found = objects(made("v6e-8", server, purchase=Purchase.spot, **fields))
    built_in = {
        "Service",
        "Deployment",
        "PodDisruptionBudget",
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
    }
    assert found.keys() - built_in == (
        {"PodMonitoring"} | ({"InferenceService"} if variant == KSERVE else set())
    )
    for kind in built_in & found.keys():
        kubernetes.validate(found[kind], "1.31", strict=True)
    if variant == KSERVE:
        # The predictor is a pod with the number of replicas; the rest of the definition was checked separately.
        predictor = dict(found["InferenceService"]["spec"]["predictor"])
        metadata = {key: predictor.pop(key) for key in ("labels", "annotations")}
        assert predictor.pop("minReplicas") == 1
        one = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x", **metadata},
            "spec": predictor,
        }
        kubernetes.validate(one, "1.31", strict=True)
        assert predictor["containers"][0]["name"] == "kserve-container"
        target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
        assert target["name"] == "chat-predictor"


def test_a_pod_monitoring_has_the_fields_of_its_definition() -> None:
    found = objects(made(site=Site(namespace="ml")))["PodMonitoring"]
    assert not wrong(found, MONITORING)


def test_probes_and_metrics_are_the_servers() -> None:
    from prometheus_client import CollectorRegistry

    from systolic.serving.http.app import PATHS
    from systolic.serving.http.metrics import PREFIX, Metrics, TextMetrics

    known = {path.path for path in PATHS}
    (container,) = pod()["containers"]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    assert {one["path"] for one in probes} <= known
    assert probes[2]["path"] == "/readyz"
    found = objects(made())
    (endpoint,) = found["PodMonitoring"]["spec"]["endpoints"]
    assert endpoint["path"] in known
    assert {endpoint["port"], *(one["port"] for one in probes)} == {container["ports"][0]["name"]}
    metrics = Metrics()
    TextMetrics(metrics)
    assert isinstance(metrics.registry, CollectorRegistry)
    names = {family.name: family.type for family in metrics.registry.collect()}
    for name in METRICS:
        assert names[f"{PREFIX}{name}"] == "gauge"
        (metric,) = objects(made(server=GkeServer(metric=name)))["HorizontalPodAutoscaler"]["spec"][
            "metrics"
        ]
        assert metric["pods"]["metric"]["name"] == f"prometheus.googleapis.com|{PREFIX}{name}|gauge"


def test_kubernetes_waits_longer_than_the_server_drains() -> None:
    from systolic.serving.http.process import LAST_SECONDS

    for grace in (0, 45, 3575):
        spec = pod(server=GkeServer(grace_seconds=grace))
        (container,) = spec["containers"]
        words = container["command"]
        assert words[words.index("--grace-seconds") + 1] == str(grace)
        leave = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert spec["terminationGracePeriodSeconds"] > leave + grace + LAST_SECONDS


def test_the_servers_own_options_read_its_command() -> None:
    from systolic.cli.main import VERBS
    from systolic.cli.parse import parse

    server = GkeServer(keys_secret="keys", grace_seconds=30)
    (container,) = pod(server=server, options=("--context", "8192"))["containers"]
    options = parse(
        VERBS["serve"].forms[0].options.read, container["command"][2:], "systolic serve"
    )
    assert options.models == ("chat=/srv/model",)
    assert (options.host, options.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
    assert options.keys == Path("/etc/systolic/keys.txt")
    assert (options.grace_seconds, options.context) == (30, 8192)


@pytest.mark.parametrize("variant", ["deployment", KSERVE])
def test_kubernetes_replaces_nothing_in_options(variant: str) -> None:
    options = ("--prompt", "cost $$5 $(JAX_PLATFORMS) $(")
    found = objects(made(server=GkeServer(variant=variant), options=options))
    spec = (
        found["InferenceService"]["spec"]["predictor"]
        if variant == KSERVE
        else found["Deployment"]["spec"]["template"]["spec"]
    )
    assert passed(spec["containers"][0])[-2:] == list(options)


def test_it_is_not_root_and_holds_no_secret() -> None:
    spec = pod(server=GkeServer(keys_secret="keys"))
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (keys,) = [one for one in spec["volumes"] if one["name"] == "keys"]
    # Not writable by others, otherwise the server rejects the keys.
    assert keys["secret"] == {"secretName": "keys", "defaultMode": 0o440}
    image = (Path(__file__).parents[2] / "src/systolic/serving/docker/Dockerfile.jinja").read_text()
    assert f"USER {spec['securityContext']['runAsUser']}" in image
    # An image of one's own has no SYSTOLIC_CACHE, and its root is read-only.
    assert {"name": "SYSTOLIC_CACHE", "value": "/var/cache/systolic"} in container["env"]
    assert "/var/cache/systolic" in {one["mountPath"] for one in container["volumeMounts"]}


def test_the_policy_lets_in_the_namespace_and_the_collector() -> None:
    spec = objects(made())["NetworkPolicy"]["spec"]
    (rule,) = spec["ingress"]
    assert spec["policyTypes"] == ["Ingress"]
    assert {"podSelector": {}} in rule["from"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8000}]


def test_a_bundle_in_a_bucket_is_mounted() -> None:
    spec = pod(run="gs://bucket/models/chat")
    (container,) = spec["containers"]
    assert "chat=/gcs/bucket/models/chat" in container["command"]
    assert spec["volumes"][-1]["csi"]["readOnly"] is True
    assert "automountServiceAccountToken" not in spec


def test_the_files_say_what_made_them_and_the_script_passes_shellcheck(tmp_path: Path) -> None:
    files = made(server=GkeServer(variant=KSERVE), site=Site(namespace="ml")).files
    assert files["serve.yaml"].startswith(HEADER)
    (tmp_path / "check.sh").write_text(files["check.sh"])
    shellcheck(tmp_path / "check.sh")


@pytest.mark.parametrize("variant", ["deployment", KSERVE])
def test_every_object_has_the_label_of_its_launch_and_a_stop_takes_those_only(variant: str) -> None:
    prepared = made(server=GkeServer(variant=variant))
    found = objects(prepared)
    for one in found.values():
        assert one["metadata"]["labels"]["systolic/launch"] == "0a1b2c3d"
    selector = "app.kubernetes.io/name=chat,systolic/launch=0a1b2c3d"
    assert all(words[-2:] == ("--selector", selector) for words in prepared.stop)
    stopped = [kind for words in prepared.stop for kind in words[2].split(",")]
    assert sorted(stopped) == sorted(kind.lower() for kind in found)
    # Pods are selected by the name alone, since a Deployment's selector can't change.
    assert "systolic/launch" not in str([one["spec"] for one in found.values()])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"on": "v5e-16"}, "v5e-16 has 4 hosts, but a server runs on one"),
        ({"on": "2xv5e-4"}, "has 2 hosts, but a server runs on one"),
        ({"on": "8xh100"}, "no TPU node pools"),
        ({"image": ""}, "systolic export BUNDLE --to docker"),
        ({"image": "Bad Name"}, "image is 'Bad Name'"),
        ({"name": "a" * 41}, "takes at most 40"),
        ({"run": "gs://B"}, "the Bundle is 'gs://B'; it takes gs://BUCKET/FOLDER"),
        ({"site": Site(namespace="A")}, "namespace is 'A'"),
    ],
)
def test_mistakes_are_one_line(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        made(**fields)
    assert "\n" not in str(caught.value)


def test_a_spot_node_waits_less_than_the_file_says() -> None:
    def notes(grace_seconds: int, **fields: Any) -> str:
        return "\n".join(made(server=GkeServer(grace_seconds=grace_seconds), **fields).notes)

    told = notes(45, purchase=Purchase.spot)
    assert "GKE gives its pods 15 s by default, not the 55 s of this file" in told
    assert "requests that take longer than 5 s may fail" in told
    assert "taken back" not in notes(5, purchase=Purchase.spot)
    assert "taken back" not in notes(45)


def test_numbers_that_contradict_each_other_are_one_line() -> None:
    for fields, text in (
        ({"variant": "kserv"}, "did you mean kserve"),
        ({"metric": "num_requests"}, "metric is 'num_requests'"),
        ({"replicas": 5}, "--max-replicas is 4, but --replicas is 5"),
        ({"grace_seconds": 3576}, "GKE waits at most 3600 s for a pod .* give 3575 or less"),
    ):
        with pytest.raises(OptionError, match=text):
            GkeServer(**fields)
    assert slice("v5e-8").num_hosts == 1
