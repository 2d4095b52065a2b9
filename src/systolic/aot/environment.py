"""The environment in which libtpu compiles without a TPU; the one place that sets it."""

import os
import sys
from collections.abc import Mapping, Sequence

from systolic.aot import host
from systolic.chips import Slice

QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu takes a lock on the machine otherwise
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any: what is compiled for comes from the topology
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from JAX's own cache leaves no schedule
}


def child_environment(
    given: Mapping[str, str], on: Slice, flags: Sequence[str] = ()
) -> dict[str, str]:
    """The variables of the process that compiles for ``on``; ``flags`` are those that it takes from there."""
    made = {**given, **QUIET}
    made.pop("XLA_FLAGS", None)
    # The child imports what the parent could: the folder of a script that was run, for one.
    made["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if on.platform == "tpu":
        made["LIBTPU_INIT_ARGS"] = " ".join(flags)
    else:
        made |= host.child_variables(given, on, tuple(flags))
    return made
