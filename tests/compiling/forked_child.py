"""Tells its surroundings, and ends with the exit code of its first word: ``python -m tests.compiling.forked_child CODE``."""

import json
import os
import resource
import signal
import sys

import jax

from tests.forked import LIMITS

if __name__ == "__main__":
    told = {
        "words": sys.argv[1:],
        "module": sys.modules["__main__"].__name__,
        "folder": os.getcwd(),
        "first": sys.path[0],
        "leads": os.getsid(0) == os.getpid(),
        "variables": {name: os.environ.get(name) for name in ("TOLD", "LEFT_OUT")},
        "asked": sys.stdin.read(),
        "devices": len(jax.devices()),
        "platforms": jax.config.jax_platforms,
        "mask": os.umask(0),
        "nice": os.nice(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in LIMITS],
        "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "group": os.getpgid(0),
        "wide": jax.config.values["jax_enable_x64"],
    }
    print(json.dumps(told))
    print("ended", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
