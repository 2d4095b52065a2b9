"""Environment variables and compiler flags that are known to cause problems."""

from systolic.doctor.findings import Finding, Status, failed, noted, warned
from systolic.doctor.machine import Machine

_FORCED = "--xla_force_host_platform_device_count"
_MANY_PASSES = ("highest", "float32", "bfloat16_3x", "tensorfloat32")


def environment(machine: Machine) -> list[Finding]:
    """Findings about JAX_*, XLA_*, TPU_* and LIBTPU_* variables."""
    rows = [
        *_compiler_flags(machine),
        *_jax_variables(machine),
        *_tpu_variables(machine),
        *_gpu_variables(machine),
    ]
    if not any(row.status in (Status.warning, Status.failed) for row in rows):
        rows.append(Finding(name="environment", status=Status.ok, text=_summary(machine)))
    return rows


def _summary(machine: Machine) -> str:
    names = [name for name, _ in machine.environment if name != "LD_LIBRARY_PATH"]
    return f"set: {', '.join(names)}" if names else "no JAX, XLA or TPU variables set"


def _compiler_flags(machine: Machine) -> list[Finding]:
    flags = machine.variable("XLA_FLAGS") or ""
    rows = []
    if flags.strip() and not flags.lstrip().startswith("-"):
        text = (
            f"XLA_FLAGS={flags.split()[0]!r} has no leading dashes, so XLA reads it as a file name"
        )
        rows.append(failed("XLA_FLAGS", text, "write each flag as --xla_…"))
    tpu_flags = [flag.split("=")[0] for flag in flags.split() if flag.startswith("--xla_tpu_")]
    if tpu_flags:
        text = f"{tpu_flags[0]} is in XLA_FLAGS, where JAX aborts on it as an unknown flag"
        rows.append(failed("XLA_FLAGS", text, "move the --xla_tpu_* flags to LIBTPU_INIT_ARGS"))
    if "--xla_dump_to" in flags:
        text = "XLA_FLAGS dumps every compiled program to disk, which is slow and fills the disk"
        rows.append(warned("XLA_FLAGS", text, "drop --xla_dump_to when done debugging"))
    if _FORCED in flags or machine.variable("JAX_NUM_CPU_DEVICES"):
        rows.append(noted("virtual devices", "the CPU is split into virtual devices, as requested"))
    return rows


def _jax_variables(machine: Machine) -> list[Finding]:
    rows = []
    slow = {
        "JAX_DISABLE_JIT": "nothing is compiled: training is 100 times slower",
        "JAX_DEBUG_NANS": "every operation is checked synchronously",
        "JAX_ENABLE_X64": "64-bit numbers double the memory; TPUs emulate them",
    }
    for name, effect in slow.items():
        if (machine.variable(name) or "").lower() in ("1", "true", "on", "yes"):
            rows.append(warned(name, f"{name} is on: {effect}", f"unset {name}"))
    precision = (machine.variable("JAX_DEFAULT_MATMUL_PRECISION") or "").lower()
    if precision in _MANY_PASSES and machine.accelerators:
        text = f"JAX_DEFAULT_MATMUL_PRECISION={precision} costs several passes per f32 matmul"
        fix = "unset JAX_DEFAULT_MATMUL_PRECISION"
        rows.append(warned("JAX_DEFAULT_MATMUL_PRECISION", text, fix))
    if machine.variable("JAX_PLATFORM_NAME"):
        text = "JAX_PLATFORM_NAME is deprecated and does not stop other backends from starting"
        rows.append(warned("JAX_PLATFORM_NAME", text, "use JAX_PLATFORMS instead"))
    return rows


def _tpu_variables(machine: Machine) -> list[Finding]:
    if not machine.tpu_chips:
        return []
    rows = []
    if machine.variable("TPU_SKIP_MDS_QUERY"):
        text = "TPU_SKIP_MDS_QUERY hides from libtpu which hosts belong to the slice"
        rows.append(warned("TPU_SKIP_MDS_QUERY", text, "unset TPU_SKIP_MDS_QUERY"))
    if machine.variable("TPU_LIBRARY_PATH"):
        path = machine.variable("TPU_LIBRARY_PATH")
        text = f"TPU_LIBRARY_PATH loads {path}, not the installed libtpu"
        rows.append(warned("TPU_LIBRARY_PATH", text, "unset TPU_LIBRARY_PATH"))
    names = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
    rows += [
        noted(name, f"{name}={machine.variable(name)} hides the other chips")
        for name in names
        if machine.variable(name)
    ]
    return rows


def _gpu_variables(machine: Machine) -> list[Finding]:
    if machine.nvidia is None:
        return []
    rows = []
    visible = machine.variable("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        text = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
        rows.append(failed("CUDA_VISIBLE_DEVICES", text, "unset CUDA_VISIBLE_DEVICES"))
    if "cuda" in (machine.variable("LD_LIBRARY_PATH") or "").lower():
        text = "LD_LIBRARY_PATH contains a CUDA installation, which JAX loads instead of its own"
        rows.append(warned("LD_LIBRARY_PATH", text, "unset LD_LIBRARY_PATH"))
    allocator = (machine.variable("XLA_PYTHON_CLIENT_ALLOCATOR") or "").lower()
    if allocator == "platform":
        text = "XLA_PYTHON_CLIENT_ALLOCATOR=platform allocates every buffer from the driver: slow"
        fix = "unset XLA_PYTHON_CLIENT_ALLOCATOR"
        rows.append(warned("XLA_PYTHON_CLIENT_ALLOCATOR", text, fix))
    if (machine.variable("XLA_PYTHON_CLIENT_PREALLOCATE") or "").lower() in ("false", "0"):
        text = "XLA_PYTHON_CLIENT_PREALLOCATE=false fragments memory: large models run out sooner"
        fix = "unset XLA_PYTHON_CLIENT_PREALLOCATE"
        rows.append(warned("XLA_PYTHON_CLIENT_PREALLOCATE", text, fix))
    return rows


def forces_cpu(machine: Machine) -> str:
    """Setting that makes JAX use the CPU; empty without one."""
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        value = machine.variable(name)
        if value and value.split(",")[0].strip().lower() == "cpu":
            return f"{name}={value}"
    return ""
