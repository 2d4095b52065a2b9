"""``--via gke``: a JobSet with a job per slice, for a Google Kubernetes Engine cluster with TPU node pools.

GKE gives each pod the addresses of its slice (``TPU_WORKER_HOSTNAMES``, ``TPU_WORKER_ID``), and in JobSets with several
slices the coordinator (``MEGASCALE_…``), which ``systolic train`` reads. Selectors, taints and resource names:
https://docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and …/how-to/tpus, …/how-to/tpu-multislice;
the JobSet: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from systolic.chips import Slice
from systolic.core.errors import LostError, OptionError
from systolic.launching.launch import (
    ClientDefault,
    Launch,
    Prepared,
    Purchase,
    Site,
    rendered,
    yaml_text,
)
from systolic.launching.names import (
    check_image,
    check_label,
    check_name,
    check_shared,
    check_word,
    in_bucket,
    is_bucket,
)

FILE, FREE = "jobset.yaml", "free.sh"
LABEL = "systolic/launch"
CONTEXT = ClientDefault(
    what="context",
    words=("kubectl", "config", "current-context"),
    otherwise="set one with gcloud container clusters get-credentials CLUSTER",
)
"""Default context of kubectl, which selects the cluster."""
NAMESPACE = ClientDefault(
    what="namespace",
    words=("kubectl", "config", "view", "--minify", "--output", "jsonpath={..namespace}"),
    empty="default",
)
"""Default namespace of the context, which tools such as kubens change."""
JOB = "slice"
"""Name of the replicated job, which has one job per slice."""
LONGEST_POD = 63
POD_SUFFIX = 6
"""A dash and the five characters that Kubernetes appends to a pod's name."""
CODE = "/srv/recipe"
RUNS = "/runs"
MOUNTS = "/gcs"
FUSE_OPTIONS = "implicit-dirs,rename-dir-limit=200000"
"""Options of Cloud Storage FUSE: a checkpoint is completed by renaming its folder."""
LARGEST_CODE = 900_000
"""Maximum bytes of the recipe's files; Kubernetes allows 1 MiB in a ConfigMap."""
GRACE_SECONDS = 120
"""Time to save after SIGTERM. Preempted nodes allow less, and the run then continues from the last checkpoint."""
TPU_PORT, COORDINATOR_PORT, SLICES_PORT = 8471, 8476, 8080
"""Ports of libtpu within a slice, of jax.distributed, and of libtpu between slices."""
CONTAINER = "train"
REFUSED = 2
"""Exit code of a training that rejects its command line."""
SURVIVED = (LostError.exit_code, 143)
"""Exit codes of a training that lost another process of its job, and that saved after a SIGTERM to one of them."""
FAILURES: Sequence[tuple[str, str, Mapping[str, Any]]] = (
    (
        "nodeLost",
        "RestartJobSetAndIgnoreMaxRestarts",
        {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ),
    (
        "commandRefused",
        "FailJobSet",
        {"onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [REFUSED]}},
    ),
    (
        "otherProcessLost",
        "RestartJobSetAndIgnoreMaxRestarts",
        {"onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(SURVIVED)}},
    ),
)
"""Pod failures that do not count as restarts: name, action of the JobSet, and condition in the Job's failure policy.

Only the pod of a lost node has the condition DisruptionTarget. The others end before Kubernetes knows that the node is
gone, so a JobSet that looked at this condition alone would count most preemptions.
"""
AMBIGUOUS = ((2, 4),)
"""Topologies that a single node of eight chips also has; for these the machine type is a selector."""


def prepare(launch: Launch) -> Prepared:
    """Prepares a JobSet, with the recipe's files in a ConfigMap.

    Raises:
        OptionError: GKE lacks the slice, the image is missing, the run's folder is not shared, or a name is invalid.
    """
    on, site = launch.on, launch.site
    hosts = launch.nodes_per_slice * on.num_slices
    check_slice(launch)
    pods = f"-{JOB}-{on.num_slices - 1}-{launch.nodes_per_slice - 1}"
    longest = LONGEST_POD - len(pods) - POD_SUFFIX
    check_name(launch.name, longest, "a JobSet, whose pods have longer names,")
    _check_site(site)
    if not launch.image:
        raise OptionError(
            "gke runs a container image, but --image is not given; give one that the cluster can pull and that has Python and systolic[tpu]"
        )
    check_image(launch.image)
    check_shared(launch.run, hosts, volume=RUNS if site.claim else "")
    size = sum(len(text.encode()) for text in launch.code.values())
    if size > LARGEST_CODE:
        raise OptionError(
            f"the recipe's files have {size} bytes, but a ConfigMap holds at most {LARGEST_CODE}; put them into the image and give their path there"
        )
    documents = [*([_code(launch)] if launch.code else []), _jobset(launch)]
    text = yaml_text(documents)
    scope = ("--namespace", site.namespace) if site.namespace else ()
    first = (
        f"jobset.sigs.k8s.io/jobset-name={launch.name},jobset.sigs.k8s.io/job-index=0,"
        "batch.kubernetes.io/job-completion-index=0"
    )
    logs = ("kubectl", "logs", *scope, "--selector", first, "--tail", "200")
    fields = {
        "name": launch.name,
        "id": launch.id,
        "label": LABEL,
        "scope": shlex.join(scope),
        "code": bool(launch.code),
    }
    kinds = f"jobset{',configmap' if launch.code else ''}"
    return Prepared(
        files={FILE: launch.header() + text, FREE: rendered(FREE, launch.header(), fields)},
        checks=(("bash", FREE),),
        submit=(("kubectl", "apply", *scope, "--filename", FILE),),
        status=("kubectl", "get", "jobset,job,pod", *scope, "--selector", _selector(launch)),
        logs=logs,
        follow=(*logs, "--follow"),
        stop=(("kubectl", "delete", kinds, *scope, "--selector", mine(launch)),),
        asked=client_defaults(site),
        notes=_notes(launch),
        hosts=hosts,
    )


def client_defaults(site: Site) -> tuple[ClientDefault, ...]:
    """Defaults of kubectl to record at submit: the context, and the namespace if it is not given."""
    return (CONTEXT,) if site.namespace else (CONTEXT, NAMESPACE)


def check_slice(launch: Launch) -> None:
    """Checks that GKE has node pools for the slice.

    Raises:
        OptionError: GKE has none.
    """
    on = launch.on
    if on.platform != "tpu" or on.chip.gke_accelerator is None:
        raise OptionError(
            f"{on.name} has no TPU node pools in gke, only v4, v5e, v5p, v6e and tpu7x have; give a slice of those to --on"
        )
    check_shape(on)


def check_shape(on: Slice) -> None:
    """Checks that GKE has the topology: that of a named slice, or any with three axes in ascending order.

    Raises:
        OptionError: GKE does not have it.
    """
    rule = on.chip.slice_rule
    assert rule is not None
    shapes = [rule.shape(count) for count in rule.named_chips()]
    plain = tuple(sorted(on.topology))
    if on.topology in shapes or (len(plain) == 3 and on.topology == plain):
        return
    near = (
        plain
        if plain in shapes or len(plain) == 3
        else min(shapes, key=lambda shape: abs(prod(shape) - prod(plain)))
    )
    raise OptionError(
        f"{on.name} is not a topology of gke; give {on.chip.name}:{'x'.join(map(str, near))}"
    )


def selectors(launch: Launch) -> dict[str, str]:
    """Node selector of the pods."""
    on, site = launch.on, launch.site
    assert on.chip.gke_accelerator is not None
    labels = {
        "cloud.google.com/gke-tpu-accelerator": on.chip.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": topology(launch),
    }
    if on.topology in AMBIGUOUS:
        labels["node.kubernetes.io/instance-type"] = machine_type(launch)
    if launch.purchase is Purchase.spot:
        labels["cloud.google.com/gke-spot"] = "true"
    if site.reservation:
        labels["cloud.google.com/reservation-name"] = site.reservation
    return labels


def topology(launch: Launch) -> str:
    """Topology of one slice in GKE's notation: ``4x4``, ``2x2x1``."""
    return "x".join(map(str, launch.on.topology))


def machine_type(launch: Launch) -> str:
    """Machine type of the slice's hosts: the catalogue's with four chips, or the one with one chip."""
    kind = launch.on.chip.machine_type or ""
    return kind if launch.chips_per_node != 1 else kind.removesuffix("-4t") + "-1t"


def _check_site(site: Site) -> None:
    check_label(site.namespace, "namespace")
    check_label(site.service_account, "service-account")
    check_label(site.claim, "claim")
    check_label(site.queue, "queue")
    check_word(site.reservation, "reservation")


def mine(launch: Launch) -> str:
    """Label selector of the objects that this launch created."""
    return f"app.kubernetes.io/name={launch.name},{LABEL}={launch.id}"


def _selector(launch: Launch) -> str:
    return f"jobset.sigs.k8s.io/jobset-name={launch.name}"


def _code(launch: Launch) -> dict[str, Any]:
    """ConfigMap of the recipe's files. Keys can't contain a slash, so the volume maps them to paths."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(launch),
        "data": {f"file-{n}": text for n, text in enumerate(launch.code.values())},
    }


def _metadata(launch: Launch) -> dict[str, Any]:
    space = {"namespace": launch.site.namespace} if launch.site.namespace else {}
    labels = {"app.kubernetes.io/name": launch.name, "app.kubernetes.io/managed-by": "systolic"}
    return {"name": launch.name, **space, "labels": {**labels, LABEL: launch.id}}


def _jobset(launch: Launch) -> dict[str, Any]:
    on, site = launch.on, launch.site
    metadata = _metadata(launch)
    # Keeps the pods of a job on the nodes of one slice.
    metadata["annotations"] = {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    suspend = {}
    if site.queue:
        # Kueue starts it when the quota allows.
        metadata["labels"] = {**metadata["labels"], "kueue.x-k8s.io/queue-name": site.queue}
        suspend = {"suspend": True}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            **suspend,
            "failurePolicy": {
                "maxRestarts": launch.restarts,
                "rules": [
                    {
                        "name": name,
                        "action": action,
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        # A Job reports which of its rules matched only in this message.
                        "onJobFailureMessagePatterns": [f"matching FailJob rule at index {rule}$"],
                    }
                    for rule, (name, action, _) in enumerate(FAILURES)
                ],
            },
            "replicatedJobs": [
                {"name": JOB, "replicas": on.num_slices, "template": {"spec": job(launch)}}
            ],
        },
    }


def job(launch: Launch) -> dict[str, Any]:
    """Job of one slice: a pod per host. No pod restarts alone, since all train one model."""
    hosts = launch.nodes_per_slice
    return {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", **when} for _, _, when in FAILURES]},
        "template": {**_mounting(launch), "spec": _pod(launch)},
    }


def _mounting(launch: Launch) -> dict[str, Any]:
    """Pod metadata with which GKE mounts buckets."""
    mounting = {"metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}}}
    return mounting if is_bucket(launch.run) else {}


def _pod(launch: Launch) -> dict[str, Any]:
    on, site = launch.on, launch.site
    pod: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": GRACE_SECONDS}
    if site.service_account:
        pod["serviceAccountName"] = site.service_account
    if on.num_slices > 1 and not is_bucket(launch.run):
        # Traffic between slices uses the hosts' network directly, without the pods' overlay. Bucket mounts do not support this.
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    pod["nodeSelector"] = selectors(launch)
    if launch.purchase is Purchase.spot:
        taint = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
        pod["tolerations"] = [{**taint, "effect": "NoSchedule"}]
    chips: Mapping[str, int] = {"google.com/tpu": launch.chips_per_node}
    volumes, mounts = _volumes(launch)
    ports = (TPU_PORT, COORDINATOR_PORT, *((SLICES_PORT,) if on.num_slices > 1 else ()))
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": launch.image,
        "command": escaped(launch.command(code=CODE, run=_run(launch))),
        # Without chips the training fails instead of running on the CPU.
        "env": [{"name": "JAX_PLATFORMS", "value": "tpu,cpu"}],
        "ports": [{"containerPort": port} for port in ports],
        "resources": {"requests": dict(chips), "limits": dict(chips)},
    }
    if volumes:
        container["volumeMounts"] = mounts
        pod["volumes"] = volumes
    pod["containers"] = [container]
    return pod


def escaped(words: Iterable[str]) -> list[str]:
    """Words of a container's command that Kubernetes passes on as they are: it replaces ``$(NAME)`` and ``$$`` in them.

    https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/
    """
    return [word.replace("$", "$$") for word in words]


def _run(launch: Launch) -> str:
    """Folder of the run in a pod."""
    if not is_bucket(launch.run):
        return launch.run
    bucket, folder = in_bucket(launch.run)
    return f"{MOUNTS}/{bucket}/{folder}"


def _volumes(launch: Launch) -> tuple[list[Any], list[Any]]:
    """Volumes of the recipe's files, the claim and the bucket, and their mounts."""
    volumes: list[Any] = []
    mounts: list[Any] = []
    if launch.code:
        items = [{"key": f"file-{n}", "path": path} for n, path in enumerate(launch.code)]
        volumes.append({"name": "code", "configMap": {"name": launch.name, "items": items}})
        mounts.append({"name": "code", "mountPath": CODE, "readOnly": True})
    if launch.site.claim:
        claim = {"claimName": launch.site.claim}
        volumes.append({"name": "runs", "persistentVolumeClaim": claim})
        mounts.append({"name": "runs", "mountPath": RUNS})
    if is_bucket(launch.run):
        bucket, _ = in_bucket(launch.run)
        attributes = {"bucketName": bucket, "mountOptions": FUSE_OPTIONS}
        driver = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}
        volumes.append({"name": "bucket", "csi": driver})
        mounts.append({"name": "bucket", "mountPath": f"{MOUNTS}/{bucket}"})
    return volumes, mounts


def _notes(launch: Launch) -> tuple[str, ...]:
    on = launch.on
    words = ["gcloud", "container", "node-pools", "create", "POOL", "--cluster=CLUSTER"]
    words += [f"--machine-type={machine_type(launch)}", f"--num-nodes={launch.nodes_per_slice}"]
    if launch.nodes_per_slice > 1:
        words.append(f"--tpu-topology={topology(launch)}")
    if launch.purchase is Purchase.spot:
        words.append("--spot")
    if launch.site.reservation:
        words += ["--reservation-affinity=specific", f"--reservation={launch.site.reservation}"]
    if launch.site.zone:
        words.append(f"--node-locations={launch.site.zone}")
    pools = "a node pool" if on.num_slices == 1 else f"{on.num_slices} node pools"
    notes = [
        f"the cluster needs the JobSet controller, and {pools} like this: {shlex.join(words)}",
    ]
    if is_bucket(launch.run):
        who = launch.site.service_account or "default"
        notes.append(
            f"the pods' service account ({who}) needs access to {launch.run}; use a bucket with a hierarchical namespace, where renaming a folder is atomic"
        )
    return tuple(notes)
