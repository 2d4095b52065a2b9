"""How documents are laid into rows, as an option."""

import enum


class Packing(enum.Enum):
    """How documents are laid into rows."""

    fit = "fit"
    """Whole documents wherever a row has room (best fit); only longer ones than a row are cut."""
    cut = "cut"
    """One after another, cut at the ends of rows: no padding, more documents without their start."""
