"""Measured operations: which are judged, and which half each belongs to."""

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import attention
import grouped
import jaxbench
import layers
import losses
import products
import records
import traced
from arrays import array
from records import Kind

from systolic.chips import slice

LEAST_SECONDS = 30e-6
"""Shorter rows are not judged: times have a resolution of 1 us."""
SLICES = {"v4": "v4-8", "v5e": "v5e-1", "v5p": "v5p-8", "v6e": "v6e-1", "tpu7x": "tpu7x-2"}
"""The smallest slice of a generation; a program without a mesh runs whole on each device of it."""
PLAIN = ("xla", "xla_chunked", None)
KERNELS = ("attention", "attention_vjp", "grouped_matmul")
"""What has programs of Pallas kernels here, too."""
_MAKERS = {
    "attention": attention.program,
    "attention_vjp": attention.program,
    "linear_softmax_cross_entropy": losses.program,
    "linear_softmax_cross_entropy_vjp": losses.program,
    "layer_norm": layers.program,
    "layer_norm_vjp": layers.program,
    "gated_linear_unit": layers.program,
    "triangle_multiplication": layers.program,
    jaxbench.WHAT: jaxbench.program,
}
_COLLECTIVES = {
    ("all-gather", "tpu7x"): "tpu7x-8",
    ("all-reduce", "tpu7x"): "tpu7x:2x2x4",
    ("collective-permute (one hop)", "v5p"): "v5p-8",
    ("collective-permute (one hop)", "v6e"): "v6e-8",
}

NEEDED = {
    **dict.fromkeys(("id", "generation", "what"), Kind.text),
    "shapes": Kind.object,
}
OTHER = {
    **dict.fromkeys(("implementation", "notes", "confidence"), Kind.text),
    **{"config": Kind.object, "measured_seconds": Kind.number},
}
"""Fields of a row and their kinds."""
SURE = ("A", "B", "C")
"""Confidence in a measurement that is judged."""

Row = Mapping[str, Any]


def read(path: Path) -> list[Row]:
    """Rows of a JSON list, or of JSON lines."""
    return list(records.records(path, NEEDED, OTHER))


def why_not(row: Row) -> str | None:
    """Why a row can't be judged here; None where it can."""
    seconds, made = row.get("measured_seconds"), row.get("implementation")
    if is_traced(row):
        unknown = "custom-call" in row["what"] and not row["config"]["counted"]
        return "what its kernel does depends on data, or needs tpu-inference" if unknown else None
    if row["generation"] not in SLICES:
        return f"generation {row['generation']} is none of {', '.join(SLICES)}"
    if seconds is None:
        return "no measured_seconds"
    if seconds < LEAST_SECONDS:
        return f"shorter than {LEAST_SECONDS * 1e6:.0f} us"
    if row.get("confidence", "A") not in SURE:
        return f"confidence {row['confidence']} is none of {', '.join(SURE)}"
    if made not in PLAIN and not is_kernel(row):
        return f"implementation {made} of {row['what']} has no program here"
    if not row["what"].startswith((*_MAKERS, *products.KINDS)):
        return "no program here for this kind of operation"
    if is_kernel(row) and not attention.flash.available():
        return "its kernel needs tokamax (README.md)"
    program = program_or_reason(row, slice(slice_of(row)).num_devices)
    return program if isinstance(program, str) else None


def judged(row: Row) -> bool:
    """Whether a row has a time that its resolution allows to judge by, and a program of plain operations."""
    seconds = row.get("measured_seconds")
    return (
        seconds is not None
        and seconds >= LEAST_SECONDS
        and row.get("generation") in SLICES
        and (row.get("implementation") in PLAIN or is_kernel(row))
        and row.get("confidence", "A") in ("A", "B", "C")
    )


def is_traced(row: Row) -> bool:
    """Whether a row is an op of a profile, which has an HLO line in place of a program."""
    return row["what"].startswith(traced.KIND)


def flags_of(row: Row) -> tuple[str, ...]:
    """Flags of the compiler that a row was measured with."""
    return tuple((row.get("config") or {}).get("flags", ()))


def is_kernel(row: Row) -> bool:
    """Whether a row is of a Pallas kernel that has a program here."""
    return row.get("implementation") == "pallas" and row["what"] in KERNELS


def ran_dense(row: Row) -> bool:
    """Whether a grouped matmul took as long as one of every row with every group's weights, at the chip's peak."""
    if row["what"] != "grouped_matmul":
        return False
    (rows, depth), (*_, columns) = (array(row["shapes"][name]).shape for name in ("lhs", "rhs"))
    if row["shapes"]["mode"] == grouped.TRANSPOSED:
        columns = array(row["shapes"]["rhs"]).shape[1]
    on = slice(slice_of(row)).chip
    peak = (on.peak_bf16_flops_per_second or 0.0) / (on.devices_per_chip or 1)
    flops = 2.0 * rows * depth * columns * row["shapes"]["groups"]["num_groups"]
    return row["measured_seconds"] * peak >= flops


def kind_of(row: Row) -> str:
    """What a row is, with how it was made where that is not plain."""
    made = row.get("implementation")
    text = row["what"].split(" (")[0]
    return {"xla_chunked": f"{text} chunked", "pallas": f"{text} kernel"}.get(made, text)


def half_of(row: Row) -> str:
    """``fit`` or ``judge``: by kind, generation and shapes, so that copies of a program share a half.

    What is returned beside the result and the dtype bf16 or f16 make no other program of it.
    """
    shapes = {k: v for k, v in row["shapes"].items() if k not in ("return_residuals", "reduction")}
    text = json.dumps([row["what"], shapes], sort_keys=True).replace("bf16", "f16")
    return "judge" if hashlib.sha256(text.encode()).digest()[0] % 2 else "fit"


def program_of(row: Row, num_devices: int) -> tuple[Any, tuple[Any, ...], Any] | None:
    """Function, abstract arguments, and mesh with partitions or None; None where it is not expressed."""
    made = program_or_reason(row, num_devices)
    return None if isinstance(made, str) else made


def program_or_reason(row: Row, num_devices: int) -> tuple[Any, tuple[Any, ...], Any] | str:
    """As :func:`program_of`, or why it is not expressed."""
    complete = {"notes": "", "implementation": None, "config": None} | dict(row)
    try:
        spread = products.spread(complete, num_devices)
        if spread is not None:
            return spread
        made = _MAKERS.get(row["what"], products.program)(complete)
    except KeyError as error:
        return f"shapes or config of {row['what']} lack {error}"
    except records.UNREADABLE as error:
        return f"shapes of {row['what']} can't be read: {error}"
    return f"{row['what']} of these shapes has no program here" if made is None else (*made, None)


def expressed(row: Row) -> bool:
    """Whether a row has a program here."""
    return program_of(row, slice(slice_of(row)).num_devices) is not None


def slice_of(row: Row) -> str:
    """The slice a row is compiled for."""
    return _COLLECTIVES.get((row["what"], row["generation"]), SLICES[row["generation"]])


def sample(rows: Sequence[Row], size: int) -> list[Row]:
    """At most ``size`` rows, the same number of each kind and generation where there are so many.

    The order within a kind and generation is that of the rows' digests.
    """
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda r: hashlib.sha256(r["id"].encode()).hexdigest()):
        groups[kind_of(row), row["generation"]].append(row)
    taken: list[Row] = []
    depth = 0
    while len(taken) < size and any(len(group) > depth for group in groups.values()):
        taken += [group[depth] for _, group in sorted(groups.items()) if len(group) > depth]
        depth += 1
    return taken[:size]


def unique(rows: Iterable[Row]) -> list[Row]:
    """The rows without a second one of the same id."""
    return list({row["id"]: row for row in rows}.values())
