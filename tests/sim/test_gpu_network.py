import pytest

from systolic.chips import slice
from systolic.hlo import Groups
from systolic.sim.network import switched

LINKS = switched(slice("16xh100"))


def seconds(kind: str, *groups: tuple[int, ...]) -> float:
    return LINKS.collective(kind, Groups(groups), 1e9, 1e9).seconds


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
def test_the_slowest_group_counts_wherever_it_is_listed(kind: str) -> None:
    inside, across = (0, 1, 2, 3), (4, 5, 12, 13)
    both = seconds(kind, inside, across)
    assert both == seconds(kind, across, inside) == seconds(kind, across)
    assert both > seconds(kind, inside)


def test_the_domain_with_the_fewest_cards_decides() -> None:
    assert seconds("all-gather", (0, 1, 2, 8)) > seconds("all-gather", (0, 1, 8, 9))
