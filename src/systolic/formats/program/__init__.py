"""Exported programs: a model of another framework as StableHLO and weights, without the framework."""
