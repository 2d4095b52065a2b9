"""Ends as a converter that fails in its own code: what it prints before, and how far it came."""

import os
import signal
import sys
from pathlib import Path

from systolic.formats.litert.child import STAGE

if __name__ == "__main__":
    Path(sys.argv[1], STAGE).write_text("running the file")
    print(
        "INFO: ready\nRunning Calibration::   0%|          | 0/721\rCalibration::  94%|#########4| 3it/s",
        end="",
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGSEGV)
