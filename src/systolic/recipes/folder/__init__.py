"""Files of a recipe's folder that it uses: modules that it imports, files that it opens."""
