"""Trains a job on the devices at hand: the loop, its guard, its checkpoints and what it reports."""
