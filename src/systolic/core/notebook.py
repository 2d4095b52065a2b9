"""Display of values in notebooks: what their ``_repr_html_`` calls."""

from importlib import import_module


def notebook_html(value: object) -> str:
    """The terminal's view of a value as HTML, drawn by ``systolic.report.notebook``.

    Values lie below the layer that draws them. It is imported by name, and only when a notebook asks.
    """
    return import_module("systolic.report.notebook").html(value)
