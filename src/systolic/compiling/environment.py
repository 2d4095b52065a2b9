"""Environment for libtpu to compile without a TPU, set only here."""

import os
import sys
from collections.abc import Mapping, Sequence

from systolic.chips import Slice
from systolic.compiling import host_backend

QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu takes a lock on the machine otherwise
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any; the topology gives the target
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # JAX's own cache would skip the schedule's dump
}


def child_environment(
    environ: Mapping[str, str], on: Slice, flags: Sequence[str] = ()
) -> dict[str, str]:
    """Environment of the process that compiles for ``on``, with ``flags`` in it."""
    variables = {**environ, **QUIET}
    variables.pop("XLA_FLAGS", None)
    # The child must import what the parent can, such as modules beside the user's script.
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if on.platform == "tpu":
        variables["LIBTPU_INIT_ARGS"] = " ".join(flags)
    else:
        variables |= host_backend.child_variables(environ, on, tuple(flags))
    return variables
