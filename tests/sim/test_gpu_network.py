import pytest

from systolic.chips import slice
from systolic.hlo import Groups
from systolic.sim.network import CALL_SECONDS, HOP_SECONDS, NET_HOP_SECONDS, switched

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


@pytest.mark.parametrize(("kind", "net_steps"), [("all-reduce", 2 * 4), ("all-gather", 15)])
def test_a_sum_over_hosts_goes_up_and_down_a_tree(kind: str, net_steps: int) -> None:
    """Of 16 hosts with 8 GPUs each: four doublings, up and down; a gather is a ring through all hosts."""
    everyone = Groups((tuple(range(128)),))
    least = switched(slice("128xh100")).collective(kind, everyone, 1.0, 1.0).seconds
    inside = (2 if kind == "all-reduce" else 1) * 7 * HOP_SECONDS
    assert least == pytest.approx(CALL_SECONDS + inside + net_steps * NET_HOP_SECONDS, rel=1e-4)
