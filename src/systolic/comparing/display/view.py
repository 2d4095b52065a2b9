"""Output of ``systolic compare``."""

from typing import TYPE_CHECKING

from systolic.report.output import print_json

if TYPE_CHECKING:
    from systolic.comparing.comparison import Comparison


def show(comparison: "Comparison", *, json: bool = False) -> int:
    """Prints two models side by side; returns the exit code.

    Args:
        comparison: The models.
        json: Print one JSON object.
    """
    if json:
        print_json(comparison.to_json())
        return 0
    from systolic.comparing.display.text import lines

    print("\n".join(lines(comparison)))
    return 0
