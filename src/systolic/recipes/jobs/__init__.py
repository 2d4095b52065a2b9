"""From a recipe and its options, or a plan of them, to a job."""
