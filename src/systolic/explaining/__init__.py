"""Causes that limit a forecast, a profile or a run, with evidence and advice."""
