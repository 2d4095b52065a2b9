"""``python -m systolic`` is the ``systolic`` command."""

import sys

from systolic.cli.main import main

sys.exit(main())
