"""Sets of compiler flags to try on top of the shared ones, each with a name and a reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from systolic.chips import Slice
from systolic.chips.flags import GPU_PIPELINED, merged, name_of, shared_flags
from systolic.compiling.gpu_compiler import compiles

_PLUS = " + "
_ASYNC = (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
)
_SUMS = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
)
_HOST = (
    "--xla_tpu_enable_all_experimental_scheduler_features=true",
    "--xla_tpu_enable_scheduler_memory_pressure_tracking=true",
    "--xla_tpu_host_transfer_overlap_limit=24",
    "--xla_tpu_aggressive_opt_barrier_removal=ENABLED",
    "--xla_lhs_prioritize_async_depth_over_stall=ENABLED",
    "--xla_tpu_enable_ag_backward_pipelining=true",
    "--xla_should_allow_loop_variant_parameter_in_chain=ENABLED",
    "--xla_should_add_loop_invariant_op_in_chain=ENABLED",
    "--xla_max_concurrent_host_send_recv=100",
    "--xla_tpu_scheduler_percent_shared_memory_limit=100",
    "--xla_latency_hiding_scheduler_rerun=2",
)


_GPUS = (
    *("a100-40", "a100-80", "h100", "h100-pcie", "h200"),
    *("b200", "gb200", "b300", "gb300"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagSet:
    """Flags that belong together; none that :data:`systolic.chips.flags.UNRANKED` has."""

    name: str
    flags: tuple[str, ...]
    why: str
    generations: tuple[str, ...]
    """Chip generations that it is for."""
    most_chips: int = 10**6
    """Chips of a slice up to which it is tried early; on larger ones after the other sets."""


DEFAULT = FlagSet(name="default", flags=(), why="what all jobs on the chip share", generations=())


SETS: Sequence[FlagSet] = (
    FlagSet(
        name="v6e-dense",
        flags=(
            "--xla_tpu_use_minor_sharding_for_major_trivial_input=true",
            "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
            "--xla_tpu_assign_all_reduce_scatter_layout=true",
            *_SUMS,
            *_ASYNC,
            *_HOST,
        ),
        why="what the published v6e recipes for dense models share: collectives and host transfers beside matmuls",
        generations=("v6e",),
    ),
    FlagSet(
        name="whole-gathers",
        flags=("--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",),
        why="weights are gathered whole instead of in a loop of permutes and partial matmuls, which for small weights leaves the matrix units half empty",
        generations=("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"),
        most_chips=64,  # of the planned rows of benchmarks/plan it helped on up to 16 chips
    ),
    FlagSet(
        name="async-gather",
        flags=_ASYNC,
        why="weight gathers run beside matmuls, several steps long",
        generations=("v4", "v5e", "v5p", "v6e"),
    ),
    FlagSet(
        name="host-overlap",
        flags=_HOST,
        why="transfers to and from the host run beside compute, many at a time: published recipes that offload activations use it",
        generations=("v4", "v5e", "v5p", "tpu7x"),
    ),
    FlagSet(
        name="data-parallel-overlap",
        flags=_SUMS,
        why="gradient sums across slices start layer by layer instead of at the end",
        generations=("v4", "v5e", "v5p", "v6e"),
    ),
    FlagSet(
        name="gpu-pipelined",
        flags=GPU_PIPELINED,
        why="collectives of a layer run beside the layer before or after it: in the GPU compiler's schedule of 8B on 16xh100 the step waits 16 ms for GPUs in place of 91",
        generations=_GPUS,
    ),
    FlagSet(
        name="gpu-double-buffered",
        flags=(*GPU_PIPELINED, "--xla_gpu_enable_while_loop_double_buffering=true"),
        why="besides, two layers in each iteration of the loop over layers, so that no buffer is copied between them: 536 ms in place of 560",
        generations=_GPUS,
    ),
)


def _names(flags: Sequence[str]) -> set[str]:
    return {name_of(flag) for flag in flags}


def sets_for(
    on: Slice,
    offloads: bool = False,
    base: FlagSet = DEFAULT,
    have: Sequence[str] = (),
) -> list[FlagSet]:
    """Flag sets to compile on a slice, besides the default; the likeliest to help first.

    Args:
        on: The slice.
        offloads: Whether the layout moves activations to the host.
        base: The set they are added to; a set that only gives other values to a part of it is left out.
        have: Flags that are set already. A set that changes nothing is left out, as is one that only
            gives other values to flags that the user has set.
    """
    parts = base.name.split(_PLUS)
    chosen = [_names(flag_set.flags) for flag_set in SETS if flag_set.name in parts]
    shared = {flag.text for flag in shared_flags(on.chip)}
    user_flags = _names([flag for flag in have if flag not in shared])
    sets = [
        flag_set
        for flag_set in SETS
        if on.chip.name in flag_set.generations
        and on.num_chips > 1
        and (on.platform == "tpu" or compiles(on))
        and (flag_set.name != "data-parallel-overlap" or on.num_slices > 1)
        and (flag_set.name != "host-overlap" or offloads)
        and _names(flag_set.flags) not in chosen
        and not set(flag_set.flags) <= set(have)
        and not _names(flag_set.flags) <= user_flags
    ]
    return sorted(sets, key=lambda flag_set: flag_set.most_chips < on.num_chips)


def joined(base: FlagSet, more: FlagSet) -> FlagSet:
    """Both sets as one; ``more`` wins where both set a flag."""
    if base is DEFAULT or more is DEFAULT:
        return base if more is DEFAULT else more
    if not set(more.flags) - set(base.flags):
        return base
    return FlagSet(
        name=f"{base.name}{_PLUS}{more.name}",
        flags=merged(base.flags, more.flags),
        why=f"{base.why}; {more.why}",
        generations=tuple(g for g in base.generations if g in more.generations),
    )
