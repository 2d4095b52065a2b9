"""What limits a forecast, a profile or a run, with its evidence, and what to change."""
