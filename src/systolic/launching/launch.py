"""The description of a launch, its bill, and what a platform makes of it."""

import enum
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from systolic.chips import Slice
from systolic.core.units import duration

HOUR = 3600.0
REJOIN_SECONDS = 300
GONE = 3
"""Exit code of a script that ends a launch and has found that it has ended before."""
CODE = "code"
"""Folder of the recipe's files, beside the others of a launch."""


class Purchase(enum.Enum):
    """How the chips are paid for."""

    on_demand = "on-demand"
    spot = "spot"
    """Cheaper, and taken back at any time."""
    reserved = "reserved"
    """A reservation of the user's: its price is in a contract, not in the catalogue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Where on a platform; empty fields leave the choice to the platform's client."""

    project: str = ""
    """Google Cloud's."""
    zone: str = ""
    namespace: str = ""
    """Kubernetes'."""
    service_account: str = ""
    queue: str = ""
    """Kueue's local queue, or Slurm's partition."""
    account: str = ""
    """Slurm's, whose budget is charged."""
    network: str = ""
    """Google Cloud's."""
    claim: str = ""
    """Kubernetes' PersistentVolumeClaim with the run's folder, mounted at ``/runs``."""
    reservation: str = ""
    """Google Cloud's; empty takes any that matches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """What Slurm is told; empty fields leave it to the cluster."""

    time: str = ""
    """Longest time of a job, ``24:00:00``."""
    gpus_per_node: int | None = None
    """By default as the catalogue has it."""
    setup: str = ""
    """A line of shell before the training, such as ``module load cuda``."""
    options: tuple[str, ...] = ()
    """More of ``sbatch``."""
    programs: str = ""
    """Folder with the ``systolic`` of the environment that the launch is made in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchBill:
    """Cost of a launch before it starts."""

    purchase: Purchase
    usd_per_hour: float | None
    """Of all chips, of a server for its fewest pods; None where the catalogue has no such price."""
    usd_per_hour_most: float | None = None
    """Of a server, for its most pods."""
    as_of: str = ""
    """Date of the price."""
    region: str = ""
    """That the price is of."""
    zone: str = ""
    """That the chips are in."""
    seconds: float | None = None
    """Of all steps; None without a plan or a forecast."""
    seconds_low: float | None = None
    seconds_high: float | None = None
    source: str = ""
    """What the time is from."""
    instead: str = ""
    """What is said instead of a price and a time."""

    def usd(self, seconds: float | None) -> float | None:
        """Dollars for so many seconds."""
        if seconds is None or self.usd_per_hour is None:
            return None
        return self.usd_per_hour * seconds / HOUR

    def whence(self) -> str:
        """Region and date of the price; says so where it is another region than that of the chips."""
        text = f"prices of {', '.join(filter(None, (self.region, self.as_of)))}"
        asked = self.zone.rpartition("-")[0]
        other = asked not in ("", self.region)
        return (
            f"{text}: the catalogue has none of {asked}, whose price may be another"
            if other
            else text
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "purchase": self.purchase.value,
            "usd_per_hour": self.usd_per_hour,
            "usd_per_hour_most": self.usd_per_hour_most,
            "price_as_of": self.as_of,
            "price_region": self.region,
            "hours": None if self.seconds is None else self.seconds / HOUR,
            "usd": self.usd(self.seconds),
            "usd_low": self.usd(self.seconds_low),
            "usd_high": self.usd(self.seconds_high),
            "source": self.source,
        }

    def text(self) -> str:
        """One line: the price, then the time and the total where they are known."""
        if self.instead:
            return self.instead
        if self.purchase is Purchase.reserved:
            price = "price as your reservation has it"
        elif self.usd_per_hour is None:
            price = f"no {self.purchase.value} price in the catalogue"
        else:
            price = f"${self.usd_per_hour:,.2f} an hour {self.purchase.value}"
            price += f" ({self.whence()})" if self.as_of or self.region else ""
        if self.seconds is None:
            return f"{price}; the time is not known: give --plan plan.json or --quick"
        total = self.usd(self.seconds)
        between = [self.usd(self.seconds_low), self.usd(self.seconds_high)]
        text = f"{price}, {duration(self.seconds)} of steps by {self.source}"
        if total is None:
            return text
        text += f": ${total:,.2f}"
        if None not in between:
            text += f" (${between[0]:,.2f} to ${between[1]:,.2f})"
        return f"{text}, start-up, evaluations and lost work not counted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One training command on the hosts of a slice."""

    name: str
    on: Slice
    target: str
    """What is trained: a recipe's name, or ``FILE.py:function`` with FILE in ``code``."""
    options: tuple[str, ...]
    """Words of ``systolic train`` after it: the recipe's options, and those of the verb."""
    made_by: tuple[str, ...]
    """The command that asked for the launch; every file names it."""
    run: str
    """The run's folder: a path on the hosts, or ``gs://BUCKET/FOLDER``, which they mount."""
    id: str = field(default_factory=partial(secrets.token_hex, 4))
    """Label of what all launches of one folder create, by which they know it again: others may have the same name."""
    purchase: Purchase = Purchase.on_demand
    image: str = ""
    """Container image with Systolic and the recipe."""
    site: Site = field(default_factory=Site)
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    restarts: int = 10
    """Restarts after a failure or a lost machine."""
    min_slices: int | None = None
    """Slices that the training goes on with at least, where others do not come back; None waits for all."""
    rejoin_seconds: int | None = None
    """For a slice to come back before it is left out; None is :data:`REJOIN_SECONDS`."""
    processes: int | None = None
    """Of ``local``: processes on this machine; by default the slice's hosts."""
    keep: bool = False
    """Of ``tpu-vm``: leave the machines when the training has ended."""
    version: str = ""
    """Of Systolic."""
    code: Mapping[str, str] = field(default_factory=dict)
    """The user's recipe and the modules beside it: path to content; empty for a shipped recipe."""
    directory: str = ""
    """Folder that ``local`` works in and finds the recipe in."""
    user: str = ""
    """Of ``docker``: numbers of the user and group that the container acts as, ``1000:1000``."""
    paths: tuple[str, ...] = ()
    """Of ``docker``: files and folders of this machine that the options name."""

    @property
    def patience_seconds(self) -> int:
        """For a slice to come back before it is left out."""
        return REJOIN_SECONDS if self.rejoin_seconds is None else self.rejoin_seconds

    @property
    def hosts_per_slice(self) -> int:
        """Hosts of one of the slices."""
        return self.on.num_hosts // self.on.num_slices

    @property
    def chips_per_host(self) -> int:
        """Chips of each host."""
        return self.on.num_chips // self.on.num_hosts

    def command(self, *, code: str = "", run: str = "") -> tuple[str, ...]:
        """What runs on every host: it starts the run, or continues it where it has begun.

        Args:
            code: Folder of the recipe's files on the host.
            run: The run's folder there, where that is a mount.
        """
        target = f"{code}/{self.target}" if self.code and code else self.target
        fewer = () if self.min_slices is None else ("--for-devices", str(self.on.num_devices))
        words = (*self.options, *fewer, "--run", run or self.run, "--continue")
        return ("systolic", "train", target, *words)

    def header(self) -> str:
        """Comment at the top of every file."""
        return (
            f"# Made by: {shlex.join(self.made_by)}\n# (systolic {self.version}; {self.on.name})\n"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientDefault:
    """What the platform's client takes by default and is fixed at submit, since the user may change it later.

    Of several each is asked for with the options that those before it gave.
    """

    what: str
    """Also the option that gives it to every command: ``--context=…``."""
    words: tuple[str, ...]
    """The command that prints it."""
    otherwise: str = ""
    """What the user does where it prints nothing."""
    empty: str = ""
    """What the client takes where it prints nothing; empty where that is a mistake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a platform needs: files by name, and its client's commands, all run in the files' folder."""

    files: Mapping[str, str]
    submit: tuple[tuple[str, ...], ...]
    """Commands that start the launch, one after another."""
    status: tuple[str, ...]
    """Shows how it is, in the client's own words."""
    logs: tuple[str, ...]
    follow: tuple[str, ...]
    """Prints the logs as they are written."""
    stop: tuple[tuple[str, ...], ...]
    detached: bool = False
    """Whether the last command of ``submit`` lasts as long as the training, so that it runs in the background."""
    notes: tuple[str, ...] = ()
    """What the user should know before submitting, a line each."""
    hosts: int = 1
    """Machines that the platform gives, or processes of ``local``."""
    ships: bool = False
    """Whether this package goes along: a wheel, requirements.txt and the recipe's files in ``code/``."""
    checks: tuple[tuple[str, ...], ...] = ()
    """Commands that refuse what is another's or still runs, and make room for what is submitted."""
    asked: tuple[ClientDefault, ...] = ()
    """Options that all commands get at submit."""
    in_place: bool = False
    """Whether what is submitted again replaces what runs, which goes on costing."""
    state: tuple[str, ...] = ()
    """Where the client is fast enough to ask for a list: prints one of Docker's states and the exit code."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the files' contents."""
        return {
            "files": sorted(self.files),
            "asked": [asdict(one) for one in self.asked],
            "checks": [list(words) for words in self.checks],
            "submit": [list(words) for words in self.submit],
            "status": list(self.status),
            "state": list(self.state),
            "logs": list(self.logs),
            "follow": list(self.follow),
            "stop": [list(words) for words in self.stop],
            "detached": self.detached,
            "in_place": self.in_place,
            "notes": list(self.notes),
            "hosts": self.hosts,
        }
