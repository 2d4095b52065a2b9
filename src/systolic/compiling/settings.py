"""Settings of JAX that affect a program, sent to the compiling process and part of every key, and the environment of that process."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from systolic.chips import Slice
from systolic.compiling import host_backend

_ELSEWHERE = (
    # Devices and processes, which the slice decides.
    "jax_platforms",
    "jax_platform_name",
    "jax_default_device",
    "jax_backend_target",
    "jax_xla_backend",
    "jax_num_cpu_devices",
    "jax_cpu_",
    "jax_cuda_visible_devices",
    "jax_rocm_visible_devices",
    "jax_oneapi_visible_devices",
    "jax_mock_gpu_topology",
    "mock_num_gpu_processes",
    "jax_pjrt_client_create_options",
    "jax_cross_host_",
    "jax_force_dcn_cross_host_transfers",
    "jax_distributed_debug",
    "jax_enable_preemption_service",
    "jax_enable_recoverability",
    "jax_sort_devices_by_process_index",
    "jax_check_proxy_envs",
    # JAX's own store of compiled programs.
    "jax_enable_compilation_cache",
    "jax_compilation_cache_",
    "jax_persistent_cache_",
    "jax_raise_persistent_cache_errors",
    "jax_share_binary_between_hosts",
    # Printing, dumps and profiling.
    "jax_log",
    "jax_debug_log_modules",
    "jax_debug_leaked_clients_on_clear_backends",
    "jax_explain_cache_misses",
    "jax_compiler_detailed_logging_min_ops",
    "jax_dump_ir_",
    "jax_include_debug_info_in_dumps",
    "jax_include_full_tracebacks_in_locations",
    "jax_hlo_source_file_canonicalization_regex",
    "jax_pprint_use_color",
    "jax_traceback_",
    "jax_tracer_error_num_traceback_frames",
    "jax_send_traceback_to_runtime",
    "jax_captured_constants_",
    "jax_source_url_schema",
    "jax_array_garbage_collection_guard",
    "jax_check_tracer_leaks",
    "jax_enable_checks",
    "jax_thread_guard",
    "jax_transfer_guard",
    # Switches for tracing, compiling and running; the child always traces and compiles.
    "jax_disable_jit",
    "jax_no_execution",
    "jax_no_tracing",
)
"""Settings, or prefixes of their names, that the compiling process sets itself."""
COMPILING = "SYSTOLIC_COMPILING"
"""Environment variable of the process that compiles."""
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


def decides(name: str) -> bool:
    """Whether a setting of JAX may change a program, by its name or that of its variable."""
    return not name.lower().startswith(_ELSEWHERE)


def of_process() -> dict[str, Any]:
    """Settings of this thread by name; empty if JAX is not loaded, since none can be set then."""
    jax = sys.modules.get("jax")
    return {} if jax is None else _values(jax)


def of_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables with settings of JAX, and the one that selects another libtpu."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name == "TPU_LIBRARY_PATH" or (name.startswith("JAX_") and decides(name))
    }


def take(settings: Mapping[str, Any]) -> None:
    """Applies the settings of another process."""
    import jax

    own = _values(jax)
    for name, value in settings.items():
        if name in own and own[name] != value:
            jax.config.update(name, value)


def key() -> dict[str, str]:
    """Settings of this process as plain values."""
    import jax

    return {name: repr(value) for name, value in sorted(_values(jax).items())}


def _values(jax: Any) -> dict[str, Any]:
    return {name: value for name, value in jax.config.values.items() if decides(name)}


def child_environment(
    environ: Mapping[str, str], on: Slice, flags: Sequence[str] = ()
) -> dict[str, str]:
    """Environment of the process that compiles for ``on``, with ``flags`` in it."""
    variables = {**environ, **QUIET, COMPILING: "1"}
    variables.pop("XLA_FLAGS", None)
    # The child must import what the parent can, such as modules beside the user's script.
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if on.platform == "tpu":
        variables["LIBTPU_INIT_ARGS"] = " ".join(flags)
    else:
        variables |= host_backend.child_variables(environ, on, tuple(flags))
    return variables
