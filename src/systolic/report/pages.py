"""What all pages have in common: one self-contained file, from a template that extends ``base.html``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One key figure."""

    label: str
    value: str
    small: str = ""
    is_alarming: bool = False


def fill(template: str, page: Mapping[str, Any]) -> str:
    """A page as text.

    Args:
        template: Its file in the assets.
        page: What the template names; for ``base.html`` heading, verdict, lead, facts and tiles.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("systolic.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template(template).render(page)
