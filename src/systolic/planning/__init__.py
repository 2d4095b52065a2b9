"""Search for the best slice and layout of a job under a goal: search space, rules, ranking."""
