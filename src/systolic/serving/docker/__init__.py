"""Build folder of a container image that serves a Bundle."""
