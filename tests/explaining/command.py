"""``python -m tests.explaining.command WORDS`` is ``systolic WORDS`` of a process that may be forked."""

from systolic.cli.main import script

script()
