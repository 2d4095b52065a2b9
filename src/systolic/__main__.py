"""``python -m systolic`` is the ``systolic`` command."""

from systolic.cli.main import script

script()
