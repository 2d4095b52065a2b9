"""Batches on devices: order, shardings, ends, errors, and the position of what was consumed."""

import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from systolic.core.errors import DataError
from systolic.data.arrays import Arrays
from systolic.data.batches import Blocks, DeviceBatches, ProcessShare
from systolic.job.data import Read, Split

DATA = Arrays.of(train={"number": np.arange(24)})


def placed(epochs=None, ahead=2) -> DeviceBatches:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    read = Read(split=Split.train, batch=4, epochs=epochs)
    return DeviceBatches(whole(DATA.open(read)), {"number": sharding, "mask": sharding}, ahead)


def whole(batches) -> Blocks:
    """All of each batch, read by this process."""
    return Blocks(DATA, ProcessShare(rows=4, count=1, blocks=(0,)), lambda share, block: batches)


def test_batches_come_in_order_as_device_arrays_and_end():
    want = [b["number"] for b in DATA.open(Read(split=Split.train, batch=4, epochs=1))]
    with placed(epochs=1) as batches:
        have = list(batches)
        assert all(isinstance(b["number"], jax.Array) for b in have)
        assert [b["number"].tolist() for b in have] == [w.tolist() for w in want]
        with pytest.raises(StopIteration):
            next(batches)
        assert batches.waited_seconds > 0


@pytest.mark.parametrize("ahead", [1, 4])
def test_the_position_is_of_the_last_batch_consumed(ahead):
    with placed(ahead=ahead) as first, placed(ahead=ahead) as second:
        start = first.get_state()
        seen = [next(first)["number"].tolist() for _ in range(5)]
        state = first.get_state()
        following = [next(first)["number"].tolist() for _ in range(3)]
        second.set_states([state])
        assert [next(second)["number"].tolist() for _ in range(3)] == following
        first.set_states([start])
        assert [next(first)["number"].tolist() for _ in range(5)] == seen
        assert first.get_state() == state


def test_an_error_of_the_data_reaches_the_consumer_and_closing_ends_the_thread():
    class Broken:
        def __init__(self):
            self.left = 2

        def __next__(self):
            self.left -= 1
            if self.left < 0:
                raise DataError("the file is damaged")
            return {"number": np.zeros(4, np.int32)}

        def get_state(self):
            return b"%d" % self.left

        def close(self):
            pass

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    batches = DeviceBatches(whole(Broken()), {"number": NamedSharding(mesh, PartitionSpec())})
    next(batches)
    next(batches)
    with pytest.raises(DataError, match="damaged"):
        next(batches)
    batches.close()
    assert not [t for t in threading.enumerate() if t.name == "systolic-feed"]


def test_a_device_holds_parts_of_blocks(monkeypatch: pytest.MonkeyPatch):
    """Three blocks of four rows over two devices of six: as where three of four processes are left."""

    def read(share: ProcessShare, block: int):
        return DATA.open(Read(split=Split.train, batch=4, shuffle=False, shard=block, shards=3))

    def halves(shape, sharding, shard):
        return np.concatenate([shard((slice(0, 6),)), shard((slice(6, 12),))])

    monkeypatch.setattr(jax, "make_array_from_callback", halves)
    blocks = Blocks(DATA, ProcessShare(rows=12, count=1, blocks=(0,)), read, 3)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data"))
    with DeviceBatches(blocks, {"number": sharding, "mask": sharding}) as batches:
        assert [next(batches)["number"].tolist() for _ in range(2)] == [
            list(range(12)),
            list(range(12, 24)),
        ]
