"""Description of a launch, its bill, and its files and commands for a platform: one-line shell commands, YAML that all of its readers agree on, and scripts from templates."""

import enum
import re
import secrets
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jinja2
import yaml
from msgspec import Struct

from systolic.chips import Slice
from systolic.core.units import duration

_SHORT = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN = re.compile(r"(--)?[A-Za-z/][-A-Za-z0-9_./=]*(:[-A-Za-z0-9_./=]+)*")
_WORDS = frozenset(
    ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "infinity")
)
"""Words that YAML 1.1 or 1.2 reads as a boolean, null or a number, in any case; some with a dot or sign before them."""
HOUR = 3600.0
REJOIN_SECONDS = 300
CHIPS_PER_NODE = 4
"""Chips of a node in GKE's pools of TPU slices (xpk's machine types end in ``-4t``); a single chip has a node of its own."""
GONE = 3
"""Exit code of a stop script that finds the launch already ended."""
CODE = "code"
"""Folder of the recipe's files, inside the launch's folder."""


def one_line(words: Iterable[str]) -> str:
    """Shell command on one line; words with control characters are written as bash reads them, ``$'a\\nb'``."""
    return " ".join(
        shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_escaped, word))}'"
        for word in words
    )


def _escaped(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def yaml_text(documents: Sequence[Any]) -> str:
    """YAML documents in which every string is quoted that any reader could take for something else.

    PyYAML follows YAML 1.1 and writes ``1e-05`` plain, since it is a string there; in YAML 1.2 and for Go's readers, such
    as kubectl, it is a number.
    """
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=sys.maxsize)


class _Dumper(yaml.SafeDumper):
    """Quotes strings, except those that nobody takes for something else."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else "'")


_Dumper.add_representer(str, _string)


def rendered(name: str, header: str, fields: Mapping[str, Any]) -> str:
    """Renders a script; the template puts the header after its first line, the interpreter.

    Args:
        name: Name of the script.
        header: Comments with the command that made it.
        fields: Values of the template, quoted for a shell.
    """
    template = _environment().get_template(f"{name}.jinja")
    return template.render({**fields, "header": header.rstrip("\n")})


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("systolic.launching", "files"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )


class Purchase(enum.Enum):
    """How the chips are paid for."""

    on_demand = "on-demand"
    spot = "spot"
    """Cheaper; can be preempted at any time."""
    reserved = "reserved"
    """Reservation of the user, whose price is in a contract, not in the catalogue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Place on a platform; empty fields leave the choice to the platform's client."""

    project: str = ""
    """Google Cloud project."""
    zone: str = ""
    namespace: str = ""
    """Kubernetes namespace."""
    service_account: str = ""
    queue: str = ""
    """Kueue local queue, or Slurm partition."""
    account: str = ""
    """Slurm account to charge."""
    network: str = ""
    """Google Cloud network."""
    claim: str = ""
    """Kubernetes PersistentVolumeClaim with the run's folder, mounted at ``/runs``."""
    reservation: str = ""
    """Google Cloud reservation; empty uses any that matches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """Options for Slurm; empty fields leave the choice to the cluster."""

    time: str = ""
    """Time limit of a job, such as ``24:00:00``."""
    gpus_per_node: int | None = None
    """GPUs of a node; by default the catalogue's number."""
    setup: str = ""
    """Shell line to run before the training, such as ``module load cuda``."""
    options: tuple[str, ...] = ()
    """More options for ``sbatch``."""
    programs: str = ""
    """Folder with the ``systolic`` of the launching environment."""


class BillRecord(Struct, frozen=True, kw_only=True):
    """Bill in ``launch.json``; one of another version may lack fields."""

    purchase: str = Purchase.on_demand.value
    usd_per_hour: float | None = None
    usd_per_hour_most: float | None = None
    """Price per hour of a server for the maximum number of pods."""
    price_as_of: str = ""
    price_region: str = ""
    hours: float | None = None
    """Time of all steps."""
    usd: float | None = None
    """Cost of all steps."""
    usd_low: float | None = None
    usd_high: float | None = None
    source: str = ""
    """Source of the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchBill:
    """Estimated cost of a launch before it starts."""

    purchase: Purchase
    usd_per_hour: float | None
    """Price per hour of all chips, of a server for the minimum number of pods; None if the catalogue has none."""
    usd_per_hour_most: float | None = None
    """Price per hour of a server for the maximum number of pods."""
    as_of: str = ""
    """Date of the price."""
    region: str = ""
    """Region of the price."""
    zone: str = ""
    """Zone of the chips."""
    seconds: float | None = None
    """Time of all steps; None without a plan or a forecast."""
    seconds_low: float | None = None
    seconds_high: float | None = None
    source: str = ""
    """Source of the time."""
    instead: str = ""
    """Text that replaces price and time."""

    def usd(self, seconds: float | None) -> float | None:
        """Cost of a time in US dollars."""
        if seconds is None or self.usd_per_hour is None:
            return None
        return self.usd_per_hour * seconds / HOUR

    def whence(self) -> str:
        """Region and date of the price, with a warning if the chips are in another region."""
        text = f"prices of {', '.join(filter(None, (self.region, self.as_of)))}"
        region = self.zone.rpartition("-")[0]
        other = region not in ("", self.region)
        return (
            f"{text}; the catalogue has none for {region}, where they may differ" if other else text
        )

    def record(self) -> BillRecord:
        """The bill as ``launch.json`` has it."""
        return BillRecord(
            purchase=self.purchase.value,
            usd_per_hour=self.usd_per_hour,
            usd_per_hour_most=self.usd_per_hour_most,
            price_as_of=self.as_of,
            price_region=self.region,
            hours=None if self.seconds is None else self.seconds / HOUR,
            usd=self.usd(self.seconds),
            usd_low=self.usd(self.seconds_low),
            usd_high=self.usd(self.seconds_high),
            source=self.source,
        )

    def text(self) -> str:
        """One line with the price, then the time and the total if known."""
        if self.instead:
            return self.instead
        if self.purchase is Purchase.reserved:
            price = "price set by your reservation"
        elif self.usd_per_hour is None:
            price = f"no {self.purchase.value} price in the catalogue"
        else:
            price = f"${self.usd_per_hour:,.2f} an hour {self.purchase.value}"
            price += f" ({self.whence()})" if self.as_of or self.region else ""
        if self.seconds is None:
            return f"{price}; time unknown, give --plan plan.json or --quick"
        total = self.usd(self.seconds)
        between = [self.usd(self.seconds_low), self.usd(self.seconds_high)]
        text = f"{price}, {duration(self.seconds)} of steps by {self.source}"
        if total is None:
            return text
        text += f": ${total:,.2f}"
        if None not in between:
            text += f" (${between[0]:,.2f} to ${between[1]:,.2f})"
        return f"{text}, start-up, evaluations and lost work not included"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Training command on the hosts of a slice."""

    name: str
    on: Slice
    target: str
    """Recipe to train: its name, or ``FILE.py:function`` with FILE in ``code``."""
    options: tuple[str, ...]
    """Arguments of ``systolic train`` after the recipe: the recipe's options and the verb's."""
    made_by: tuple[str, ...]
    """Command that made the launch, named in every file."""
    run: str
    """Folder of the run: a path on the hosts, or ``gs://BUCKET/FOLDER``, which they mount."""
    id: str = field(default_factory=partial(secrets.token_hex, 4))
    """Label of all objects created by launches of one folder, which tells them from others of the same name."""
    purchase: Purchase = Purchase.on_demand
    image: str = ""
    """Container image with Systolic and the recipe."""
    site: Site = field(default_factory=Site)
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    restarts: int = 10
    """Restarts after a failure or a lost machine."""
    min_slices: int | None = None
    """Number of slices to continue with at least when others do not come back; None waits for all."""
    rejoin_seconds: int | None = None
    """Time for a slice to come back before it is dropped; None is :data:`REJOIN_SECONDS`."""
    processes: int | None = None
    """``local``: number of processes; by default the number of hosts of the slice."""
    keep: bool = False
    """``tpu-vm``: keep the machines after the training has ended."""
    version: str = ""
    """Version of Systolic."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Contents of the user's recipe and the modules it imports, by path; empty for a shipped recipe."""
    directory: str = ""
    """``local``: working directory, from which the recipe is loaded."""
    user: str = ""
    """``docker``: user and group IDs of the container, ``1000:1000``."""
    paths: tuple[str, ...] = ()
    """``docker``: files and folders of this machine that the options name."""

    @property
    def patience_seconds(self) -> int:
        """Time for a slice to come back before it is dropped."""
        return REJOIN_SECONDS if self.rejoin_seconds is None else self.rejoin_seconds

    @property
    def nodes_per_slice(self) -> int:
        """Number of GKE's nodes of one slice: the machines of its pools have four chips, or one."""
        return max(self.on.num_chips // self.on.num_slices // CHIPS_PER_NODE, 1)

    @property
    def chips_per_node(self) -> int:
        """Number of chips of one of these nodes."""
        return self.on.num_chips // self.on.num_slices // self.nodes_per_slice

    def command(self, *, code: str = "", run: str = "") -> tuple[str, ...]:
        """Command for every host, which starts the run or continues it.

        Args:
            code: Folder of the recipe's files on the host.
            run: Folder of the run on the host, if it is a mount.
        """
        target = f"{code}/{self.target}" if self.code and code else self.target
        fewer = () if self.min_slices is None else ("--for-devices", str(self.on.num_devices))
        words = (*self.options, *fewer, "--run", run or self.run, "--continue")
        return ("systolic", "train", target, *words)

    def header(self) -> str:
        """Comment at the top of every file: two lines, whatever the options contain."""
        made_by = one_line(self.made_by)
        return f"# Made by: {made_by}\n# (systolic {self.version}; {self.on.name})\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientDefault:
    """Default of the platform's client, recorded at submit because the user may change it later.

    Several are queried in order, each with the options from those before it.
    """

    what: str
    """Name of the default, also of the option that passes it to every command: ``--context=…``."""
    words: tuple[str, ...]
    """Command that prints it."""
    otherwise: str = ""
    """Advice for a command that prints nothing."""
    empty: str = ""
    """Value if the command prints nothing; empty if that is an error."""


class CommandsRecord(Struct, frozen=True, kw_only=True):
    """Commands of the platform's client in ``launch.json``; fields as those of :class:`Prepared`."""

    files: Sequence[str] = ()
    """Names of the files."""
    asked: tuple[ClientDefault, ...] = ()
    checks: tuple[tuple[str, ...], ...] = ()
    submit: tuple[tuple[str, ...], ...] = ()
    status: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    follow: tuple[str, ...] = ()
    stop: tuple[tuple[str, ...], ...] = ()
    detached: bool
    in_place: bool = False
    notes: Sequence[str] = ()
    hosts: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Files of a launch by name, and commands of the platform's client, all run in the files' folder."""

    files: Mapping[str, str]
    submit: tuple[tuple[str, ...], ...]
    """Commands that start the launch, run in order."""
    status: tuple[str, ...]
    """Command that shows the state, in the client's own format."""
    logs: tuple[str, ...]
    follow: tuple[str, ...]
    """Command that prints the logs as they are written."""
    stop: tuple[tuple[str, ...], ...]
    detached: bool = False
    """Whether the last command of ``submit`` runs as long as the training, and is therefore started in the background."""
    notes: tuple[str, ...] = ()
    """Notes for the user before submitting, one line each."""
    hosts: int = 1
    """Number of machines of the platform, or of processes of ``local``."""
    ships: bool = False
    """Whether the folder includes this package: a wheel, requirements.txt and the recipe's files in ``code/``."""
    checks: tuple[tuple[str, ...], ...] = ()
    """Commands before ``submit`` that fail if objects of the name are another's or still running, and remove ended ones."""
    asked: tuple[ClientDefault, ...] = ()
    """Defaults of the client that become options of all commands at submit."""
    in_place: bool = False
    """Whether submitting again updates the running objects, whose cost continues."""
    state: tuple[str, ...] = ()
    """Command that prints one of Docker's states and the exit code, for clients fast enough for ``systolic runs``."""

    def record(self) -> CommandsRecord:
        """The commands as ``launch.json`` has them."""
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in CommandsRecord.__struct_fields__
        }
        fields["files"] = sorted(self.files)
        return CommandsRecord(**fields)
