"""Capture of a JAX program: it runs, unchanged and in its own environment, until its step is known, and never trains.

The program sees the devices of a slice. ``hook`` runs in its process: the calls of its jitted functions are recorded,
the one that repeats is compiled for the slice by that environment's libtpu, and the process ends. :mod:`.program` starts
it; :mod:`systolic.forecasting.captured` simulates what came back.
"""

from systolic.capture.program import Captured, capture, short_name

__all__ = ["Captured", "capture", "short_name"]
