"""Table of examples in memory, as numpy arrays."""

from collections.abc import Mapping

import numpy as np

from systolic.data.random_access import Picks, Table


class ArrayTable(Table):
    """Name to array [examples, ...]; a batch is one gather of each array."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = dict(arrays)

    def __len__(self) -> int:
        return next((len(array) for array in self._arrays.values()), 0)

    def take(self, picks: Picks) -> dict[str, np.ndarray]:
        """The picked examples."""
        return {name: array[picks.indices] for name, array in self._arrays.items()}
