"""The application: what the command line and Python users call, from a recipe, a Job or a run to a result."""
