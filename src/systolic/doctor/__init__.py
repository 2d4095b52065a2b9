"""Checks whether this machine is fit for training, with a fix for each problem.

``gather`` reads a :class:`Machine` from the system, ``measure`` runs JAX in a child process, and
``examine`` turns the record into findings with pure functions, so any machine can be examined from
its record.
"""

from systolic.doctor.checks import Finding, Status, examine
from systolic.doctor.machine import Machine, gather, measure

__all__ = ["Finding", "Machine", "Status", "examine", "gather", "measure"]
