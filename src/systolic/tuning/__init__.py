"""Search over a recipe's options: the search space, the objectives, and the study that processes share."""
