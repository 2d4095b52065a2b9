"""Cases of one check of which the default tier has some, one for each mechanism, and ``parity`` the others."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def some(cases: Iterable[Any] | Mapping[str, Any], default: Collection[Any]) -> list[Any]:
    """Parameters of a test: cases, or values by name; those not among ``default`` (cases or names) are of the tier ``parity``."""
    pairs = cases.items() if isinstance(cases, Mapping) else ((None, case) for case in cases)
    made = []
    for name, case in pairs:
        marks = () if (case if name is None else name) in default else pytest.mark.parity
        made.append(pytest.param(case, id=name, marks=marks))
    missing = [one for one in default if one not in cases]
    assert not missing, f"{missing} are no cases"
    return made
