"""Pieces of a text come whole and in order to a thread and to an event loop; phases of a request add up."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from systolic.serving.text.request import Finish, Stream, TextOutput

PIECES = [TextOutput(text=word) for word in "abc"] + [TextOutput(text="d", finish=Finish.length)]


def nothing(_: Stream) -> None:
    pytest.fail("nobody left")


def writing(stream: Stream, before: Callable[[], object] = lambda: None) -> threading.Thread:
    """Puts the pieces from another thread, as an engine does."""

    def put() -> None:
        before()
        for piece in PIECES:
            stream.put(piece)

    writer = threading.Thread(target=put)
    writer.start()
    return writer


@pytest.mark.parametrize("early", [True, False], ids=["there", "awaited"])
def test_pieces_come_in_order(early: bool) -> None:
    read, looped, reading = Stream(nothing), Stream(nothing), threading.Event()

    async def follow() -> list[TextOutput]:
        if not early:
            # Runs when the reader below waits for its first piece.
            asyncio.get_running_loop().call_soon(reading.set)
        return [piece async for piece in looped]

    writer = writing(looped, (lambda: None) if early else (lambda: reading.wait(20)))
    if early:
        writer.join()
    assert asyncio.run(follow()) == PIECES
    writer.join()
    writer = writing(read)
    assert list(read) == PIECES
    writer.join()


def test_a_piece_for_a_loop_that_is_closed_cancels_the_request() -> None:
    left: list[Stream] = []
    stream = Stream(left.append)

    async def leave() -> None:
        async for _ in stream:
            return

    stream.put(PIECES[0])
    asyncio.run(leave())
    assert left == []
    stream.put(PIECES[1])
    assert left == [stream]


def test_phases_are_a_partition_of_the_time() -> None:
    whole = TextOutput(submitted_ns=0, queue_seconds=1.0, first_token_seconds=3.0, seconds=7.0)
    assert whole.phases() == {"queue": 1.0, "prefill": 2.0, "decode": 4.0}
    none = TextOutput(submitted_ns=0, queue_seconds=1.0, first_token_seconds=None, seconds=7.0)
    assert none.phases() == {"queue": 1.0, "prefill": 6.0}
