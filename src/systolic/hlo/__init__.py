"""Scheduled HLO text as values: modules, shapes, groups, loops. Pure Python, no jax.

Reads what libtpu 0.0.8 to today's prints after scheduling, and what other programs dumped.
"""

from systolic.hlo.groups import SLICE, Crossing, Groups, crosses, crossing_of, parse_groups
from systolic.hlo.module import Computation, Instruction, Module
from systolic.hlo.parse import parse
from systolic.hlo.shape import Shape, parse_shape

__all__ = [
    "SLICE",
    "Computation",
    "Crossing",
    "Groups",
    "Instruction",
    "Module",
    "Shape",
    "crosses",
    "crossing_of",
    "parse",
    "parse_groups",
    "parse_shape",
]
