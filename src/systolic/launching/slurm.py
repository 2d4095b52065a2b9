"""``--via slurm``: a batch script for a GPU cluster, with a task per GPU.

``systolic train`` takes its peers, and each task its GPU, from the variables that ``srun`` sets. Slurm signals the script
before the time limit; it lets the training save and requeues the job: https://slurm.schedmd.com/sbatch.html.
"""

import re
import shlex
from collections.abc import Sequence

from systolic.chips import ChipKind
from systolic.core.errors import OptionError
from systolic.launching.launch import CODE, Launch, Prepared, Purchase
from systolic.launching.names import check_name, check_word, is_bucket
from systolic.launching.scripts import rendered

LONGEST, MOST_PER_NODE = 60, 72
"""Maximum characters of a job's name, and GPUs of a node (a rack of GB200 NVL72)."""
SCRIPT, OUTPUT = "job.sh", "slurm.log"
SAVE_SECONDS = 180
"""Time to save before the job's time limit."""
_TIME = re.compile(r"\d+|\d+:\d{2}(:\d{2})?|\d+-\d{1,2}(:\d{2}){0,2}")
_OPTION = re.compile(r"--[a-z][-a-z]*(=[-\w.,:@%+/*|&\[\]]+)?")
SHORTEST_SECONDS = 600
"""Minimum time of a job; a shorter one would end before it has started, trained and saved."""
_TAKEN = {
    **dict.fromkeys(("job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node"), ""),
    **dict.fromkeys(("output", "signal"), ""),
    "time": "--time",
}
"""Options of sbatch that the launch sets, and the launch's own option for each."""


def prepare(launch: Launch) -> Prepared:
    """Prepares a batch script.

    Raises:
        OptionError: the slice has no GPUs, or a name, the time or an option is invalid.
    """
    on, site = launch.on, launch.site
    check_slice(launch)
    check_name(launch.name, LONGEST, "a job's name")
    check_word(site.queue, "queue")
    check_word(site.account, "account")
    _check_setup(launch.slurm.setup)
    if is_bucket(launch.run):
        raise OptionError(
            f"run is {launch.run}, but slurm trains into a folder that the nodes share; give --run DIR"
        )
    if launch.purchase is not Purchase.on_demand:
        raise OptionError(
            "slurm rents no chips; leave out --spot and --reserved, or for a reservation give --sbatch=--reservation=NAME"
        )
    fields = {
        "name": launch.name,
        "nodes": nodes(launch),
        "gpus": on.num_chips // nodes(launch),
        "whole": on.num_chips >= per_node(launch),
        "lines": _lines(launch),
        "save_seconds": SAVE_SECONDS,
        "restarts": launch.restarts,
        "output": OUTPUT,
        "bin": shlex.quote(launch.slurm.programs) if launch.slurm.programs else "",
        "setup": launch.slurm.setup,
        "command": shlex.join(launch.command(code=CODE)),
    }
    mine = ("--me", "--name", launch.name)
    tail = ("tail", "-n", "200")
    return Prepared(
        files={
            SCRIPT: rendered(SCRIPT, launch.header(), fields),
            **{f"{CODE}/{path}": text for path, text in launch.code.items()},
        },
        submit=(("sbatch", SCRIPT),),
        status=("squeue", *mine),
        logs=(*tail, OUTPUT),
        follow=(*tail, "-F", OUTPUT),
        # Pending jobs are cancelled at once; in running ones the script lets the training save.
        stop=(
            ("scancel", *mine, "--state=PENDING"),
            ("scancel", *mine, "--batch", "--signal=USR2"),
        ),
        notes=_notes(launch),
        hosts=nodes(launch),
    )


def seconds(time: str) -> int:
    """Parses a time of Slurm into seconds: ``MINUTES``, ``MINUTES:SECONDS``, ``HOURS:MINUTES:SECONDS`` or ``DAYS-HOURS[:…]``."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    scales = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(a * b for a, b in zip(parts, scales, strict=False))


def _check_setup(line: str) -> None:
    if "\n" in line:
        raise OptionError(
            "setup has several lines; put them into a file: --setup 'source setup.sh'"
        )
    try:
        shlex.split(line)
    except ValueError as error:
        raise OptionError(
            f"setup is {line!r}, which is not valid shell ({error}); close its quotes, or put it into a file: --setup 'source setup.sh'"
        ) from error


def check_slice(launch: Launch) -> None:
    """Checks that the slice has GPUs and fills its nodes.

    Raises:
        OptionError: the slice has no GPUs, or the number per node is too large or does not divide it.
    """
    on, size = launch.on, launch.slurm.gpus_per_node
    if on.chip.kind is not ChipKind.gpu:
        raise OptionError(
            f"{on.name} has no GPUs, which slurm requires; give --on 8xh100, or for TPUs --via tpu-vm or gke"
        )
    if size is not None and size > MOST_PER_NODE:
        raise OptionError(
            f"gpus-per-node is {size}, more than any node has; give {MOST_PER_NODE} or less"
        )
    if size is not None and on.num_chips > size and on.num_chips % size:
        raise OptionError(
            f"gpus-per-node is {size}, which does not divide the {on.num_chips} GPUs of {on.name}"
        )


def per_node(launch: Launch) -> int:
    """Number of GPUs of a whole node."""
    return launch.slurm.gpus_per_node or launch.on.chip.chips_per_host or 1


def nodes(launch: Launch) -> int:
    """Number of nodes."""
    return -(-launch.on.num_chips // per_node(launch))


def _lines(launch: Launch) -> list[str]:
    """Options of ``sbatch`` that depend on the launch's options."""
    site, asked = launch.site, launch.slurm
    found = []
    if asked.time:
        if not _TIME.fullmatch(asked.time) or not any(c in "123456789" for c in asked.time):
            raise OptionError(
                f"time is {asked.time!r}; Slurm takes HOURS:MINUTES:SECONDS or DAYS-HOURS: --time 24:00:00"
            )
        if seconds(asked.time) < SHORTEST_SECONDS:
            raise OptionError(
                f"time is {asked.time}, but the training is signalled to save {SAVE_SECONDS // 60} minutes before the limit; give {SHORTEST_SECONDS // 60} minutes or more"
            )
        found.append(f"--time={asked.time}")
    if site.queue:
        found.append(f"--partition={site.queue}")
    if site.account:
        found.append(f"--account={site.account}")
    return [*found, *_checked(asked.options)]


def _checked(words: Sequence[str]) -> Sequence[str]:
    for word in words:
        if not _OPTION.fullmatch(word):
            raise OptionError(
                f"sbatch has {word!r}; it takes options as --name=value: --sbatch='--qos=long --constraint=h100'"
            )
        name = word[2:].partition("=")[0]
        if name in _TAKEN:
            instead = _TAKEN[name] or "--name, --on and --gpus-per-node"
            raise OptionError(f"sbatch has {word}, which the launch sets; give {instead}")
    return words


def _notes(launch: Launch) -> tuple[str, ...]:
    asked = launch.slurm
    notes = [
        f"this folder, {launch.run} and {asked.programs or 'Systolic'} must be on a disk that the nodes share"
    ]
    if not asked.time:
        notes.append(
            "no --time is given, so the partition's limit applies; at the limit the job saves, requeues and continues in either case"
        )
    return tuple(notes)
