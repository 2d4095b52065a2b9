"""Progress of a file of weights as it is written."""

from collections.abc import Callable

from systolic.core.units import si


def written(size: int, say: Callable[[str], None]) -> Callable[[int], None]:
    """What is called with the bytes of each tensor that was written, of ``size`` in all.

    It says tenths, so that a log has ten lines and no more.
    """
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        say(f"weights {done * 10 // size * 10} % of {si(size, 'B')}")

    return progress
