"""The right slice and layout for a job: what is searched, by which rules, towards which goal."""

from systolic.planning.candidate import Candidate
from systolic.planning.evaluator import CandidateEvaluator
from systolic.planning.facts import Facts, facts_of
from systolic.planning.goal import Goal, Objective, PriceTerm
from systolic.planning.plan import CompileDepth, Plan, SearchStop, Trial
from systolic.planning.search import Limits, Search, SearchProgress, SearchStage
from systolic.planning.space import Freedom, RefusalRule

__all__ = [
    "Candidate",
    "CandidateEvaluator",
    "CompileDepth",
    "Facts",
    "Freedom",
    "Goal",
    "Limits",
    "Objective",
    "Plan",
    "PriceTerm",
    "RefusalRule",
    "Search",
    "SearchProgress",
    "SearchStage",
    "SearchStop",
    "Trial",
    "facts_of",
]
