"""Output of ``systolic quantize``."""

import sys
from typing import TYPE_CHECKING

from systolic.core.reporter import reporter
from systolic.core.units import duration
from systolic.report.output import print_json

if TYPE_CHECKING:
    from systolic.quantizing.quantize import QuantizedModel


def show(quantized: "QuantizedModel", *, json: bool = False) -> int:
    """Prints a quantized model beside the one that it was made from; returns the exit code.

    Args:
        quantized: The model.
        json: Print one JSON object.

    Raises:
        SystolicError, KeyboardInterrupt: what ended the timing, once all else is printed.
    """
    from systolic.quantizing.display.text import fallen, lines, title

    if quantized.fell:
        reporter().warn(fallen(quantized))
    if json:
        print_json(quantized.to_json())
    else:
        print(f"{quantized.path}: {title(quantized)}, in {duration(quantized.seconds)}")
        print("\n".join(lines(quantized)))
    if quantized.stopped_by is not None:
        sys.stdout.flush()
        raise _with_reason(quantized.stopped_by)
    return 0


def _with_reason(stopped_by: BaseException) -> BaseException:
    """The exception that ended the timing; an interrupt says what is written."""
    if type(stopped_by) is KeyboardInterrupt:
        return KeyboardInterrupt(
            "interrupted while timing; all files are written, and systolic compare times both models"
        )
    return stopped_by
