"""Causes of a step's time, largest share first, by the same rules for a forecast and a profile."""

from collections.abc import Iterable, Mapping, Sequence

from systolic.explaining import host_idle
from systolic.explaining.cause import Cause
from systolic.explaining.rules import RULES
from systolic.explaining.settings import Settings
from systolic.explaining.sources import (
    StepProgram,
    step_of_forecast,
    step_of_profile,
    step_of_programs,
)
from systolic.explaining.step import LEAST, Step
from systolic.forecasting import Forecast
from systolic.hlo import Module
from systolic.job import Model
from systolic.profile import Profile


def causes_of_forecast(
    forecast: Forecast,
    module: Module,
    model: Model | None = None,
    settings: Settings | None = None,
) -> list[Cause]:
    """Causes of a simulated step; none where the forecast has no timeline.

    Args:
        forecast: Forecast of a step that fits.
        module: The scheduled program that was simulated.
        model: The job's model, for the slots of its experts, which the program does not state.
        settings: Options of the recipe, for advice; None where it is not known.
    """
    if forecast.timeline is None or not forecast.step_seconds:
        return []
    return _sorted(_by_rules(step_of_forecast(forecast, module, model, settings)))


def causes_of_programs(forecast: Forecast, programs: Sequence[StepProgram]) -> list[Cause]:
    """Causes of the simulated step of programs that no recipe made; none where the forecast has no step time.

    Args:
        forecast: Forecast of the step, which fits.
        programs: What it runs, one after the other.
    """
    if not forecast.step_seconds:
        return []
    return _sorted(_by_rules(step_of_programs(forecast, programs)))


def causes_of_profile(profile: Profile, mesh: Mapping[str, int] | None = None) -> list[Cause]:
    """Causes of the median step of a profile, and of the device's waiting in the whole trace.

    Args:
        profile: A profile from :func:`systolic.profile.open_profile`.
        mesh: Axis to size, outermost first, to name the axes of collectives; empty where unknown, None where no
            recipe made the program.
    """
    step = step_of_profile(profile, mesh)
    return _sorted([*host_idle.causes(profile), *_by_rules(step)])


def _by_rules(step: Step) -> list[Cause]:
    return [cause for rule in RULES for cause in rule(step)]


def _sorted(found: Iterable[Cause]) -> list[Cause]:
    kept = [cause for cause in found if cause.share is None or cause.share >= LEAST]
    return sorted(kept, key=lambda cause: -(cause.share or 0.0))
