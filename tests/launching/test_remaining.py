"""When the launch waits for a slice, and when it continues without it."""

from systolic.launching.supervisor import Next, Remaining


def test_a_slice_is_waited_for_and_then_left_out() -> None:
    slices = Remaining(slices=3, min_slices=1, rejoin_seconds=60)
    assert slices.killed(1, now=1000, lived_seconds=900) is Next.restart
    assert slices.killed(1, now=1010, lived_seconds=2) is Next.wait
    assert slices.killed(1, now=1050, lived_seconds=40) is Next.wait
    assert slices.killed(1, now=1061, lived_seconds=2) is Next.without
    assert (slices.present, slices.left_out) == ([0, 2], [1])
    # The last of the remaining slices is the third of the original ones.
    assert slices.killed(1, now=2000, lived_seconds=900) is Next.restart
    assert slices.killed(1, now=2060, lived_seconds=2) is Next.without
    assert (slices.present, slices.left_out) == ([0], [1, 2])
    assert slices.killed(0, now=3000, lived_seconds=2) is Next.restart, "none is left to go on"


def test_a_slice_that_lived_long_enough_had_come_back() -> None:
    slices = Remaining(slices=2, min_slices=1, rejoin_seconds=60)
    for now in range(1000, 2000, 100):
        assert slices.killed(0, now=now, lived_seconds=90) is Next.restart


def test_another_slice_begins_a_wait_of_its_own() -> None:
    slices = Remaining(slices=2, min_slices=1, rejoin_seconds=60)
    assert slices.killed(0, now=1000, lived_seconds=900) is Next.restart
    assert slices.killed(1, now=1050, lived_seconds=2) is Next.restart
    assert slices.killed(1, now=1070, lived_seconds=2) is Next.wait


def test_without_a_lowest_number_all_are_waited_for() -> None:
    slices = Remaining(slices=2)
    assert [slices.killed(0, now=n, lived_seconds=0) for n in range(3)] == [Next.restart] * 3


def test_two_slices_lost_at_once_are_both_left_out() -> None:
    """In each start another one of them fails first."""
    slices = Remaining(slices=3, min_slices=1, rejoin_seconds=60)
    assert slices.killed(0, now=1000, lived_seconds=900) is Next.restart
    assert slices.killed(2, now=1005, lived_seconds=2) is Next.restart
    assert slices.killed(0, now=1010, lived_seconds=2) is Next.wait
    assert slices.killed(2, now=1055, lived_seconds=2) is Next.wait
    assert slices.killed(0, now=1060, lived_seconds=2) is Next.without
    # The third is now the second of those present.
    assert slices.killed(1, now=1065, lived_seconds=2) is Next.without
    assert (slices.present, slices.left_out) == ([1], [0, 2])


def test_a_start_that_lived_long_enough_had_all_slices() -> None:
    slices = Remaining(slices=3, min_slices=1, rejoin_seconds=60)
    assert slices.killed(0, now=1000, lived_seconds=900) is Next.restart
    assert slices.killed(2, now=1100, lived_seconds=90) is Next.restart
    # The first had come back, and its next loss begins a wait of its own.
    assert slices.killed(0, now=1110, lived_seconds=5) is Next.restart
    assert slices.killed(0, now=1120, lived_seconds=5) is Next.wait
