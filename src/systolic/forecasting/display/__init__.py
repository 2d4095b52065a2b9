"""Views of a forecast: terminal, page, traces, and a comparison of two."""
