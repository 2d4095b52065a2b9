"""What ``systolic doctor`` prints."""

import json as jsonlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from systolic.doctor.command import Examination


def show(examination: "Examination", *, json: bool = False) -> int:
    """Prints the verdict, the problems with their fixes and the facts; returns the exit code, 1 where a check failed.

    Args:
        examination: The machine and its findings.
        json: Print one JSON object.
    """
    if json:
        print(jsonlib.dumps(examination.to_json(), indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        from systolic.doctor.display.text import WIDTH, print_examination

        print_examination(examination, Console(width=WIDTH, highlight=False))
    return int(not examination.fit)
