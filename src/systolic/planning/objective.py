"""What a plan makes small, and by which price."""

import enum


class Objective(enum.Enum):
    """What is made small."""

    time = "time"
    cost = "cost"
    energy = "energy"
    pareto = "pareto"
    """Time and cost: every candidate that no other beats in both; the best is the cheapest per speed."""


class PriceTerm(enum.Enum):
    """Which price of the catalogue."""

    on_demand = "on-demand"
    spot = "spot"
    committed = "committed"
