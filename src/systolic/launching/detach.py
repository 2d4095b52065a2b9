"""``python -m systolic.launching.detach OUTPUT WORDS…``: starts a command that outlives its caller, and prints its process ID."""

import os
import subprocess
import sys


def main(output: str, words: list[str]) -> None:
    """Starts ``words`` in a new session, with output to a file."""
    with open(output, "wb") as out:
        started = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    print(started.pid, flush=True)
    # Exits without waiting for the process, which the interpreter would warn about.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
