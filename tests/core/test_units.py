"""Numbers for people."""

import pytest

from systolic.core.units import dollars


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (1040.3, "$1,040"),
        (12.3, "$12.30"),
        (0.5, "$0.50"),
        (0.0042, "$0.0042"),
        (1.31e-6, "$0.0000013"),
        (0.0, "$0.00"),
    ],
)
def test_small_dollars_keep_two_digits(usd: float, text: str) -> None:
    assert dollars(usd) == text
