"""``--via docker``: an image with this package and its pinned requirements, built and run on this machine.

The container runs as the launching user, who then owns the run's files. ``train.sh`` restarts the training after a
failure, since Docker's own restart policies do not distinguish exit codes:
https://docs.docker.com/reference/cli/docker/container/run.
"""

import platform

from systolic.chips import ChipKind
from systolic.core.errors import OptionError
from systolic.launching.launch import GONE, Launch, Prepared, Purchase, rendered
from systolic.launching.names import check_name, is_bucket

LONGEST = 60
DOCKERFILE, SCRIPT, CONTAINER = "Dockerfile", "train.sh", "container.sh"
LABEL = "systolic.launch"
SHIPPED = ("requirements.txt", "wheels", SCRIPT, "code")
STATE = "{{.State}} {{.Status}}"
"""Format of ``docker ps`` with the state and, after the end, the exit code: ``exited Exited (1) 2 minutes ago``."""
RUNS = "/runs"
KILLED = 4
"""Exit code of a stop whose training was killed before it had saved."""
SAVE_SECONDS = 120
"""Time between Docker's SIGTERM and SIGKILL."""
PLATFORMS = {ChipKind.cpu: "cpu", ChipKind.gpu: "cuda,cpu", ChipKind.tpu: "tpu,cpu"}


def prepare(launch: Launch) -> Prepared:
    """Prepares a build folder, and the commands that build and run the image.

    Raises:
        OptionError: the slice has several hosts, the run is not a local folder, or a name is invalid.
    """
    check_slice(launch)
    check_name(launch.name, LONGEST, "an image's name")
    if is_bucket(launch.run):
        raise OptionError(f"run is {launch.run}, but docker trains into a folder; give --run DIR")
    if launch.purchase is not Purchase.on_demand:
        raise OptionError("docker rents no chips; leave out --spot and --reserved")
    label = f"{LABEL}={launch.id}"
    fields = {
        "name": launch.name,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "platforms": PLATFORMS[launch.on.chip.kind],
        "restarts": launch.restarts,
    }
    owned = {"name": launch.name, "id": launch.id, "label": LABEL, "gone": GONE, "killed": KILLED}
    mine = ("docker", "ps", "--all", "--filter", f"label={label}")
    logs = ("bash", CONTAINER, "logs", "--tail", "200")
    return Prepared(
        files={
            DOCKERFILE: rendered(DOCKERFILE, launch.header(), fields),
            SCRIPT: rendered(SCRIPT, launch.header(), fields),
            CONTAINER: rendered(CONTAINER, launch.header(), owned),
            ".dockerignore": launch.header()
            + "\n".join(["*", *(f"!{path}" for path in SHIPPED)])
            + "\n",
        },
        checks=(("bash", CONTAINER, "check"),),
        submit=(
            ("mkdir", "-p", launch.run),
            ("docker", "build", "--platform", "linux/amd64", "--tag", launch.name, "."),
            run_words(launch, label),
        ),
        status=mine,
        state=(*mine, "--format", STATE),
        logs=logs,
        follow=(*logs, "--follow"),
        stop=(("bash", CONTAINER, "stop"),),
        notes=_notes(launch),
        ships=True,
    )


def check_slice(launch: Launch) -> None:
    """Checks that the slice is on one machine.

    Raises:
        OptionError: the slice has several hosts.
    """
    on = launch.on
    if launch.on.num_hosts > 1:
        raise OptionError(
            f"{on.name} has {on.num_hosts} hosts, but docker runs on this machine; give --on 8xcpu, 8xh100 or v5e-8, or --via local"
        )


def run_words(launch: Launch, label: str) -> tuple[str, ...]:
    """Command that starts the container."""
    on = launch.on
    words = ["docker", "run", "--detach", "--init", "--name", launch.name, "--label", label]
    words += ["--stop-timeout", str(SAVE_SECONDS)]
    if launch.user:
        words += ["--user", launch.user]
    words += ["--volume", f"{launch.run}:{RUNS}/{launch.name}"]
    for path in launch.paths:
        words += ["--volume", f"{path}:{path}:ro"]
    if on.chip.kind is ChipKind.gpu:
        words += ["--gpus", str(on.num_chips), "--ipc", "host"]
    elif on.chip.kind is ChipKind.tpu:
        words += ["--privileged", "--network", "host"]
    else:
        words += ["--env", f"XLA_FLAGS=--xla_force_host_platform_device_count={on.num_devices}"]
    command = launch.command(code="code", run=f"{RUNS}/{launch.name}")
    return (*words, launch.name, "bash", SCRIPT, *command)


def _notes(launch: Launch) -> tuple[str, ...]:
    kind = launch.on.chip.kind
    if kind is ChipKind.gpu:
        return ("this machine needs NVIDIA's driver and its container toolkit",)
    if kind is ChipKind.tpu:
        return ("this machine must be a TPU VM; --privileged gives the container its devices",)
    return ()
