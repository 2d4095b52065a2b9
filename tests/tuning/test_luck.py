"""Luck or gain: what several seeds say of the best settings and the defaults."""

import pytest

from systolic.job import Mode
from systolic.tuning.luck import Repeated
from systolic.tuning.objective import Aim

ACCURACY, LOSS = Aim(name="accuracy", mode=Mode.max), Aim(name="loss", mode=Mode.min)


def test_a_gain_is_told_from_luck() -> None:
    clear = Repeated(trial=3, aim=ACCURACY, best=(0.97, 0.98, 0.975), default=(0.9, 0.91, 0.905))
    assert clear.gain == pytest.approx(0.07)
    assert "larger than the luck" in clear.sentence
    noisy = Repeated(trial=3, aim=ACCURACY, best=(0.97, 0.80, 0.9), default=(0.9, 0.91, 0.85))
    assert "no larger than the luck" in noisy.sentence
    worse = Repeated(trial=3, aim=LOSS, best=(2.0, 2.01), default=(1.0, 1.01))
    assert worse.gain == pytest.approx(-1.0)
    assert "the default settings are better" in worse.sentence
    same = Repeated(trial=3, aim=LOSS, best=(1.0, 1.0), default=(1.0, 1.0))
    assert (same.gain, same.chance) == (0.0, 1.0)
    assert clear.to_json()["best"]["mean"] == pytest.approx(0.975)
