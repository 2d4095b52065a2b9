"""One point of the search (slice, layout, batch, precision, compiler flags), a change of its settings, tried by a search and advised by an explanation, and the sets of flags to try."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.chips import Slice
from systolic.chips.flags import GPU_PIPELINED, OVERLAPPED, merged, name_of, shared_flags
from systolic.compiling.gpu_compiler import compiles
from systolic.job import Batch, Job, Layout, Precision, Remat
from systolic.job.layout import Group, fields_of, group_of

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
        name="gpu-overlapped",
        flags=(OVERLAPPED,),
        why="collectives run beside compute, which XLA schedules by itself from Hopper on only: GPT 175B on 256xa100-80 waits 1.5 s for GPUs in place of 6.5",
        generations=("a100-40", "a100-80"),
    ),
    FlagSet(
        name="gpu-pipelined",
        flags=GPU_PIPELINED,
        why="collectives of a layer run beside the layer before or after it: in the GPU compiler's schedule of 8B on 16xh100 the step waits 24 ms for GPUs in place of 103",
        generations=_GPUS,
    ),
    FlagSet(
        name="gpu-double-buffered",
        flags=(*GPU_PIPELINED, "--xla_gpu_enable_while_loop_double_buffering=true"),
        why="besides, two layers in each iteration of the loop over layers, so that no buffer is copied between them: 512 ms in place of 536",
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


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Candidate of the search, with a definite layout."""

    on: Slice
    layout: Layout
    batch: int
    """Examples an optimizer step."""
    precision: Precision
    flags: FlagSet = DEFAULT
    """Flags on top of ``base``."""
    base: tuple[str, ...] = ()
    """Compiler flags of all candidates on this chip: the shared set and the user's."""

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """All compiler flags, ``base`` included."""
        return merged(self.base, self.flags.flags)

    def job(self, base: Job) -> Job:
        """The job under this layout."""
        return replace(
            base, layout=self.layout, batch=Batch(total=self.batch), precision=self.precision
        )

    @property
    def per_pass(self) -> float:
        """Examples of one device in one forward and backward pass; a fraction where an axis splits an example."""
        layout = self.layout
        ways = layout.batch_ways * layout.context * layout.tensor * layout.pipeline
        return self.batch / (ways * layout.accumulate)

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sort key: axes in use, offload, how much is recomputed, flags under trial, passes, loss chunks."""
        of, flags = self.layout, len(self.flags.flags)
        recomputed = of.remat is Remat.offload, list(Remat).index(of.remat)
        axes = sum(size > 1 for size in of.mesh_shape.values())
        return axes, *recomputed, flags, of.accumulate, of.loss_chunks

    @property
    def name(self) -> str:
        """``v5e-16 data 2 fsdp 8 remat full accumulate 2``."""
        return f"{self.on.name} {self.text}"

    @property
    def text(self) -> str:
        """The layout in words."""
        flags = "" if self.flags is DEFAULT else f" flags {self.flags.name}"
        return f"{self.layout.text}{flags}"

    def settings(self, base: Job) -> dict[str, Any]:
        """Settings that differ from the job, by option: ``layout.fsdp``, ``batch``, ``precision``."""
        always = {*fields_of(Group.mesh), "accumulate"}
        if self.on.num_slices == 1:
            always.discard("slices")
        mine, plain, own = (layout.settings() for layout in (self.layout, Layout(), base.layout))
        settings: dict[str, Any] = {
            f"layout.{name}": value
            for name, value in mine.items()
            if name in always or not value == plain[name] == own[name]
        }
        if base.precision.resolve(self.on.platform) is not self.precision:
            settings["precision"] = self.precision.value
        settings["batch"] = self.batch
        return settings


class ChangedPart(enum.Enum):
    """Parts of a candidate that a change sets besides the groups of a layout's fields."""

    flags = "flags"
    batch = "batch"
    precision = "precision"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """New values for some settings; flags are added to the candidate's."""

    layout: tuple[tuple[str, Any], ...] = ()
    """(field, value) pairs of the layout."""
    flags: FlagSet = DEFAULT
    batch: int | None = None
    precision: Precision | None = None

    @property
    def same_result(self) -> bool:
        """Whether training gives the same model but for rounding; a new batch or precision changes training."""
        return self.batch is None and self.precision is None

    @property
    def touches(self) -> frozenset[Group | ChangedPart]:
        """Parts that it sets."""
        others = {
            ChangedPart.flags: self.flags is not DEFAULT,
            ChangedPart.batch: self.batch is not None,
            ChangedPart.precision: self.precision is not None,
        }
        return frozenset(
            (
                *(group_of(name) for name, _ in self.layout),
                *(p for p, sets in others.items() if sets),
            )
        )

    def on(self, candidate: Candidate) -> Candidate:
        """The candidate with this change."""
        return replace(
            candidate,
            layout=replace(candidate.layout, **dict(self.layout)),
            flags=joined(candidate.flags, self.flags),
            batch=candidate.batch if self.batch is None else self.batch,
            precision=candidate.precision if self.precision is None else self.precision,
        )

    def text(self, base: Candidate) -> str:
        """The change relative to a candidate: ``accumulate 2 -> 1``."""
        after = self.on(base)
        texts = base.layout.difference(after.layout)
        if self.flags is not DEFAULT:
            texts.append(f"flags {self.flags.name}")
        if self.batch is not None:
            texts.append(f"batch {base.batch} -> {self.batch}")
        if self.precision is not None:
            texts.append(f"precision {base.precision.value} -> {self.precision.value}")
        return ", ".join(texts) or "the same settings"


def layout_change(**layout: Any) -> Change:
    """Change of some of a layout's fields."""
    return Change(layout=tuple(layout.items()))


def together(base: Candidate, helped: Sequence[Change]) -> Candidate:
    """A base with all changes that helped alone; the first in ``helped`` wins where two set the same."""
    for change in reversed(helped):
        base = change.on(base)
    return base


def compatible(helped: Iterable[Change]) -> list[Change]:
    """Changes that touch different settings, the first of each; sets of flags add up."""
    chosen: list[Change] = []
    touched: set[Group | ChangedPart] = set()
    for change in helped:
        if not (change.touches - {ChangedPart.flags}) & touched:
            touched |= change.touches
            chosen.append(change)
    return chosen


def differences(before: Layout, after: Candidate) -> list[str]:
    """Settings of a layout that a candidate changes, and the flags that it adds: ``accumulate 2 -> 1``."""
    flags = [] if after.flags is DEFAULT else [f"flags {after.flags.name}"]
    return [*before.difference(after.layout), *flags]
