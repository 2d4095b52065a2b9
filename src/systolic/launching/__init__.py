"""Launches of a training command or a server on a platform, and the verbs launch, runs, status, logs and stop.

The verbs are the functions of ``command``, shown by ``view``. A ``request`` is described as a :class:`Launch`, which a module per
platform turns into :class:`Prepared`, files and commands of the platform's own client, by a pure function. ``lifecycle`` submits
and stops with them, ``record`` keeps the list of launches, ``state`` reads phase, cost and logs. ``supervisor`` runs and restarts
the processes of ``local``.
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
