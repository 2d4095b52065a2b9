"""Sequences that the next step reads: continuous batching over pages, with chunked prefill and preemption.

Pure Python, so that its rules are tested without a device: pages are numbers here, their arrays lie on the device.
Each step every running text with one token to read takes part in the decode batch; beside it a bounded number of
prompt tokens is read. The first text by priority and age always has its pages: where they run out, the last one loses
its own and is read again later. So every admitted text of a priority ends, whatever the load.
"""

import hashlib
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from systolic.serving.text.sequence import START, Sequence

NOWHERE = 0
"""The page that padding is written to; no text has it."""


def next_key(before: bytes, tokens: Iterable[int]) -> bytes:
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

    def find(self, tokens: list[int], key: bytes = START) -> tuple[list[int], bytes]:
        """Pages with the first tokens of a text, now held by it, and the key of what they hold.

        At least one token is left, whose logits somebody has to compute.

        Args:
            tokens: The text.
            key: Of the empty text.
        """
        pages: list[int] = []
        size = self.page_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            following = next_key(key, tokens[start : start + size])
            page = self._by_key.get(following)
            if page is None:
                break
            pages.append(page)
            key = following
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        return pages, key

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

    def publish(self, page: int, before: bytes, tokens: list[int]) -> bytes:
        """Names a page that has become full, so that others find it; the key of the text up to its end."""
        key = next_key(before, tokens)
        if self.reuse and key not in self._by_key and page not in self._key_of:
            self._by_key[key] = page
            self._key_of[page] = key
        return key

    def release(self, pages: list[int]) -> None:
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


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Bounds of a step."""

    rows: int
    """Texts that run at once."""
    chunk: int
    """Prompt tokens that one text reads in a step."""
    prefills: int
    """Texts that read their prompt in a step."""
    drafts: int = 0
    """Tokens that are proposed for a text."""
    drafted_texts: int = 0
    """Most texts that proposals are made for."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Sequences that one step reads."""

    decode: list[Sequence] = field(default_factory=list)
    """Texts that read one token."""
    prefill: list[tuple[Sequence, int]] = field(default_factory=list)
    """Texts with more to read, and how many tokens of it."""
    drafts: list[list[int]] = field(default_factory=list)
    """Proposals for each text that reads one token; [] where there are none for any."""
    preempted: list[Sequence] = field(default_factory=list)
    """Texts that lost their pages to this step."""

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


@dataclass(kw_only=True)
class Scheduler:
    """Waiting and running texts."""

    pool: PagePool
    limits: StepLimits
    waiting: deque[Sequence] = field(default_factory=deque)
    """By rank, whether they lost their pages or never ran."""
    running: list[Sequence] = field(default_factory=list)
    """By rank."""
    _slots: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._slots = list(range(self.limits.rows - 1, -1, -1))

    def fits(self, most: int) -> bool:
        """Whether a text of so many tokens can ever run."""
        return self._pages(most) <= self.pool.total

    def add(self, sequence: Sequence) -> None:
        """Queues a text, for which :meth:`fits` holds."""
        insort(self.waiting, sequence, key=attrgetter("rank"))

    def schedule(self) -> StepWork:
        """The next step's work; empty where nothing can run."""
        preempted = self._grow()
        self._admit(blocked=bool(preempted))
        decode = [sequence for sequence in self.running if sequence.left == 1 and not sequence.full]
        prefill = []
        for sequence in self.running:
            if sequence.left > 1 and len(prefill) < self.limits.prefills:
                count = min(sequence.left, self.limits.chunk)
                if self._reserve(sequence, count):
                    prefill.append((sequence, count))
        drafts = self._proposals(decode)
        return StepWork(decode=decode, prefill=prefill, drafts=drafts, preempted=preempted)

    @property
    def proposes(self) -> bool:
        """Whether the next step may have proposals, for which the tokens of the one before have to be known."""
        few = 0 < len(self.running) <= self.limits.drafted_texts
        return few and any(not sequence.pause for sequence in self.running)

    def _proposals(self, decode: list[Sequence]) -> list[list[int]]:
        """Proposals for texts, with pages for them; [] where there are none for any."""
        drafts: list[list[int]] = []
        if not 0 < len(decode) <= self.limits.drafted_texts:
            return drafts
        known = not any(sequence.pending for sequence in decode)
        for sequence in decode:
            room = min(self.limits.drafts, sequence.max_length - len(sequence.tokens) - 1)
            draft = sequence.propose(room) if known and room > 0 and not sequence.pause else []
            sequence.pause = max(sequence.pause - 1, 0)
            while draft and not self._reserve(sequence, 1 + len(draft)):
                draft.pop()
            drafts.append(draft)
        return drafts if any(drafts) else []

    def publish(self, sequence: Sequence, read: int) -> None:
        """Names a text's pages that are full of known tokens, so that others can begin with them.

        Args:
            sequence: Running; one that lost its pages has none to name.
            read: Tokens that were read by steps whose results are known to be finite.
        """
        size = self.pool.page_size
        if (sequence.published + 1) * size > read:
            return
        known = min(read, sequence.read, sequence.known)
        while sequence.pages and (sequence.published + 1) * size <= known:
            start = sequence.published * size
            page, tokens = sequence.pages[sequence.published], sequence.tokens[start : start + size]
            sequence.key = self.pool.publish(page, sequence.key, tokens)
            sequence.published += 1

    def remove(self, sequence: Sequence) -> None:
        """Ends a text, waiting or running, and gives its pages back at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._slots.append(sequence.slot)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._empty(sequence)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Whether a text has pages for so many more tokens, taken where it lacks them."""
        lacking = self._pages(sequence.read + count) - len(sequence.pages)
        if lacking <= 0:
            return True
        taken = self.pool.take(lacking)
        if taken is None:
            return False
        sequence.pages += taken
        return True

    def _grow(self) -> list[Sequence]:
        """Room for one more token of each text that generates, in their order; the last make room."""
        lost: list[Sequence] = []
        for sequence in list(self.running):
            if sequence in lost or sequence.full:
                continue
            need = 1 if sequence.left == 1 else min(sequence.left, self.limits.chunk)
            first = sequence is self.running[0]
            while not self._reserve(sequence, need):
                if sequence.left > 1 and not first:
                    break  # It waits for its turn with the pages that it has.
                last = self.running[-1]
                self._preempt(last)
                lost.append(last)
                if last is sequence:
                    break
        return lost

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._empty(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1
        sequence.preempted += 1
        self.add(sequence)

    def _empty(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.read, sequence.published = [], 0, 0
        sequence.key = sequence.request.root

    def _admit(self, *, blocked: bool) -> None:
        """Starts waiting texts while there are rows, and pages for their first chunk."""
        while self.waiting and len(self.running) < self.limits.rows and not blocked:
            sequence = self.waiting[0]
            if sequence.pending:
                return  # Its last token is known after the step in flight.
            shared = self.pool.reuse and sequence.shares
            root = sequence.request.root
            sequence.pages, sequence.key = (
                self.pool.find(sequence.tokens, root) if shared else ([], root)
            )
            sequence.published = len(sequence.pages)
            sequence.read = sequence.published * self.pool.page_size
            if not self._reserve(sequence, min(sequence.left, self.limits.chunk)):
                self._empty(sequence)
                return
            if not sequence.preempted:
                sequence.cached_tokens = sequence.read
            self.waiting.popleft()
            sequence.slot = self._slots.pop()
            self.running.append(sequence)
            self.running.sort(key=attrgetter("rank"))
