"""Device memory of a server of a language model: weights, temporaries of its programs, and what is left for the cache's pages."""

from dataclasses import dataclass
from typing import Any

from systolic.core.units import Origin, gibibytes

PADDING_PAGES = 1
"""Pages that rows of padding write to, which no text has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """One line of the table."""

    name: str
    bytes: int
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingMemory:
    """Memory of one device, in bytes."""

    capacity_bytes: int
    """Memory of the device that programs may use."""
    weights_bytes: int
    """Bytes of all weights, those of adapters included."""
    temporary_bytes: int
    """The most that one of the programs needs beside weights and pages."""
    page_bytes: int
    """Keys and values of all layers of one page, on this device."""
    page_size: int
    """Positions of a page."""
    pages: int | None = None
    """Pages that a server has allocated; None takes all that fit."""
    replicas: int = 1
    """Groups of devices that each have pages of their own."""
    most_rows: int | None = None
    """Most texts of a replica whose step fits, of those that were compiled; None where none was refused."""
    adapters_bytes: int = 0
    """Bytes of the weights that are matrices of adapters side by side."""
    origin: Origin = Origin.compiled

    @property
    def free_bytes(self) -> int:
        """Bytes beside weights and temporaries; negative where these don't fit."""
        return self.capacity_bytes - self.weights_bytes - self.temporary_bytes

    @property
    def num_pages(self) -> int:
        """Pages of one replica."""
        fit = max(self.free_bytes, 0) // self.page_bytes
        return fit if self.pages is None else self.pages

    @property
    def text_pages(self) -> int:
        """Pages of one replica that texts can hold."""
        return max(self.num_pages - PADDING_PAGES, 0)

    @property
    def pages_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes that nothing uses."""
        return self.free_bytes - self.pages_bytes

    @property
    def num_positions(self) -> int:
        """Tokens that the pages of all replicas hold."""
        return self.text_pages * self.page_size * self.replicas

    def pages_of(self, tokens: int) -> int:
        """Pages of a text of so many tokens."""
        return -(-tokens // self.page_size)

    def concurrency(self, tokens: int) -> int:
        """Texts of so many tokens that all replicas hold at once, each at its full length."""
        held = self.text_pages // self.pages_of(tokens)
        return (held if self.most_rows is None else min(held, self.most_rows)) * self.replicas

    def rows(self) -> list[MemoryRow]:
        """The table; the bytes sum to the capacity."""
        size = f"{self.num_pages:,} of {self.page_size} positions"
        size += f", {gibibytes(self.page_bytes)} each"
        adapters = MemoryRow(
            name="adapters", bytes=self.adapters_bytes, text="all read in every step"
        )
        return [
            MemoryRow(name="weights", bytes=self.weights_bytes - self.adapters_bytes),
            *([adapters] if self.adapters_bytes else []),
            MemoryRow(name="pages", bytes=self.pages_bytes, text=size),
            MemoryRow(
                name="temporaries", bytes=self.temporary_bytes, text="of the largest program"
            ),
            MemoryRow(name="left", bytes=self.left_bytes),
        ]

    def to_json(self) -> dict[str, Any]:
        """The table and the sizes that it is made of."""
        return {
            "origin": self.origin.value,
            "capacity_bytes": self.capacity_bytes,
            "weights_bytes": self.weights_bytes,
            **({"adapters_bytes": self.adapters_bytes} if self.adapters_bytes else {}),
            "temporary_bytes": self.temporary_bytes,
            "pages_bytes": self.pages_bytes,
            "left_bytes": self.left_bytes,
            "pages": self.num_pages,
            "page_bytes": self.page_bytes,
            "page_size": self.page_size,
            "replicas": self.replicas,
            "positions": self.num_positions,
        }
