"""Simulation of a schedule on chips: rates, prices, and events in order. Pure Python, no jax."""

from systolic.sim.simulate import simulate
from systolic.sim.timeline import Resource, Span, Timeline

__all__ = ["Resource", "Span", "Timeline", "simulate"]
