"""What to minimise and what to report: one task a file."""
