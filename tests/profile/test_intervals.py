"""Arithmetic on intervals of time."""

from systolic.profile.trace import common, exclusive, missing, union


def test_instants_belong_to_the_lowest_rank():
    assert exclusive([(0, 4), (1, 3), (2, 6)], [0, 0, 1]) == [3, 1, 2]
    assert exclusive([(0, 4), (1, 1), (4, 4)], [0, 0, 0]) == [4, 0, 0]
    assert missing([(1, 2), (3, 4)], (0, 5)) == [(0, 1), (2, 3), (4, 5)]
    assert common([(0, 2), (3, 6)], [(1, 4), (5, 9)]) == [(1, 2), (3, 4), (5, 6)]
    assert union([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
