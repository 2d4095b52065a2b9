"""The right slice and layout for a job: what is searched, by which rules, towards which goal."""

from systolic.planning.candidate import Candidate
from systolic.planning.facts import Facts, facts_of
from systolic.planning.goal import Goal, Objective, Price
from systolic.planning.plan import Plan, Tried
from systolic.planning.search import Limits, Progress, Search
from systolic.planning.space import Freedom

__all__ = [
    "Candidate",
    "Facts",
    "Freedom",
    "Goal",
    "Limits",
    "Objective",
    "Plan",
    "Price",
    "Progress",
    "Search",
    "Tried",
    "facts_of",
]
