"""Names of models in the paths of a server."""

ENDS = ("versions", "labels", "metadata", "ready", "infer", "load", "unload")
"""What follows a model's name in paths, and so can't be in the name after a ``/``."""
NAME_IN_PATH = rf"[^/]+(?:/(?!(?:{'|'.join(ENDS)})(?:/|$))[^/]+)*"
"""A name of one part or of several, such as ``org/model``."""
