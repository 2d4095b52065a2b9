"""Shuffles without a table: the index of example ``p`` of an endless shuffled stream.

A keyed permutation of 0..n-1 is computed for the asked positions only, so any position of any
epoch is reached at once, in constant memory, and every host agrees without talking. It is a
Feistel network over the next power of two, walked until it lands below n (format-preserving
encryption: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

from functools import lru_cache

import numpy as np

_ROUNDS = 4
"""Rounds over both halves, so 8 of a plain Feistel network."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: the step that SplitMix64 takes between keys."""

_BLOCK = 1 << 14
"""Positions shuffled at once: numpy's cost per call would dwarf a batch of 128."""


def mix(values: np.ndarray) -> np.ndarray:
    """A bijective hash of uint64[...] (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Permutes positions 0..size-1, one permutation for each key.

    Args:
        positions: integers[n] below ``size``.
        size: number of positions.
        keys: uint64[n] (or [1]): the permutation that each position is under.

    Returns:
        int64[n].
    """
    bits = max(size - 1, 0).bit_length()
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits - int(low_bits))) - 1)
    result = positions.astype(np.uint64)
    keys = np.broadcast_to(keys, result.shape)
    todo = np.arange(len(result)) if bits else np.arange(0)
    while len(todo):
        low, high, key = result[todo] & low_mask, result[todo] >> low_bits, keys[todo]
        for _ in range(_ROUNDS):
            key = key + np.uint64(_GOLDEN)
            high ^= mix(low + key) & high_mask
            key = key + np.uint64(_GOLDEN)
            low ^= mix(high + key) & low_mask
        result[todo] = (high << low_bits) | low
        todo = todo[result[todo] >= size]
    return result.astype(np.int64)


def keys(seed: int, epochs: np.ndarray) -> np.ndarray:
    """uint64[n]: the key of each epoch's permutation."""
    start = np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64)
    return mix(mix(start + np.uint64(_GOLDEN)) + epochs.astype(np.uint64))


def order(positions: np.ndarray, size: int, seed: int, shuffled: bool) -> np.ndarray:
    """Index of the example at each position of the endless stream of epochs.

    Args:
        positions: int64[n], 0 or more; ``position // size`` is the epoch.
        size: examples in the data.
        seed: of the shuffle.
        shuffled: whether each epoch is shuffled (anew).

    Returns:
        int64[n], each value once per epoch.
    """
    if not shuffled:
        return positions % size
    blocks = positions // _BLOCK
    known = {number: _block(int(number), size, seed) for number in np.unique(blocks)}
    if len(known) == 1:
        return known[blocks[0]][positions % _BLOCK]
    return np.array(
        [known[b][p] for b, p in zip(blocks, positions % _BLOCK, strict=True)], np.int64
    )


@lru_cache(maxsize=16)
def _block(number: int, size: int, seed: int) -> np.ndarray:
    positions = np.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=np.int64)
    return permute(positions % size, size, keys(seed, positions // size))


def uniform(seed: int, positions: np.ndarray, count: int) -> np.ndarray:
    """float64[n, count] in [0, 1): random numbers that belong to stream positions.

    They depend on ``seed`` and the position only, not on batch size, host or worker, so an
    augmented stream resumes exactly.
    """
    rows = keys(seed ^ 0x5DEECE66D, positions)[:, None]
    columns = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (mix(rows + columns[None, :]) >> np.uint64(11)) * 2.0**-53
