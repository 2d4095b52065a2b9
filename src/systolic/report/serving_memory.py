"""The memory of a server of a language model as lines of text, before it starts or in a forecast."""

from systolic.core.units import gibibytes, plural
from systolic.job.serving_memory import ServingMemory

NAME, SIZE = 14, 11


def lines(memory: ServingMemory, tokens: int | None = None) -> list[str]:
    """The table.

    Args:
        memory: Of one device.
        tokens: Of a request at its end, for the number of requests that fit.
    """
    head = f"{gibibytes(memory.capacity_bytes)} of each device"
    shown = [f"{'memory':<{NAME}}{head}  [{memory.origin.value}]"]
    for row in memory.rows():
        text = f"  {row.text}" if row.text else ""
        shown.append(f"  {row.name:<{NAME - 2}}{gibibytes(row.bytes):>{SIZE}}{text}")
    if tokens is not None:
        number = memory.concurrency(tokens)
        shown.append(f"{'room':<{NAME}}{plural(number, 'request')} of {tokens:,} tokens at once")
    return shown
