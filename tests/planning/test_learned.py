"""Corrections: unknown is 1, what was seen is believed, what is alike follows, what is unlike stays uncertain."""

import math
from dataclasses import replace

import pytest

from systolic.chips import slice
from systolic.job import Remat
from systolic.planning.enumeration import Correction, likely
from systolic.planning.space import Freedom, candidates
from tests.planning.jobs import decoder_job

SPACE = list(candidates(decoder_job(), slice("v5e-16"), Freedom()))


def with_remat(remat: Remat) -> list:
    return [one for one in SPACE if one.layout.remat is remat]


def test_nothing_learned_is_no_correction() -> None:
    assert Correction().ratio(SPACE[0]) == 1.0


def test_what_all_have_in_common_is_believed() -> None:
    learned = Correction()
    for one in SPACE[::97]:
        learned.learn(one, 2.0)
    for one in SPACE[::53]:
        assert learned.ratio(one) == pytest.approx(2.0, rel=0.15)


def test_a_policy_that_is_slower_is_learned_apart() -> None:
    learned = Correction()
    for one in with_remat(Remat.full)[:40:4]:
        learned.learn(one, 2.0)
    for one in with_remat(Remat.minimal)[:40:4]:
        learned.learn(one, 1.0)
    assert learned.ratio(with_remat(Remat.full)[7]) > 1.5 * learned.ratio(
        with_remat(Remat.minimal)[7]
    )


def test_optimism_is_larger_where_less_was_seen() -> None:
    learned = Correction()
    near = with_remat(Remat.full)[:12]
    for one in near:
        learned.learn(one, 1.5)

    def spread(one) -> float:
        return math.log(learned.ratio(one) / learned.ratio(one, optimism=1.0))

    far = replace(
        with_remat(Remat.none)[-1],
        on=slice("v6e-16"),
    )
    assert 0 < spread(near[3]) < spread(far)


def test_likely_falls_with_the_need() -> None:
    chances = [likely(need, 16.0) for need in (8.0, 14.0, 16.0, 18.0, 40.0, 1e6)]
    assert chances == sorted(chances, reverse=True)
    assert chances[2] == pytest.approx(0.5)
    assert chances[0] > 0.99
    assert chances[-1] < 1e-9
