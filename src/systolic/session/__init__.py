"""The application: what the command line and Python users call, from a recipe, a Job or a run to a result."""

from systolic.core.machine import quiet_libtpu

quiet_libtpu()
