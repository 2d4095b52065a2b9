"""Search over the options of a recipe: what is searched, by what it is judged, and the study that several processes share."""
