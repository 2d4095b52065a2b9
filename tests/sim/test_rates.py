import pytest

from systolic.chips import slice
from systolic.core.errors import NotFoundError
from systolic.sim.rates import Rates, rates_of

TPU7X = slice("tpu7x-8")
STATE = "--xla_tpu_dvfs_p_state="


def by_clock(clock_hz: float) -> float:
    """bf16 FLOP/s of one TPU7x device: two matrix units of 256 x 256, two cells' multiply-adds a cycle."""
    return 2 * 256 * 256 * 2 * 2 * clock_hz


def test_peak_and_clock_are_of_one_power_state() -> None:
    rates = rates_of(TPU7X)
    assert rates.clock_hz == 1.962e9
    assert rates.peaks["bf16"] == pytest.approx(by_clock(1.962e9), rel=2e-3)
    # What XProf prints for a device at the default state.
    assert rates.peaks["bf16"] == pytest.approx(1028.75e12, rel=2e-3)


@pytest.mark.parametrize("rates", [rates_of(TPU7X, 7), rates_of(TPU7X, flags=(f"{STATE}7",))])
def test_the_published_peak_is_of_state_7(rates: Rates) -> None:
    assert rates.clock_hz == 2.2e9
    assert rates.peaks["bf16"] == 2307e12 / 2
    assert rates.peaks["fp8"] == 4614e12 / 2


def test_memory_and_links_do_not_follow_the_clock() -> None:
    slow, fast = rates_of(TPU7X, 3), rates_of(TPU7X, 7)
    assert (slow.hbm, slow.link, slow.dcn) == (fast.hbm, fast.link, fast.dcn)


def test_a_state_without_a_clock_is_refused() -> None:
    with pytest.raises(NotFoundError, match="tpu7x at power state 5, only at 3, 7"):
        rates_of(TPU7X, flags=(f"{STATE}5",))


@pytest.mark.parametrize("name", ["v4-8", "v5e-4", "v5p-8", "v6e-4"])
def test_other_chips_have_one_clock(name: str) -> None:
    on = slice(name)
    assert rates_of(on, 7) == rates_of(on)
    devices = on.chip.devices_per_chip or 1
    assert rates_of(on).peaks["bf16"] == (on.chip.peak_bf16_flops_per_second or 0) / devices
