"""Blocks of a batch: the fewest that fit what processes hold, and positions that another number of them takes up."""

import json

import pytest

from systolic.core.errors import DataError
from systolic.data.arrays import Arrays
from systolic.data.process_share import Blocks, ProcessShare, first_reader
from systolic.job.data import Data, Read, Split

DATA = Arrays.of(train={"number": list(range(24))})


@pytest.mark.parametrize(
    ("held", "count", "blocks"),
    [
        ({0: {0, 1, 2, 3}}, 1, (0,)),
        ({0: {0}, 1: {0}}, 1, (0,)),
        ({0: {0, 1}, 1: {2, 3}}, 2, (0,)),
        # v5e-16 with fsdp 4 x tensor 4: two hosts share two parts.
        ({0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}}, 2, (0,)),
        ({0: {0, 2}, 1: {1, 3}}, 4, (0, 2)),
        ({0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}, 4, (0, 2)),
        # One process holds all parts and the other half of them.
        ({0: {0, 1, 2, 3}, 1: {2, 3}}, 2, (0, 1)),
        # v5e-16 with fsdp 16: the ring leaves a host and comes back.
        (
            {0: {0, 1, 6, 15}, 1: {2, 3, 4, 5}, 2: {7, 12, 13, 14}, 3: {8, 9, 10, 11}},
            16,
            (0, 1, 6, 15),
        ),
    ],
)
def test_the_fewest_blocks_that_every_process_holds_whole(held, count, blocks):
    share = ProcessShare.of(held, 0, 48)
    assert (share.count, share.blocks, share.block_rows) == (count, blocks, 48 // count)


def opened(data: Data, count: int, *blocks: int, rows: int = 8) -> Blocks:
    share = ProcessShare(rows=rows, count=count, blocks=blocks)

    def read(block: int):
        return data.open(Read(split=Split.train, batch=share.block_rows, shard=block, shards=count))

    return Blocks(data, share, read)


def numbers(batch) -> list[int]:
    return [int(n) for block in sorted(batch) for n in batch[block]["number"]]


def test_any_number_of_processes_goes_on_where_a_table_was():
    alone = opened(DATA, 1, 0)
    pair = [opened(DATA, 4, 0, 3), opened(DATA, 4, 1, 2)]
    for _ in range(5):
        want = numbers(next(alone))
        first, second = (numbers(next(one)) for one in pair)
        assert [*first[:2], *second, *first[2:]] == want
    positions = [one.get_state() for one in pair]
    assert first_reader(positions[1]) == first_reader(alone.get_state())
    following = numbers(next(alone))
    for count in (1, 2, 4):
        again = [opened(DATA, count, block) for block in range(count)]
        for one in again:
            one.set_states(positions)
        assert [n for one in again for n in numbers(next(one))] == following


def test_positions_of_processes_that_each_read_one_part():
    """As runs of several processes wrote them before blocks had numbers: one bare position a process."""
    two = [DATA.open(Read(split=Split.train, batch=4, shard=s, shards=2)) for s in (0, 1)]
    for one in two:
        next(one)
    positions = [one.get_state() for one in two]
    again = opened(DATA, 2, 1)
    again.set_states(positions)
    assert numbers(next(again)) == next(two[1])["number"].tolist()


def test_a_missing_part_is_refused():
    half = opened(DATA, 4, 0, 3)
    with pytest.raises(DataError, match="part 1 is missing"):
        opened(DATA, 4, 1).set_states([half.get_state()])


class Own(Arrays):
    """Data whose readers each have a position of their own and no rule to join them."""

    __slots__ = ()

    def open(self, read: Read):
        inner = Arrays.open(self, read)

        class Reader:
            def __next__(self):
                return next(inner)

            def get_state(self):
                return json.dumps([read.shard, inner.get_state().decode()]).encode()

            def set_state(self, state):
                inner.set_state(json.loads(state)[1].encode())

            def close(self):
                inner.close()

        return Reader()


def test_positions_without_a_rule_are_taken_up_by_as_many_readers_only():
    data = Own.of(train={"number": list(range(24))})
    positions = [opened(data, 2, block).get_state() for block in (0, 1)]
    opened(data, 2, 1).set_states(positions)
    with pytest.raises(DataError, match="2 readers of Own data"):
        opened(data, 4, 1).set_states(positions)
    with pytest.raises(DataError, match="2 readers of Own data"):
        opened(data, 1, 0).set_states(positions)
