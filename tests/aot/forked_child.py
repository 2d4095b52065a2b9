"""Tells its surroundings, and ends with the exit code of its first word: ``python -m tests.aot.forked_child CODE``."""

import json
import os
import sys

import jax

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
        "wide": jax.config.values["jax_enable_x64"],
    }
    print(json.dumps(told))
    print("ended", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
