"""Launches of a training command on a platform, as files and commands of the platform's own client.

One module per platform, each with a pure function from :class:`Launch` to :class:`Prepared`. Nothing is read, sent or
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
