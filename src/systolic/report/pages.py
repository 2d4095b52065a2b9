"""Common parts of all pages: one self-contained file, from a template that extends ``base.html``."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from systolic.report import charts


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One key figure."""

    label: str
    value: str
    small: str = ""
    is_alarming: bool = False


def columns(num_tiles: int) -> tuple[int, int]:
    """Columns of the key figures on a wide page and on one of half the width, for rows as even as possible."""
    if num_tiles <= 5:
        return max(num_tiles, 1), max(num_tiles, 1)
    wide = max((3, 4, 5), key=lambda count: (-(-num_tiles % count), count))
    middle = max((2, 3, 4), key=lambda count: (-(-num_tiles % count), count))
    return wide, middle


def is_even(num_tiles: int) -> bool:
    """Whether all rows of key figures are full."""
    return num_tiles % columns(num_tiles)[0] == 0


@dataclass(frozen=True, slots=True)
class OptionText:
    """Text whose options are not broken after their dashes: ``--repeats``."""

    text: str

    def __html__(self) -> str:
        words = (
            f'<span class="word">{escape(word)}</span>' if word.startswith("--") else escape(word)
            for word in self.text.split(" ")
        )
        return " ".join(words)


def fill(template: str, page: Mapping[str, Any]) -> str:
    """Renders a page.

    Args:
        template: File in the assets.
        page: Values for the template; for ``base.html`` heading, verdict, lead, facts and tiles.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("systolic.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"hue": charts.hue, "unbroken": OptionText}
    grid = columns(len(page["tiles"]))
    return templates.get_template(template).render({**page, "columns": grid})
