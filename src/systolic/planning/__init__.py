"""The right slice and layout for a job: what is searched, by which rules, towards which goal."""

from systolic.planning.candidate import Candidate
from systolic.planning.facts import Facts, facts_of
from systolic.planning.goal import Goal, Objective, PriceTerm
from systolic.planning.plan import Plan, Trial
from systolic.planning.search import Limits, Search, SearchProgress
from systolic.planning.space import Freedom

__all__ = [
    "Candidate",
    "Facts",
    "Freedom",
    "Goal",
    "Limits",
    "Objective",
    "Plan",
    "PriceTerm",
    "Search",
    "SearchProgress",
    "Trial",
    "facts_of",
]
