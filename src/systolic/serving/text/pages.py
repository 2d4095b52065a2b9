"""Pages of a key-value cache: which are free, which are shared by texts that begin alike.

Pure Python: the engine decides by page numbers, the arrays lie on the device.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

NOWHERE = 0
"""The page that padding is written to; no text has it."""
START = b""
"""Key of the empty text."""


def next_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a text that ends with a full page: the digest of the key before and the page's tokens.

    A digest that nobody can collide, since equal keys share the contents of other users' texts.
    """
    digest = hashlib.blake2b(before, digest_size=16)
    digest.update(b"".join(token.to_bytes(4, "little") for token in tokens))
    return digest.digest()


@dataclass(kw_only=True)
class PagePool:
    """All pages of a cache.

    A page is held by texts, free, or kept: full, held by none, and found again by a text that begins
    the same, until its place is needed. The page that was kept longest without use goes first.
    """

    num_pages: int
    """Pages of the arrays, of which :data:`NOWHERE` is never given out."""
    page_size: int
    """Positions of a page."""
    reuse: bool = True
    """Whether full pages are kept and shared."""
    _free: list[int] = field(init=False)
    _holders: dict[int, int] = field(init=False, default_factory=dict)
    _kept: OrderedDict[int, bytes] = field(init=False, default_factory=OrderedDict)
    _by_key: dict[bytes, int] = field(init=False, default_factory=dict)
    _key_of: dict[int, bytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_pages - 1, NOWHERE, -1))

    @property
    def available(self) -> int:
        """Pages that :meth:`take` can give: free or kept."""
        return len(self._free) + len(self._kept)

    @property
    def in_use(self) -> int:
        """Pages that texts hold."""
        return len(self._holders)

    @property
    def total(self) -> int:
        """Pages that texts can hold."""
        return self.num_pages - 1

    def find(self, tokens: Sequence[int]) -> tuple[list[int], bytes]:
        """Pages with the first tokens of a text, now held by it, and the key of what they hold.

        At least one token is left, whose logits somebody has to compute.
        """
        found: list[int] = []
        key = START
        size = self.page_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            following = next_key(key, tokens[start : start + size])
            page = self._by_key.get(following)
            if page is None:
                break
            found.append(page)
            key = following
        for page in found:
            self._kept.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        return found, key

    def take(self, count: int) -> list[int] | None:
        """So many empty pages, or None where there are fewer; then none is taken."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if not self._free:
                page, key = self._kept.popitem(last=False)
                del self._by_key[key], self._key_of[page]
                self._free.append(page)
            page = self._free.pop()
            self._holders[page] = 1
            taken.append(page)
        return taken

    def publish(self, page: int, before: bytes, tokens: Sequence[int]) -> bytes:
        """Names a page that has become full, so that others find it; the key of the text up to its end."""
        key = next_key(before, tokens)
        if self.reuse and key not in self._by_key and page not in self._key_of:
            self._by_key[key] = page
            self._key_of[page] = key
        return key

    def release(self, pages: Sequence[int]) -> None:
        """Gives pages back; those with a name are kept for others. The last page of a text goes first."""
        for page in reversed(pages):
            left = self._holders[page] - 1
            if left:
                self._holders[page] = left
                continue
            del self._holders[page]
            key = self._key_of.get(page)
            if key is None:
                self._free.append(page)
            else:
                self._kept[page] = key
