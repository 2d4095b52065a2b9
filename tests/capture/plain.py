"""``python -m tests.capture.plain PROGRAM WORDS`` is ``python PROGRAM WORDS``, of a process that may be forked."""

import runpy
import sys

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
