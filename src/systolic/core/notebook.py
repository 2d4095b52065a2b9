"""Display of values in notebooks: what their ``_repr_html_`` calls."""

import html
from importlib import import_module


def notebook_html(value: object) -> str:
    """The terminal's view of a value as HTML, drawn by ``systolic.report.notebook``.

    Values lie below the layer that draws them. It is imported by name, and only when a notebook asks.
    """
    return import_module("systolic.report.notebook").html(value)


def frame(page: str) -> str:
    """A whole HTML page inside of a cell's output."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" width="100%" height="900" '
        'style="border:0" title="report"></iframe>'
    )
