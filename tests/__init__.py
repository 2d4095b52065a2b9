"""The tests, in the folders of the package; helpers are imported as ``tests.FOLDER.NAME``."""
