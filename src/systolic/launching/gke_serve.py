"""Model server on single-host TPU nodes of Google Kubernetes Engine, with probes, drain, autoscaling and a network policy.

A pod is one server with all chips of its machine; the autoscaler adds pods with the load. Metrics reach it through
Managed Prometheus and the Custom Metrics adapter: https://docs.cloud.google.com/stackdriver/docs/managed-prometheus/hpa;
TPU node pools as in :mod:`systolic.launching.gke`; KServe: https://kserve.github.io/website/docs/reference/crd-api.
"""

import shlex
from dataclasses import dataclass
from typing import Any

from systolic.core.errors import OptionError, nearest
from systolic.launching import gke
from systolic.launching.launch import Launch, Prepared, Purchase, rendered, yaml_text
from systolic.launching.names import check_image, check_label, check_name, in_bucket, is_bucket

FILE, CHECK = "serve.yaml", "check.sh"
CACHE = "/var/cache/systolic"
"""Mount of the volume for compiled programs."""
LONGEST = 40
PORT = 8000
MODEL = "/srv/model"
"""Path of the Bundle in images of ``systolic export --to docker``."""
KEYS_FOLDER, KEYS_FILE = "/etc/systolic", "keys.txt"
USER = 10001
"""User ID in those images."""
LEAVE_SECONDS = 10
"""Time between removal from the Service and SIGTERM, for clients that still have the address."""
LAST_SECONDS = 15
"""Time after the grace time and before SIGKILL, for requests that end with an error."""
LONGEST_SECONDS = 3600
"""Maximum time of a shutdown in total; GKE waits no longer for a pod when it drains a node,
https://docs.cloud.google.com/kubernetes-engine/docs/concepts/node-pool-upgrade-strategies.
"""
SPOT_SECONDS = 15
"""Time that GKE gives pods by default before it takes back a Spot VM; a node pool may have more, up to 120 s with that of
system pods, https://docs.cloud.google.com/kubernetes-engine/docs/concepts/spot-vms.
"""
METRICS = ("http_requests_in_flight", "num_requests_waiting", "num_requests_running")
"""Gauges of a server's load; the last two are for language models."""
DEPLOYMENT, KSERVE = "deployment", "kserve"
DEFINED = ("inferenceservice", "podmonitoring")
"""Kinds of custom resources, which Kubernetes itself lacks."""
WIDE = (8,)
"""Chips of GKE's larger machines; the others have up to four."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GkeServer:
    """Options of a server; those shared with training launches are in :class:`Launch`.

    Raises:
        OptionError: the variant or the metric is unknown, or a number is out of range.
    """

    variant: str = DEPLOYMENT
    grace_seconds: int = 45
    """Time for requests in flight; the server's option of the same name."""
    replicas: int = 1
    """Minimum number of pods."""
    most: int = 4
    """Maximum number of pods."""
    metric: str = METRICS[0]
    target: int = 32
    """Target of the metric per pod; above it pods are added."""
    keys_secret: str = ""
    """Secret with ``keys.txt``, the file of API keys' hashes."""

    def __post_init__(self) -> None:
        if self.variant not in (DEPLOYMENT, KSERVE):
            raise OptionError(
                f"--variant is {self.variant!r}{nearest(self.variant, (DEPLOYMENT, KSERVE))}; it takes {DEPLOYMENT} or {KSERVE}"
            )
        if self.metric not in METRICS:
            raise OptionError(
                f"--metric is {self.metric!r}{nearest(self.metric, METRICS)}; it takes {', '.join(METRICS)}"
            )
        longest = LONGEST_SECONDS - LEAVE_SECONDS - LAST_SECONDS
        if self.grace_seconds > longest:
            raise OptionError(
                f"--grace-seconds is {self.grace_seconds}, but GKE waits at most {LONGEST_SECONDS} s for a pod when it drains a node; give {longest} or less"
            )
        if self.most < self.replicas:
            raise OptionError(
                f"--max-replicas is {self.most}, but --replicas is {self.replicas}; give --max-replicas {self.replicas} or more"
            )


def prepare(launch: Launch, server: GkeServer) -> Prepared:
    """Prepares the objects of a server: ``launch.target`` is the model's name, ``launch.run`` its Bundle if in a bucket.

    Raises:
        OptionError: the slice has several hosts or is not in GKE, the image is missing, or a name is invalid.
    """
    check_slice(launch)
    check_name(launch.name, LONGEST, "a Deployment, whose pods have longer names,")
    check_label(launch.site.namespace, "namespace")
    check_label(launch.site.service_account, "service-account")
    check_label(server.keys_secret, "keys-secret")
    if not launch.image:
        raise OptionError(
            "launch serve runs a container image, but --image is not given; make one with systolic export BUNDLE --to docker --for tpu"
        )
    check_image(launch.image)
    if is_bucket(launch.run):
        in_bucket(launch.run, "the Bundle")
    text = yaml_text(documents(launch, server))
    scope = ("--namespace", launch.site.namespace) if launch.site.namespace else ()
    mine = ("--selector", f"app.kubernetes.io/name={launch.name}")
    kinds = [document["kind"].lower() for document in documents(launch, server)]
    # Custom resources are deleted separately: a kind that the cluster lacks fails the whole command.
    built_in = [kind for kind in kinds if kind not in DEFINED]
    apart = [",".join(built_in), *(kind for kind in kinds if kind in DEFINED)]
    fields = {
        "name": launch.name,
        "id": launch.id,
        "label": gke.LABEL,
        "scope": shlex.join(scope),
        "kinds": " ".join(kinds),
    }
    kind = "inferenceservice" if server.variant == KSERVE else "deployment"
    logs = (
        "kubectl",
        "logs",
        *scope,
        *mine,
        "--container",
        container_name(server),
        "--tail",
        "200",
    )
    return Prepared(
        files={FILE: launch.header() + text, CHECK: rendered(CHECK, launch.header(), fields)},
        checks=(("bash", CHECK),),
        submit=(("kubectl", "apply", *scope, "--filename", FILE),),
        status=("kubectl", "get", f"{kind},hpa,pod", *scope, *mine),
        logs=logs,
        follow=(*logs, "--follow"),
        stop=tuple(
            ("kubectl", "delete", each, *scope, "--selector", gke.mine(launch)) for each in apart
        ),
        asked=gke.client_defaults(launch.site),
        in_place=True,
        notes=_notes(launch, server),
        hosts=1,
    )


def check_slice(launch: Launch) -> None:
    """Checks that GKE has the slice on one host.

    Raises:
        OptionError: the slice has several hosts, or GKE lacks it.
    """
    gke.check_slice(launch)
    on = launch.on
    if launch.on.num_hosts > 1:
        raise OptionError(
            f"{on.name} has {on.num_hosts} hosts, but a server runs on one; give a slice with one host, such as {on.chip.name}-8, and --max-replicas for more servers"
        )


def documents(launch: Launch, server: GkeServer) -> list[dict[str, Any]]:
    """Kubernetes objects, in the order in which they are applied."""
    workload = [_kserve(launch, server)]
    if server.variant == DEPLOYMENT:
        workload = [_service(launch), _deployment(launch, server)]
    return [
        *workload,
        _budget(launch),
        _monitoring(launch),
        _autoscaler(launch, server),
        _policy(launch),
    ]


def container_name(server: GkeServer) -> str:
    """Name of the server's container; KServe requires its own."""
    return "kserve-container" if server.variant == KSERVE else "serve"


def machine_type(launch: Launch) -> str:
    """Machine type with all chips of the slice."""
    chips = launch.on.num_chips
    return f"{(launch.on.chip.machine_type or '').rpartition('-')[0]}-{chips}t"


def selectors(launch: Launch) -> dict[str, str]:
    """Node selector: that of a training on the slice, and the machine type if it has all eight chips."""
    labels = gke.selectors(launch)
    if launch.on.num_chips in WIDE:
        labels["node.kubernetes.io/instance-type"] = machine_type(launch)
    return labels


def command(launch: Launch, server: GkeServer) -> list[str]:
    """Command line of ``systolic serve``."""
    place = MODEL
    if is_bucket(launch.run):
        bucket, folder = in_bucket(launch.run)
        place = f"{gke.MOUNTS}/{bucket}/{folder}"
    words = ["systolic", "serve", f"{launch.target}={place}", "--host", "0.0.0.0"]
    words += ["--port", str(PORT), "--grace-seconds", str(server.grace_seconds), "--log", "json"]
    if server.keys_secret:
        words += ["--keys", f"{KEYS_FOLDER}/{KEYS_FILE}"]
    return [*words, *launch.options]


def _labels(launch: Launch) -> dict[str, str]:
    return {"app.kubernetes.io/name": launch.name, "app.kubernetes.io/managed-by": "systolic"}


def _selected(launch: Launch) -> dict[str, Any]:
    return {"matchLabels": {"app.kubernetes.io/name": launch.name}}


def _metadata(launch: Launch) -> dict[str, Any]:
    space = {"namespace": launch.site.namespace} if launch.site.namespace else {}
    return {"name": launch.name, **space, "labels": {**_labels(launch), gke.LABEL: launch.id}}


def _pod_metadata(launch: Launch) -> dict[str, Any]:
    mounts = {"annotations": {"gke-gcsfuse/volumes": "true"}} if is_bucket(launch.run) else {}
    return {"labels": _labels(launch), **mounts}


def _service(launch: Launch) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(launch),
        "spec": {
            "selector": {"app.kubernetes.io/name": launch.name},
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def _deployment(launch: Launch, server: GkeServer) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(launch),
        "spec": {
            # No number of pods: the autoscaler sets it, and applying the file again does not change it.
            "selector": _selected(launch),
            # A new version is ready before the old one stops, which takes one more machine in the meantime.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "progressDeadlineSeconds": 3600,
            "template": {"metadata": _pod_metadata(launch), "spec": _pod(launch, server)},
        },
    }


def _kserve(launch: Launch, server: GkeServer) -> dict[str, Any]:
    metadata = _metadata(launch)
    metadata["annotations"] = {
        "serving.kserve.io/deploymentMode": "RawDeployment",
        # Scaled by the HorizontalPodAutoscaler below, on the server's own metrics.
        "serving.kserve.io/autoscalerClass": "external",
        **_pod_metadata(launch).get("annotations", {}),
    }
    pod = _pod(launch, server)
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"predictor": {**_pod_metadata(launch), "minReplicas": server.replicas, **pod}},
    }


def _pod(launch: Launch, server: GkeServer) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": LEAVE_SECONDS + server.grace_seconds + LAST_SECONDS
    }
    if launch.site.service_account:
        pod["serviceAccountName"] = launch.site.service_account
    if not is_bucket(launch.run):
        pod["automountServiceAccountToken"] = False
    pod["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod["nodeSelector"] = selectors(launch)
    if launch.purchase is Purchase.spot:
        taint = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
        pod["tolerations"] = [{**taint, "effect": "NoSchedule"}]
    volumes, mounts = _volumes(launch, server)
    return pod | {"containers": [_container(launch, server, mounts)], "volumes": volumes}


def _container(launch: Launch, server: GkeServer, mounts: list[Any]) -> dict[str, Any]:
    chips = {"google.com/tpu": launch.on.num_chips}

    def get(path: str) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 5}

    return {
        "name": container_name(server),
        "image": launch.image,
        "command": gke.escaped(command(launch, server)),
        "env": [
            {"name": "JAX_PLATFORMS", "value": "tpu,cpu"},
            # The root is read-only, and an image may have the cache elsewhere.
            {"name": "SYSTOLIC_CACHE", "value": CACHE},
        ],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "resources": {"requests": dict(chips), "limits": dict(chips)},
        # The server listens at once, and is ready when every program is compiled, which may take minutes.
        "startupProbe": {**get("/livez"), "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {**get("/livez"), "periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": {**get("/readyz"), "periodSeconds": 5, "failureThreshold": 1},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_SECONDS)]}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _volumes(launch: Launch, server: GkeServer) -> tuple[list[Any], list[Any]]:
    """Volumes for compiled programs, temporary files, keys and the model's bucket, and their mounts."""
    volumes: list[Any] = [{"name": "cache", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    mounts: list[Any] = [
        {"name": "cache", "mountPath": CACHE},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if server.keys_secret:
        secret = {"secretName": server.keys_secret, "defaultMode": 0o440}
        volumes.append({"name": "keys", "secret": secret})
        mounts.append({"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    if is_bucket(launch.run):
        bucket, _ = in_bucket(launch.run)
        attributes = {"bucketName": bucket, "mountOptions": "implicit-dirs"}
        driver = {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": True}
        volumes.append({"name": "model", "csi": {**driver, "volumeAttributes": attributes}})
        mounts.append({"name": "model", "mountPath": f"{gke.MOUNTS}/{bucket}", "readOnly": True})
    return volumes, mounts


def _budget(launch: Launch) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(launch),
        "spec": {"maxUnavailable": 1, "selector": _selected(launch)},
    }


def _monitoring(launch: Launch) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.googleapis.com/v1",
        "kind": "PodMonitoring",
        "metadata": _metadata(launch),
        "spec": {
            "selector": _selected(launch),
            "endpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
        },
    }


def _autoscaler(launch: Launch, server: GkeServer) -> dict[str, Any]:
    suffix = "-predictor" if server.variant == KSERVE else ""
    metric = {"name": f"prometheus.googleapis.com|systolic:{server.metric}|gauge"}
    target = {"type": "AverageValue", "averageValue": str(server.target)}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": _metadata(launch),
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": f"{launch.name}{suffix}",
            },
            "minReplicas": server.replicas,
            "maxReplicas": server.most,
            "metrics": [{"type": "Pods", "pods": {"metric": metric, "target": target}}],
            # A new pod compiles for minutes before it is ready, so scale down slowly.
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
        },
    }


def _policy(launch: Launch) -> dict[str, Any]:
    """Network policy that allows pods of the namespace and the metrics collector."""
    collector = {"kubernetes.io/metadata.name": "gke-gmp-system"}
    sources = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": collector}}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(launch),
        "spec": {
            "podSelector": _selected(launch),
            "policyTypes": ["Ingress"],
            "ingress": [{"from": sources, "ports": [{"protocol": "TCP", "port": PORT}]}],
        },
    }


def _notes(launch: Launch, server: GkeServer) -> tuple[str, ...]:
    words = ["gcloud", "container", "node-pools", "create", "POOL", "--cluster=CLUSTER"]
    words += [f"--machine-type={machine_type(launch)}", "--enable-autoscaling"]
    words += [f"--min-nodes={server.replicas}", f"--max-nodes={server.most + 1}"]
    if launch.purchase is Purchase.spot:
        words.append("--spot")
    notes = [
        f"the cluster needs a node pool like this: {shlex.join(words)}",
        "the autoscaler needs Managed Prometheus and the Custom Metrics Stackdriver adapter",
    ]
    wanted = LEAVE_SECONDS + server.grace_seconds
    if launch.purchase is Purchase.spot and wanted > SPOT_SECONDS:
        notes.append(
            f"before a spot node is taken back, GKE gives its pods {SPOT_SECONDS} s by default, not the {wanted} s of this file: requests that take longer than {SPOT_SECONDS - LEAVE_SECONDS} s may fail; node pools of GKE 1.35 or later can have a longer grace time (https://docs.cloud.google.com/kubernetes-engine/docs/concepts/spot-vms)"
        )
    if server.variant == KSERVE:
        notes.append("the cluster needs KServe, in its mode without Knative")
    if server.keys_secret:
        notes.append(
            f"create the keys with systolic serve --keys {KEYS_FILE} --new-key NAME, then kubectl create secret generic {server.keys_secret} --from-file={KEYS_FILE}"
        )
    else:
        notes.append("without --keys-secret every pod of the namespace has access")
    return tuple(notes)
