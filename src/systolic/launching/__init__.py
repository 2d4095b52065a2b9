"""A training command on somebody's machines: what each platform needs, as named files and the commands of its own client.

One module a platform, each with a pure function from a :class:`Launch` to a :class:`Prepared`; nothing is read, sent or
started here, except by ``supervisor``, which runs and restarts the processes of ``local``.
"""

from systolic.launching.launch import (
    CODE,
    GONE,
    ClientDefault,
    Launch,
    LaunchBill,
    Prepared,
    Purchase,
    Site,
    SlurmOptions,
)
from systolic.launching.platforms import PLATFORMS, prepare

__all__ = [
    "CODE",
    "GONE",
    "PLATFORMS",
    "ClientDefault",
    "Launch",
    "LaunchBill",
    "Prepared",
    "Purchase",
    "Site",
    "SlurmOptions",
    "prepare",
]
