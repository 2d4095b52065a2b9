"""The application: what the command line and Python users call, from a recipe, a Job or a run to a result."""

from systolic.core.machine import set_up_xla

set_up_xla()
