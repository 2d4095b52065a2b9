"""What a recipe takes from the folder of its file: the modules that it imports, the files that it opens."""
