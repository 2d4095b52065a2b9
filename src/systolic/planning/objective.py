"""Objective of a plan, and the price that cost is computed with."""

import enum


class Objective(enum.Enum):
    """Figure that a plan minimises."""

    time = "time"
    cost = "cost"
    energy = "energy"
    pareto = "pareto"
    """Time and cost: the candidates that no other beats in both; the best has the least cost per speed."""
    fit = "fit"
    """Fewest chips that the job fits on; of as many chips the cheapest, and on these the fastest of the layouts that were compiled until one fit."""


class PriceTerm(enum.Enum):
    """Kind of price in the catalogue."""

    on_demand = "on-demand"
    spot = "spot"
    committed = "committed"


MAX_CHIPS = 256
"""Chips of a slice that ``any`` or the name of a chip stands for, at most."""
