"""Compiler flags that every step of a job is compiled with on a generation of TPU, each with its reason and evidence.

``train``, ``forecast``, ``explain`` and ``plan`` take them from here; ``--flags`` adds to them or replaces them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from systolic.chips.record import Chip
from systolic.core.errors import OptionError

SPELT = 2
"""Flags beside the shared ones that are spelt out in a line of figures."""
UNRANKED = ("--xla_tpu_scoped_vmem_limit_kib",)
"""Flags whose effect the compiler only guesses: cycles of a matmul on v6e fall steadily from 16 to 112 MiB, chips' time does not."""
OVERLAPPED = "--xla_gpu_enable_latency_hiding_scheduler=true"
"""Flag of XLA's GPU compiler that runs collectives beside compute. It is on by itself from Hopper on, not on Ampere."""
GPU_PIPELINED = (
    OVERLAPPED,
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
)
"""Flags of XLA's GPU compiler that move a layer's collectives into the loop's next or last iteration."""
NONE = "none"
"""The word of ``--flags`` that leaves the shared set out: XLA's defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A flag of the shared set."""

    text: str
    """``--xla_tpu_…=…``."""
    short: str
    """A few words for a line of figures."""
    why: str
    evidence: str
    """Measurement on chips, and by whom; ``simulated`` where nobody has published one."""
    generations: Sequence[str]
    """Chips by name; ``cpu`` is the machine's own."""
    convolutional: bool = False
    """Whether jobs with a convolutional network alone have it."""


SHARED: Sequence[Flag] = (
    Flag(
        text="--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
        short="no windowed einsums",
        why="weights are gathered whole, beside other work, instead of piece by piece between partial matmuls that leave the matrix units half empty",
        evidence="measured on v6e-8: 8B takes 17 % longer with windowed einsums (vlasenkoalexey/tpu_performance_autoresearch_wiki, llama3_8B experiments 27 and 28); MaxText's recipes for v6e turn them off; on more than 16 chips of v5e the compiler runs their permutes synchronously (limited ICI routing), and 128B on v5e-256 takes 22 % longer by forecast; elsewhere simulated only",
        generations=("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"),
    ),
    Flag(
        text="--xla_tpu_scoped_vmem_limit_kib=98304",
        short="96 MiB of VMEM for a fusion",
        why="large matmuls keep more of their operands in VMEM and reload less; taking all of VMEM leaves no room for buffers between fusions",
        evidence="measured on v6e-8: 8B takes 4.4 % longer with 65536, 1.7 % with 81920 and 2.0 to 2.8 % with 131072 (same source); MaxText's recipes for dense models on v6e have this value",
        generations=("v6e",),
    ),
    Flag(
        text="--xla_tpu_scoped_vmem_limit_kib=65536",
        short="64 MiB of VMEM for a fusion",
        why="large matmuls keep more of their operands in VMEM and reload less",
        evidence="not measured alone; chips do not show the gain that was simulated for it; the recipes for DeepSeek 3 and Gemma 4 on TPU7x have this value (AI-Hypercomputer/tpu-recipes)",
        generations=("tpu7x",),
    ),
    Flag(
        text="--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
        short="convolutions on all cores",
        why="YNNPACK runs a convolution that stands alone, and its gradients, on one core where XLA's own take all",
        evidence="ResNet-18, 64 images of 32 x 32 a step, two cores of an AMD EPYC (Zen 4), jaxlib 0.10.2: 0.82 of the time (benchmarks/results/2026-11-28-cpu-training.md)",
        generations=("cpu",),
        convolutional=True,
    ),
    Flag(
        text="--xla_disable_hlo_passes=cse_barrier_expander",
        short="barriers to fusion stay",
        why="without its barriers a norm and the activation behind it are computed again in the transposed copies that the gradients of kernels read",
        evidence="the same step, beside the other flag: 0.88 of the time (benchmarks/results/2026-11-28-cpu-training.md)",
        generations=("cpu",),
        convolutional=True,
    ),
    Flag(
        text="--xla_tpu_control_large_2nd_minor_layout_for_x16=false",
        short="bf16 arrays in tiles of 8 rows",
        why="weights and caches come in tiles of 8 rows; with matmuls in tiles of 16 each call begins by relaying all of them",
        evidence="simulated from full compiles on TPU7x: a decode step of 1.3B over data 16 takes 37 % longer without it, of a mixture with expert 2 and tensor 4 47 %; schedules of a train step 4 % and of a prefill 1 %; no measurement is published",
        generations=("tpu7x",),
    ),
)


CPU_FLAGS = frozenset(flag.text for flag in SHARED if "cpu" in flag.generations)
"""Flags of a CPU alone."""


def shared_flags(chip: Chip) -> list[Flag]:
    """The flags that jobs share on a chip, TPU or CPU: all, or those with a convolutional network."""
    return [flag for flag in SHARED if chip.name in flag.generations]


def shared_set(chip: Chip | None, platform: str, *, convolutional: bool) -> list[str]:
    """The flags that a job shares with others like it.

    Args:
        chip: The chip; None for a CPU and for what the catalogue does not have.
        platform: ``tpu``, ``gpu`` or ``cpu``.
        convolutional: Whether its model is a convolutional network.
    """
    name = chip.name if chip is not None else platform
    own = [flag for flag in SHARED if name in flag.generations]
    return [flag.text for flag in own if convolutional or not flag.convolutional]


def resolved(
    typed: str | Sequence[str], chip: Chip | None, base: Sequence[str] | None = None
) -> tuple[str, ...]:
    """The compiler flags of a job on a chip.

    Args:
        typed: What ``--flags`` says: flags that come on top of the shared set (of a flag in both, the
            given value), or ``none`` and flags that replace the set.
        chip: For which chip, where all jobs there share the set; None for none.
        base: What stands in place of the shared set: that of a job by :func:`shared_set`, or the flags that a plan or a run was made with.

    Raises:
        OptionError: a word is no flag.
    """
    words = (typed if isinstance(typed, str) else " ".join(typed)).split()
    for word in words:
        if word != NONE and not (word.startswith("--") and len(word) > len("--")):
            raise OptionError(
                f"--flags has {word!r}; flags begin with two dashes, --flags='--xla_tpu_scoped_vmem_limit_kib=65536', and none leaves the shared set out"
            )
    mine = [word for word in words if word != NONE]
    if base is None:
        shared = [] if chip is None else shared_flags(chip)
        base = [flag.text for flag in shared if not flag.convolutional]
    return merged([] if NONE in words else base, mine)


def spoken(flags: Sequence[str], chip: Chip) -> str:
    """Value of ``--flags`` that gives exactly these flags on a chip; empty where they are the shared set."""
    flags_here = shared_flags(chip)
    shared = [flag.text for flag in flags_here]
    named = {name_of(flag) for flag in flags}
    if any(name_of(flag.text) not in named for flag in flags_here if not flag.convolutional):
        return " ".join((NONE, *flags))
    return " ".join(flag for flag in flags if flag not in shared)


def merged(*groups: Sequence[str]) -> tuple[str, ...]:
    """All flags once; of a flag with several values the last, at the place of the first."""
    flags: dict[str, str] = {}
    for group in groups:
        flags |= {name_of(flag): flag for flag in group}
    return tuple(flags.values())


def name_of(flag: str) -> str:
    """``--xla_tpu_x`` of ``--xla_tpu_x=1``."""
    return flag.partition("=")[0]


def unranked(flags: Iterable[str], shared: Chip | None = None) -> str:
    """``the forecast can't rank …`` of flags that two programs do not share, or beyond a chip's shared set; empty where it can."""
    known = () if shared is None else [flag.text for flag in shared_flags(shared)]
    names = {name_of(flag) for flag in flags if flag not in known} & set(UNRANKED)
    text = " and ".join(sorted(name.lstrip("-") for name in names))
    return text and f"the forecast can't rank {text}, which only chips can: time it there"


def described(flags: Sequence[str]) -> str:
    """Difference between a job's flags and XLA's defaults, in a few words; empty where there is none."""
    short = {flag.text: flag.short for flag in SHARED}
    own = [flag for flag in flags if flag not in short]
    words = [short[flag] for flag in flags if flag in short] + own[:SPELT]
    more = len(own) - SPELT
    return ", ".join([*words, f"{more} more flag{'s' if more > 1 else ''}"] if more > 0 else words)


def compile_options(flags: Sequence[str], platform: str) -> dict[str, str]:
    """Flags as the compile options of one program, which leave the process's environment alone.

    Args:
        flags: ``--xla_…=…``.
        platform: ``tpu``, ``gpu`` or ``cpu``.

    Raises:
        OptionError: one is not XLA's, so only the runtime's environment can take it.
    """
    options = {}
    for flag in flags:
        name, _, value = flag.partition("=")
        if not is_option(flag):
            raise OptionError(
                f"{name} is no flag of XLA's compiler; set it in LIBTPU_INIT_ARGS, --flags takes --xla_…"
            )
        value = value or "true"
        # XLA's own parser of options takes only these words for a switch, libtpu's those of the command line.
        if platform != "tpu" and value.lower() in ("true", "false"):
            value = value.capitalize()
        options[name.removeprefix("--")] = value
    return options


def is_option(flag: str) -> bool:
    """Whether a flag belongs to the compiler of one program, not to the runtime."""
    return flag.startswith("--xla_")
