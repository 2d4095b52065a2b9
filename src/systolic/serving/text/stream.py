"""A submitted request as its reader sees it: pieces from the engine's thread, read in another thread or an event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from systolic.serving.text.request import TextPiece


class Stream:
    """Implements :class:`systolic.serving.text.request.AnswerStream`.

    Args:
        cancel: Asks the engine to end the request.
    """

    def __init__(self, cancel: Callable[["Stream"], None]) -> None:
        self._cancel = cancel
        self._pieces: deque[TextPiece] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None
        self._ended = False

    def put(self, piece: TextPiece) -> None:
        """Hands a piece to the reader; from the engine's thread."""
        with self._changed:
            self._pieces.append(piece)
            wake = self._wake
            self._changed.notify()
        if wake is not None:
            wake()

    def cancel(self) -> None:
        """See :class:`systolic.serving.text.request.AnswerStream`."""
        self._cancel(self)

    def __iter__(self) -> Iterator[TextPiece]:
        """Pieces as they come; blocks."""
        while not self._ended:
            with self._changed:
                while not self._pieces:
                    self._changed.wait()
                piece = self._pieces.popleft()
            self._ended = piece.finish is not None
            yield piece

    async def __aiter__(self) -> AsyncIterator[TextPiece]:
        """Pieces as they come; waits in the running loop."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:
                self.cancel()  # The loop is closed: nobody reads any more.

        with self._changed:
            self._wake = wake
        while not self._ended:
            event.clear()
            with self._changed:
                pieces, self._pieces = self._pieces, deque()
            if not pieces:
                await event.wait()
            for piece in pieces:
                self._ended = piece.finish is not None
                yield piece
