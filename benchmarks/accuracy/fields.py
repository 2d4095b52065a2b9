"""Fields of a published result, and the reader that checks them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))
from records import Kind, Record, records, used

T = TypeVar("T")

NEEDED = {"id": Kind.text, "generation": Kind.text}
OTHER = {
    **dict.fromkeys(("category", "model", "topology", "optimizer", "xla_flags"), Kind.text),
    **dict.fromkeys(("num_chips", "num_slices", "seq_len", "grad_accum"), Kind.number),
    **dict.fromkeys(("step_time_best_s", "global_batch", "per_device_batch"), Kind.number),
    **dict.fromkeys(("arch", "parallelism", "remat", "other_settings"), Kind.object),
}
"""Fields of a record and their kinds."""


def each(path: Path, rule: Callable[[Record], T]) -> list[T]:
    """What a rule makes of each record of a file; ends the process with one line where one can't be read."""
    return [used(path, record, rule) for record in records(path, NEEDED, OTHER)]
