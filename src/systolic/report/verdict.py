"""A verdict: a word and a sentence with a tone, at the top of every screen and page."""

import enum
from dataclasses import dataclass


class Tone(enum.Enum):
    """How a verdict is coloured."""

    good = "good"
    fair = "fair"
    bad = "bad"
    neutral = "neutral"


COLOURS = {Tone.good: "green", Tone.fair: "yellow", Tone.bad: "red", Tone.neutral: "cyan"}
"""Colour of each tone in a terminal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Judgement of a run, a forecast or a plan."""

    word: str
    sentence: str
    tone: Tone
