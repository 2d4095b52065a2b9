"""Views for people: what several screens and pages draw with; a verb's own screen, progress and page are in its folder.

Views read the records that the other packages make; nothing is measured here and jax is never imported.
"""
