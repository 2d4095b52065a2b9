"""Simulation of a schedule on chips: rates, prices, and events in order. Pure Python, no jax."""
