"""``--via skypilot``: a managed job of SkyPilot, which rents machines, monitors them and recovers the job elsewhere.

Task format: https://docs.skypilot.co/en/latest/reference/yaml-spec.html. Names of accelerators are SkyPilot's.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from systolic.chips import ChipKind
from systolic.core.errors import OptionError
from systolic.launching.launch import GONE, Launch, Prepared, Purchase, rendered, yaml_text
from systolic.launching.names import check_name, check_shared, in_bucket
from systolic.launching.tpu_vm import RUNTIMES, accelerator_type

LONGEST = 40
TASK, SCRIPT, JOB = "task.yaml", "run.sh", "managed.sh"
AGAIN = 75
"""Exit code of ``run.sh`` with which it requests a restart from SkyPilot. The script counts failures itself, so that a
rejected command line is not restarted."""
BUCKETS = "/gcs"
GPUS: Mapping[str, str] = {
    "a100-40": "A100",
    "a100-80": "A100-80GB",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "gb200": "GB200",
    "l4": "L4",
    "mi300x": "MI300X",
}
"""Names in SkyPilot's catalogue by chip."""


def prepare(launch: Launch) -> Prepared:
    """Prepares a task and the script that it runs on every machine.

    Raises:
        OptionError: SkyPilot lacks the slice, the run's folder is lost with the machines, or a name is invalid.
    """
    check_slice(launch)
    check_name(launch.name, LONGEST, "a managed job")
    if launch.purchase is Purchase.reserved:
        raise OptionError(
            "skypilot takes reservations from its own configuration (~/.sky/config.yaml); leave out --reserved"
        )
    hosts = launch.on.num_hosts
    check_shared(launch.run, hosts)
    bucket, folder = in_bucket(launch.run)
    run = f"{BUCKETS}/{bucket}/{folder}"
    fields = {
        "platforms": "tpu,cpu" if launch.on.chip.kind is ChipKind.tpu else "cuda,cpu",
        "command": shlex.join(launch.command(code="code", run=run)),
        "run": shlex.quote(run),
        "restarts": launch.restarts,
        "again": AGAIN,
    }
    text = yaml_text([task(launch)])
    name = ("--name", job_name(launch))
    owned = {"job": job_name(launch), "name": launch.name, "gone": GONE}
    return Prepared(
        files={
            TASK: launch.header() + text,
            SCRIPT: rendered(SCRIPT, launch.header(), fields),
            JOB: rendered(JOB, launch.header(), owned),
        },
        checks=(("bash", JOB, "check"),),
        submit=(("sky", "jobs", "launch", "--yes", "--detach-run", *name, TASK),),
        status=("sky", "jobs", "queue"),
        logs=("sky", "jobs", "logs", *name, "--no-follow"),
        follow=("sky", "jobs", "logs", *name),
        stop=(("bash", JOB, "stop"),),
        notes=(f"the machines need access to {launch.run}; sky check shows the enabled clouds",),
        hosts=hosts,
        ships=True,
    )


def job_name(launch: Launch) -> str:
    """Name of the managed job, with the launch's label: SkyPilot finds jobs of all users by name and has no labels."""
    return f"{launch.name}-{launch.id}"


def check_slice(launch: Launch) -> None:
    """Checks that SkyPilot offers the slice.

    Raises:
        OptionError: SkyPilot does not offer it.
    """
    on = launch.on
    if on.chip.kind is ChipKind.gpu and on.chip.name in GPUS:
        return
    if on.num_slices > 1:
        raise OptionError(
            f"{on.name} has {on.num_slices} slices, but a task of skypilot has one; give --via gke or tpu-vm"
        )
    if on.chip.name not in RUNTIMES or ":" in on.name:
        raise OptionError(
            f"{on.name} is not in SkyPilot's catalogue, which has {', '.join((*RUNTIMES, *GPUS))}; give a slice of one of those to --on"
        )


def task(launch: Launch) -> dict[str, Any]:
    """Task in SkyPilot's format."""
    bucket, _ = in_bucket(launch.run)
    nodes = launch.on.num_hosts if launch.on.chip.kind is ChipKind.gpu else 1
    return {
        "name": job_name(launch),
        "resources": resources(launch),
        "num_nodes": nodes,
        "workdir": ".",
        "file_mounts": {f"{BUCKETS}/{bucket}": {"source": f"gs://{bucket}", "mode": "MOUNT"}},
        "setup": f"bash {SCRIPT} install",
        "run": f"bash {SCRIPT}",
    }


def resources(launch: Launch) -> dict[str, Any]:
    """Accelerators and their place; SkyPilot chooses what is not given."""
    on, zone = launch.on, launch.site.zone
    fields: dict[str, Any] = {}
    if zone:
        fields["infra"] = f"gcp/{zone.rpartition('-')[0]}/{zone}"
    elif on.chip.kind is ChipKind.tpu:
        fields["infra"] = "gcp"
    if on.chip.kind is ChipKind.tpu:
        fields["accelerators"] = {f"tpu-{accelerator_type(launch)}": 1}
        fields["accelerator_args"] = {"tpu_vm": True, "runtime_version": RUNTIMES[on.chip.name]}
    else:
        fields["accelerators"] = {GPUS[on.chip.name]: on.num_chips // on.num_hosts}
    fields["use_spot"] = launch.purchase is Purchase.spot
    # Preempted jobs restart without this.
    fields["job_recovery"] = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [AGAIN]}
    return fields
