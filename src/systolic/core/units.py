"""Numbers for people, with their units, and where each came from. GB means 1e9 bytes, GiB 2**30; time is in seconds unless the name says otherwise."""

import enum
import math

GB = 10**9
GIB = 2**30
MIB = 2**20
KIB = 2**10

_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float, unit: str = "", digits: int = 3) -> str:
    """``1234567`` as ``1.23 M`` + unit (powers of 1000)."""
    value = float(f"{value:.{digits}g}")  # 999.9 is 1 k, not 1e+03
    for scale, prefix in _DECIMAL:
        if abs(value) >= scale:
            return f"{value / scale:.{digits}g} {prefix}{unit}"
    text = f"{value:.{digits}g}"
    return f"{text} {unit}" if unit else text


def gibibytes(num_bytes: float) -> str:
    """Bytes as GiB, MiB, KiB or B, the largest of which there is at least one."""
    for unit, size, digits in (("B", 1, 0), ("KiB", KIB, 1), ("MiB", MIB, 1)):
        if round(abs(num_bytes) / size, digits) < 1024:
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes / GIB:.2f} GiB"


def dollars(usd: float) -> str:
    """Dollars as ``$1,040``, ``$12.30`` or ``$0.0042``: without cents from a hundred on, small ones with two digits."""
    if usd >= 100:
        return f"${usd:,.0f}"
    if usd >= 0.1 or usd <= 0:
        return f"${usd:.2f}"
    return f"${usd:.{1 - math.floor(math.log10(usd))}f}"


def duration(seconds: float) -> str:
    """Seconds as ``340 ms``, ``12.3 s``, ``4 m 05 s``, ``3 h 20 m`` or ``2 d 4 h``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} m"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def with_article(noun: str) -> str:
    """A noun, such as the name of a class, behind ``a`` or ``an``."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def plural(number: float, noun: str) -> str:
    """``1 record``, ``2,000 records``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


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
