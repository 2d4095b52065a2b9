"""Sets of compiler flags that are known to matter, each with a name and a reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from systolic.chips import Slice


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagSet:
    """Flags that belong together."""

    name: str
    flags: tuple[str, ...]
    why: str
    generations: tuple[str, ...]
    """The chips that it is for."""


DEFAULT = FlagSet(name="default", flags=(), why="what libtpu does by itself", generations=())

SETS: Sequence[FlagSet] = (
    FlagSet(
        name="whole-gathers",
        flags=("--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",),
        why="weights are gathered whole instead of in a loop of permutes and partial matmuls, which for small weights leaves the matrix units half empty",
        generations=("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"),
    ),
    FlagSet(
        name="widest-vmem",
        flags=("--xla_tpu_scoped_vmem_limit_kib=98304",),
        why="three quarters of VMEM for a fusion: published v6e recipes for dense models use it",
        generations=("v6e",),
    ),
    FlagSet(
        name="wide-vmem",
        flags=("--xla_tpu_scoped_vmem_limit_kib=65536",),
        why="fusions may keep half of the 128 MiB of VMEM for themselves, so that large matmuls reload less",
        generations=("v6e", "tpu7x"),
    ),
    FlagSet(
        name="async-gather",
        flags=(
            "--xla_tpu_enable_async_collective_fusion=true",
            "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
            "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
            "--xla_tpu_overlap_compute_collective_tc=true",
            "--xla_enable_async_all_gather=true",
        ),
        why="weight gathers run beside matmuls, several steps long",
        generations=("v4", "v5e", "v5p", "v6e"),
    ),
    FlagSet(
        name="data-parallel-overlap",
        flags=(
            "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
            "--xla_tpu_data_parallel_opt_different_sized_ops=true",
        ),
        why="gradient sums across slices start layer by layer instead of at the end",
        generations=("v4", "v5e", "v5p", "v6e"),
    ),
)


def sets_for(on: Slice) -> list[FlagSet]:
    """Those worth a compile on a slice, besides the default."""
    return [
        one
        for one in SETS
        if on.chip.name in one.generations
        and on.num_chips > 1
        and (one.name != "data-parallel-overlap" or on.num_slices > 1)
    ]
