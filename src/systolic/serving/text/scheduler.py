"""Sequences that the next step reads: continuous batching over pages, with chunked prefill and preemption.

Pure Python, so that its rules are tested without a device: pages are numbers here, their arrays lie on the device.
Each step every running text with one token to read takes part in the decode batch; beside it a bounded number of
prompt tokens is read. The oldest text always has its pages: where they run out, the youngest loses its own and is
read again later. So every admitted text ends, whatever the load.
"""

import hashlib
from collections import OrderedDict, deque
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


PENDING = -1
"""A token that a step in flight chooses."""


@dataclass(kw_only=True, eq=False)
class Text:
    """A request's tokens and how far the cache holds them."""

    number: int
    """In order of arrival."""
    tokens: list[int]
    """Prompt and what was generated; :data:`PENDING` where the device has not told it yet."""
    prompt: int
    """Tokens of the prompt."""
    most: int
    """Tokens that it may have in the end, prompt included."""
    read: int = 0
    """Tokens whose keys and values are in pages."""
    pages: list[int] = field(default_factory=list)
    key: bytes = START
    """Key of its full, published pages."""
    published: int = 0
    """Of its pages."""
    reused: int = 0
    """Tokens that were found in the cache when it was first admitted."""
    preempted: int = 0
    """Times that it lost its pages."""
    shares: bool = True
    """Whether it begins with pages of others; not where the logits of its whole prompt are wanted."""
    slot: int = -1
    """Where its last token lies on the device, while it runs."""

    @property
    def pending(self) -> bool:
        """Whether its last token is not known yet."""
        return self.tokens[-1] == PENDING

    @property
    def known(self) -> int:
        """Tokens before the first that is not known yet."""
        count = len(self.tokens)
        while self.tokens[count - 1] == PENDING:
            count -= 1
        return count

    @property
    def full(self) -> bool:
        """Whether it has all the tokens that it may have."""
        return len(self.tokens) >= self.most

    @property
    def left(self) -> int:
        """Tokens still to read."""
        return len(self.tokens) - self.read


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Bounds of a step."""

    rows: int
    """Texts that run at once."""
    chunk: int
    """Prompt tokens that one text reads in a step."""
    prefills: int
    """Texts that read their prompt in a step."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one step reads."""

    decode: Sequence[Text] = ()
    """Texts that read one token."""
    prefill: Sequence[tuple[Text, int]] = ()
    """Texts with more to read, and how many tokens of it."""
    preempted: Sequence[Text] = ()
    """Texts that lost their pages to this step."""

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


@dataclass(kw_only=True)
class Scheduler:
    """Waiting and running texts."""

    pool: PagePool
    limits: StepLimits
    waiting: deque[Text] = field(default_factory=deque)
    """By age: those that lost their pages come before those that never ran."""
    running: list[Text] = field(default_factory=list)
    """By age."""
    _slots: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._slots = list(range(self.limits.rows - 1, -1, -1))

    def fits(self, most: int) -> bool:
        """Whether a text of so many tokens can ever run."""
        return self._pages(most) <= self.pool.total

    def add(self, text: Text) -> None:
        """Queues a text, for which :meth:`fits` holds."""
        self.waiting.append(text)

    def next(self) -> StepWork:
        """The next step's work; empty where nothing can run."""
        preempted = self._grow()
        self._admit(blocked=bool(preempted))
        decode = [text for text in self.running if text.left == 1 and not text.full]
        prefill = []
        for text in self.running:
            if text.left > 1 and len(prefill) < self.limits.prefills:
                count = min(text.left, self.limits.chunk)
                if self._reserve(text, count):
                    prefill.append((text, count))
        return StepWork(decode=decode, prefill=prefill, preempted=preempted)

    def publish(self, text: Text, read: int) -> None:
        """Names a text's pages that are full of known tokens, so that others can begin with them.

        Args:
            text: Running; one that lost its pages has none to name.
            read: Tokens that were read by steps whose results are known to be finite.
        """
        size = self.pool.page_size
        known = min(read, text.read, text.known)
        while text.pages and (text.published + 1) * size <= known:
            start = text.published * size
            page, tokens = text.pages[text.published], text.tokens[start : start + size]
            text.key = self.pool.publish(page, text.key, tokens)
            text.published += 1

    def remove(self, text: Text) -> None:
        """Ends a text, waiting or running, and gives its pages back at once."""
        if text in self.running:
            self.running.remove(text)
            self._slots.append(text.slot)
        elif text in self.waiting:
            self.waiting.remove(text)
        self._empty(text)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)

    def _reserve(self, text: Text, count: int) -> bool:
        """Whether a text has pages for so many more tokens, taken where it lacks them."""
        lacking = self._pages(text.read + count) - len(text.pages)
        if lacking <= 0:
            return True
        taken = self.pool.take(lacking)
        if taken is None:
            return False
        text.pages += taken
        return True

    def _grow(self) -> list[Text]:
        """Room for one more token of each text that generates, oldest first; the youngest make room."""
        lost: list[Text] = []
        for text in list(self.running):
            if text in lost or text.full:
                continue
            need = 1 if text.left == 1 else min(text.left, self.limits.chunk)
            oldest = text is self.running[0]
            while not self._reserve(text, need):
                if text.left > 1 and not oldest:
                    break  # It waits for its turn with the pages that it has.
                youngest = self.running[-1]
                self._preempt(youngest)
                lost.append(youngest)
                if youngest is text:
                    break
        return lost

    def _preempt(self, text: Text) -> None:
        self.running.remove(text)
        self._empty(text)
        self._slots.append(text.slot)
        text.slot = -1
        text.preempted += 1
        self.waiting.appendleft(text)

    def _empty(self, text: Text) -> None:
        self.pool.release(text.pages)
        text.pages, text.read, text.published, text.key = [], 0, 0, START

    def _admit(self, *, blocked: bool) -> None:
        """Starts waiting texts while there are rows, and pages for their first chunk."""
        while self.waiting and len(self.running) < self.limits.rows and not blocked:
            text = self.waiting[0]
            if text.pending:
                return  # Its last token is known after the step in flight.
            shared = self.pool.reuse and text.shares
            text.pages, text.key = self.pool.find(text.tokens) if shared else ([], START)
            text.published = len(text.pages)
            text.read = text.published * self.pool.page_size
            if not self._reserve(text, min(text.left, self.limits.chunk)):
                self._empty(text)
                return
            if not text.preempted:
                text.reused = text.read
            self.waiting.popleft()
            text.slot = self._slots.pop()
            self.running.append(text)
            self.running.sort(key=lambda one: one.number)
