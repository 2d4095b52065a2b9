"""Views for people: the live view, the end summary, TensorBoard events and the HTML page of a run.

Everything here reads the records that a run writes; nothing is measured and jax is never imported.
"""
