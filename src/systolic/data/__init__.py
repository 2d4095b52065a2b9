"""Data sources, shuffling, packing, and batches with a saveable position.

``Data`` values (``arrays``, ``text.documents``, ``image.images`` …) open a ``Table`` of random-access
examples or a stream of packed windows; Grain reads both ahead, and ``device_batches`` moves each batch
to the devices. Import the sources from their modules; importing this package loads nothing.
"""
