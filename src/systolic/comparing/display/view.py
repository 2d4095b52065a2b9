"""Output of ``systolic compare``."""

from typing import TYPE_CHECKING

from systolic.report.output import or_json

if TYPE_CHECKING:
    from systolic.comparing.comparison import Comparison


@or_json
def show(comparison: "Comparison") -> None:
    """Prints two models side by side."""
    from systolic.comparing.display.text import lines

    print("\n".join(lines(comparison)))
