"""Where examples come from: sources, shuffling, packing, batches with a saveable position.

``Data`` values (``arrays``, ``bytes``, ``documents`` and the image sources) open a ``Table`` of
random-access examples or a stream of packed windows; Grain reads both ahead. Import the sources
from their modules; importing this package loads nothing.
"""
