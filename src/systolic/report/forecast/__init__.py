"""What people look at of a forecast: the terminal, a page, traces, and what changed."""
