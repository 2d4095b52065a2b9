"""Training of a job on the local devices: the loop, its guard, its checkpoints and its records."""
