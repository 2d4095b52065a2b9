"""What the chips will do with a schedule: rates, prices, and the simulation. Pure Python, no jax."""

from systolic.sim.simulate import simulate
from systolic.sim.timeline import Resource, Span, Timeline

__all__ = ["Resource", "Span", "Timeline", "simulate"]
