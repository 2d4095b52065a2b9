"""The right slice and layout for a job: what is searched, by which rules, towards which goal."""

from systolic.plan.candidate import Candidate
from systolic.plan.facts import Facts, facts_of
from systolic.plan.goal import Goal, Objective, Price
from systolic.plan.plan import Plan, Tried
from systolic.plan.search import Limits, Progress, Search
from systolic.plan.space import Freedom

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
