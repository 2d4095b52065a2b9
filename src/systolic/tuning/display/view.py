"""Output of ``systolic tune``."""

import shlex
from typing import TYPE_CHECKING

from systolic.core.reporter import reporter
from systolic.report.output import print_json

if TYPE_CHECKING:
    from systolic.tuning.results import StudyResult

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell has it."""


def show(study: "StudyResult", *, json: bool = False) -> int:
    """Prints the results of a search; returns the exit code.

    Args:
        study: The results.
        json: Print the study as one JSON object on stdout.
    """
    from systolic.tuning.display.text import NAMES, print_study

    if json:
        print_json({**study.to_json(), "report": str(study.page)})
    else:
        print_study(study)
        print(f"{'report':<{NAMES}}{shlex.quote(str(study.page))}")
    if study.interrupted:
        reporter().warn("interrupted; rerun to continue")
        return INTERRUPTED
    return 0 if study.best is not None else 1
