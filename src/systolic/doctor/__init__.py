"""Checks whether this machine is fit to train on, with a fix for each fault.

``gather`` reads a :class:`Machine` from the system, ``measure`` lets JAX run in a child process,
``examine`` turns the record into findings with pure functions, so that any machine can be examined
from its record.
"""

from systolic.doctor.checks import Finding, Status, examine
from systolic.doctor.gather import gather
from systolic.doctor.machine import Machine
from systolic.doctor.measure import measure

__all__ = ["Finding", "Machine", "Status", "examine", "gather", "measure"]
