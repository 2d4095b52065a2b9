"""Numbers for people."""

import pytest

from systolic.core.units import dollars, gibibytes


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


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1000, "1000 B"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (72 * 2**20, "72.0 MiB"),
        (15.75 * 2**30, "15.75 GiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_bytes_have_the_unit_of_their_size(num_bytes: float, text: str) -> None:
    assert gibibytes(num_bytes) == text
