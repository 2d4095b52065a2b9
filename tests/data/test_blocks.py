"""Blocks of a batch: the fewest that fit what processes hold, and positions that another number of them takes up."""

import json
from pathlib import Path

import numpy as np
import pytest

from systolic.core.errors import DataError
from systolic.data.arrays import Arrays
from systolic.data.batches import Blocks, FirstExamples, ProcessShare, first_reader
from systolic.data.text.documents import Documents
from systolic.job.data import MASK, Data, Read, Split

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


def opened(data: Data, count: int, *blocks: int, rows: int = 8, begin: int = 1) -> Blocks:
    def read(share: ProcessShare, block: int):
        read = Read(split=Split.train, batch=share.block_rows, shard=block, shards=share.count)
        return data.open(read)

    return Blocks(data, ProcessShare(rows=rows, count=count, blocks=blocks), read, begin)


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


def test_positions_without_a_rule_are_taken_up_by_no_more_processes():
    data = Own.of(train={"number": list(range(24))})
    pair = [opened(data, 2, block) for block in (0, 1)]
    positions = [one.get_state() for one in pair]
    opened(data, 2, 1).set_states(positions)
    with pytest.raises(DataError, match="2 readers of Own data"):
        opened(data, 4, 1).set_states(positions)
    alone = opened(data, 1, 0)
    alone.set_states(positions)
    assert numbers(next(alone)) == [n for one in pair for n in numbers(next(one))]


@pytest.mark.parametrize(
    ("count", "blocks", "into", "found"),
    [
        (1, (0,), 2, (0, 1)),
        (1, (0,), 1, (0,)),
        # Three of four processes are here: each holds a block and a part of another one or two.
        (3, (0,), 4, (0, 1)),
        (3, (1,), 4, (1, 2)),
        (2, (1,), 4, (2, 3)),
        # More processes than blocks, rows that don't divide, and more blocks than memory should hold.
        (2, (1,), 1, None),
        (1, (0,), 5, None),
        (1, (0,), 24, None),
    ],
)
def test_fewer_processes_read_the_blocks_of_more(count, blocks, into, found):
    share = ProcessShare(rows=48, count=count, blocks=blocks).in_blocks(into)
    assert (share and share.blocks) == found
    assert share is None or share.block_rows * into == 48


@pytest.fixture
def text(tmp_path: Path) -> Documents:
    """A corpus of a few windows, each line another one."""
    for number in range(16):
        lines = (f"{number} {line} {'x' * 60}\n" for line in range(100))
        (tmp_path / f"{number:02d}.txt").write_text("".join(lines))
    return Documents(path=tmp_path, sequence=32, validation_share=0, shuffle_windows=4)


def rows_of(*batches: dict[int, dict[str, np.ndarray]]) -> np.ndarray:
    """The batch that processes read together."""
    parts = {block: part["tokens"] for batch in batches for block, part in batch.items()}
    return np.concatenate([parts[block] for block in sorted(parts)])


def test_one_process_reads_the_text_of_two(text: Documents):
    """The same rows in every step: from the first, after a move in the middle, and back."""
    pair = [opened(text, 2, block, rows=48) for block in (0, 1)]
    wanted = []
    for _ in range(90):
        # As the older format and this one have them.
        wanted.append(([one.get_state() for one in pair], rows_of(*(next(one) for one in pair))))
    alone = opened(text, 1, 0, rows=48, begin=2)
    for step, (_, rows) in enumerate(wanted[:3]):
        np.testing.assert_array_equal(rows_of(next(alone)), rows, err_msg=str(step))
    # Within a round of windows, and in the second epoch.
    for step in (2, 31, 85):
        moved = opened(text, 1, 0, rows=48)
        moved.set_states(wanted[step][0])
        assert moved.get_state() != wanted[step][0][0]
        for _, rows in wanted[step : step + 3]:
            np.testing.assert_array_equal(rows_of(next(moved)), rows)
    assert text.epochs(first_reader(wanted[85][0][0])) > 1
    back = [opened(text, 2, block, rows=48) for block in (0, 1)]
    for one in back:
        one.set_states([moved.get_state()])
    np.testing.assert_array_equal(rows_of(*(next(one) for one in back)), wanted[88][1])
    three = [opened(text, 3, block, rows=48) for block in range(3)]
    for one in three:
        one.set_states(wanted[31][0])
    for one in (*pair, alone, moved, *back, *three):
        one.close()


def test_an_evaluation_ends_at_an_example_not_at_a_batch():
    """Ten examples, in batches of 4 and of 6 and 2 blocks: a batch that holds none of them is not read."""
    for rows, batches in ((4, 3), (6, 2)):
        found, read = [], 0
        for block in (0, 1):
            share = ProcessShare(rows=rows, count=2, blocks=(block,))
            one = DATA.open(
                Read(
                    split=Split.train,
                    batch=rows // 2,
                    shuffle=False,
                    shard=block,
                    shards=2,
                    epochs=1,
                )
            )
            for batch in (first := FirstExamples(one, share, block, 10)):
                found += batch["number"][batch[MASK] > 0].tolist()
                read += 1
            first.close()
        assert sorted(found) == list(range(10))
        assert read == 2 * batches
