"""``systolic recipes``: the list of recipes, and one with its options."""
