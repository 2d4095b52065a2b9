"""Writes a draft until it is ended: ``python -m tests.runs.draft_child OUT``."""

import sys
import time
from pathlib import Path

from systolic.cli.main import guarded
from systolic.core.shutdown import ends_cleanly
from systolic.runs.bundle.folder import draft


def work() -> None:
    with ends_cleanly(), draft(Path(sys.argv[1])) as made:
        made.add("weights", b"half")
        print("writing", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    raise SystemExit(guarded(work))
