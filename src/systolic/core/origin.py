"""Origin of a number: every number that could be predicted or measured carries it."""

import enum


class Origin(enum.Enum):
    """How a number was obtained, from the most to the least binding."""

    measured = "measured"
    """Read from a clock or a counter on the hardware named."""
    simulated = "simulated"
    """From the simulation of a compiled schedule."""
    compiled = "compiled"
    """Reported by the compiler."""
    published = "published"
    """Printed by a source that is cited beside it."""
    assumed = "assumed"
    """A rule or a default of this package."""
