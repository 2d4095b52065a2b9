"""``--via slurm``: a batch script for a GPU cluster, with a task per GPU.

``systolic train`` takes its peers, and each task its GPU, from the variables that ``srun`` sets. Slurm signals the script
before the time limit; it lets the training save and requeues the job: https://slurm.schedmd.com/sbatch.html.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

from systolic.chips import ChipKind
from systolic.core.errors import OptionError
from systolic.launching.launch import CODE, Launch, Prepared, Purchase, Site, rendered
from systolic.launching.names import check_name, check_word, choices, is_bucket

LONGEST, MOST_PER_NODE = 60, 72
"""Maximum characters of a job's name, and GPUs of a node (a rack of GB200 NVL72)."""
SCRIPT, OUTPUT = "job.sh", "slurm.log"
SAVE_SECONDS = 180
"""Time to save before the job's time limit."""
_TIME = re.compile(r"\d+|\d+:\d{2}(:\d{2})?|\d+-\d{1,2}(:\d{2}){0,2}")
_OPTION = re.compile(r"--[a-z][-a-z]*(=[-\w.,:@%+/*|&?\[\]]+)?")
SHORTEST_SECONDS = 600
"""Minimum time of a job; a shorter one would end before it has started, trained and saved."""
_SIZE = "give --name, --on and --gpus-per-node"
_REQUEUED = "leave it out, the job is requeued to continue its run"
_TAKEN: Mapping[str, str] = {
    **dict.fromkeys(("job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node"), _SIZE),
    "time": "give --time",
    "output": f"leave it out, systolic logs reads {OUTPUT}",
    "open-mode": "leave it out, a requeued job appends to its log",
    "signal": "leave it out, the training is signalled to save before the limit",
    "array": "leave it out, the jobs of an array would train the same run; for several runs launch several times with other --name",
    "no-requeue": _REQUEUED,
}
"""Options of sbatch that the launch sets, and what to do instead."""
_DEPENDENCY, _SINGLETON = "dependency", "singleton"


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
            f"--run is {launch.run}, but slurm trains into a folder that the nodes share; give --run DIR"
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
        "dependency": _dependency(launch.slurm.options),
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
            "--setup has several lines; put them into a file: --setup 'source setup.sh'"
        )
    try:
        shlex.split(line)
    except ValueError as error:
        raise OptionError(
            f"--setup is {line!r}, which is not valid shell ({error}); close its quotes, or put it into a file: --setup 'source setup.sh'"
        ) from error


def check_slice(launch: Launch) -> None:
    """Checks that the slice has GPUs and fills its nodes.

    Raises:
        OptionError: the slice has no GPUs, or the number per node is too large or does not divide it.
    """
    on, size = launch.on, launch.slurm.gpus_per_node
    if on.chip.kind is not ChipKind.gpu:
        raise OptionError(
            f"slurm takes GPU slices; {on.name} is a {on.chip.kind.value.upper()} slice; give --on 8xh100, or for TPUs --via tpu-vm or gke"
        )
    if size is not None and size > MOST_PER_NODE:
        raise OptionError(
            f"--gpus-per-node is {size}, more than any node has; give {MOST_PER_NODE} or less"
        )
    if size is not None and on.num_chips > size and on.num_chips % size:
        raise OptionError(
            f"--gpus-per-node is {size}, which does not divide the {on.num_chips} GPUs of {on.name}; give {choices(on.num_chips, MOST_PER_NODE)}"
        )


def per_node(launch: Launch) -> int:
    """Number of GPUs of a whole node."""
    return launch.slurm.gpus_per_node or launch.on.chip.chips_per_host or 1


def nodes(launch: Launch) -> int:
    """Number of nodes."""
    return -(-launch.on.num_chips // per_node(launch))


def _lines(launch: Launch) -> list[str]:
    """Options of ``sbatch`` that depend on the launch's options."""
    site, options = launch.site, launch.slurm
    flags = []
    if options.time:
        if not _TIME.fullmatch(options.time) or not any(c in "123456789" for c in options.time):
            raise OptionError(
                f"--time is {options.time!r}; Slurm takes HOURS:MINUTES:SECONDS or DAYS-HOURS: --time 24:00:00"
            )
        if seconds(options.time) < SHORTEST_SECONDS:
            raise OptionError(
                f"--time is {options.time}, but the training is signalled to save {SAVE_SECONDS // 60} minutes before the limit; give {SHORTEST_SECONDS // 60} minutes or more"
            )
        flags.append(f"--time={options.time}")
    if site.queue:
        flags.append(f"--partition={site.queue}")
    if site.account:
        flags.append(f"--account={site.account}")
    more = [word for word in options.options if not _is(word, _DEPENDENCY)]
    for word in more:
        _check_option(word, site)
    return [*flags, *more]


def _is(word: str, option: str) -> bool:
    """Whether a word is an option of sbatch, which takes abbreviations too."""
    name = word[2:].partition("=")[0]
    return bool(name) and option.startswith(name)


def _check_option(word: str, site: Site) -> None:
    if not _OPTION.fullmatch(word):
        raise OptionError(
            f"--sbatch has {word!r}; it takes options as --name=value: --sbatch='--qos=long --constraint=h100'"
        )
    for name, instead in _TAKEN.items():
        if _is(word, name):
            raise OptionError(f"--sbatch has {word}, which the launch sets; {instead}")
    for name, option, value in (
        ("partition", "queue", site.queue),
        ("account", "account", site.account),
    ):
        if value and _is(word, name):
            raise OptionError(
                f"--sbatch has {word}, but --{option} is {value}; leave one of them out"
            )


def _dependency(words: Sequence[str]) -> str:
    """Dependencies of the job: those of the user, and on jobs of its name, since two would write one run.

    sbatch takes one separator, and uses the last of several options: https://slurm.schedmd.com/sbatch.html#OPT_dependency.
    """
    words_given = [word for word in words if _is(word, _DEPENDENCY)]
    for word in words_given:
        if not _OPTION.fullmatch(word) or "=" not in word:
            raise OptionError(
                f"--sbatch has {word!r}; it takes dependencies as --dependency=afterok:JOB"
            )
        if "?" in word:
            raise OptionError(
                f"--sbatch has {word}, of which one is enough, but the job also waits for others of its name ({_SINGLETON}), and Slurm does not combine the two; separate them with commas, or give one"
            )
    dependencies = [
        dependency for word in words_given for dependency in word.partition("=")[2].split(",")
    ]
    return ",".join(
        [*(dependency for dependency in dependencies if dependency != _SINGLETON), _SINGLETON]
    )


def _notes(launch: Launch) -> tuple[str, ...]:
    options = launch.slurm
    notes = [
        f"this folder, {launch.run} and {options.programs or 'Systolic'} must be on a disk that the nodes share"
    ]
    if not options.time:
        notes.append(
            "no --time is given, so the partition's limit applies; at the limit the job saves, requeues and continues in either case"
        )
    return tuple(notes)
