"""Order of a Parquet file: whether its row groups are sorted or grouped by a column, from the file's statistics."""

import itertools
from typing import Any

FEWEST_GROUPS = 8
"""Number of row groups from which an order matters although some groups are shuffled together."""


def sorted_by(about: Any) -> str:
    """Column by which a file is sorted or grouped; "" if there is none or groups are few.

    A column that only counts rows does not qualify: some group must hold a single value.

    Args:
        about: ``pyarrow.parquet.FileMetaData``.
    """
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    if len(groups) < FEWEST_GROUPS:
        return ""
    for number in range(about.num_columns):
        statistics = [group.column(number).statistics for group in groups]
        if not all(one is not None and one.has_min_max for one in statistics):
            continue
        ranges = [(one.min, one.max) for one in statistics]
        alone = [low for low, high in ranges if low == high]
        ordered = all(high <= low for (_, high), (low, _) in itertools.pairwise(ranges))
        grouped = 2 * len(alone) >= len(ranges)
        if alone and ranges[0] != ranges[-1] and (ordered or grouped):
            return groups[0].column(number).path_in_schema
    return ""
