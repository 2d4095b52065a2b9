"""A Bundle as the build folder of a container image that serves it."""
