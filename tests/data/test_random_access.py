"""Each example once per epoch, whatever the batch and the hosts; exact resume anywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systolic.core.errors import DataError, OptionError
from systolic.data.arrays import Arrays
from systolic.data.random_access import order, permute, uniform
from systolic.job.data import Read, Split


def numbered(count: int) -> Arrays:
    number = np.arange(count)
    return Arrays.of(train={"number": number, "label": number % 3})


def read(**changes) -> Read:
    return Read(**{"split": Split.train, "batch": 4, "epochs": 1, **changes})


def numbers(batches) -> list[int]:
    return [int(n) for batch in batches for n in batch["number"][batch["mask"] > 0]]


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63))
def test_permute_is_a_permutation(size, seed):
    out = permute(np.arange(size), size, np.array([seed], np.uint64))
    assert np.array_equal(np.sort(out), np.arange(size))


def test_shuffle_is_unlike_between_epochs_and_seeds_and_covers_evenly():
    size = 1000
    epochs = order(np.arange(20 * size), size, 1, True).reshape(20, size)
    assert all(np.array_equal(np.sort(epoch), np.arange(size)) for epoch in epochs)
    agree = np.mean(epochs[0] == epochs[1])
    assert agree < 0.01
    # Spearman correlation of place and example is about 0 +- 1/sqrt(size) for a fair shuffle.
    for epoch in epochs:
        assert abs(np.corrcoef(epoch, np.arange(size))[0, 1]) < 0.15
        assert abs(np.corrcoef(epoch[:-1], epoch[1:])[0, 1]) < 0.15
    other = order(np.arange(size), size, 2, True)
    assert np.mean(other == epochs[0]) < 0.01


def test_uniform_belongs_to_the_position():
    whole = uniform(3, np.arange(1000), 4)
    assert np.array_equal(whole[500:510], uniform(3, np.arange(500, 510), 4))
    assert whole.min() >= 0
    assert whole.max() < 1
    assert abs(whole.mean() - 0.5) < 0.02
    assert np.abs(np.corrcoef(whole.T) - np.eye(4)).max() < 0.15


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 16),
    shards=st.integers(1, 4),
    shuffle=st.booleans(),
    epochs=st.integers(1, 2),
)
def test_each_example_once_per_epoch_over_all_hosts(size, batch, shards, shuffle, epochs):
    data = numbered(size)
    hosts = [
        list(
            data.open(
                read(
                    batch=batch, shards=shards, shard=shard, shuffle=shuffle, epochs=epochs, seed=9
                )
            )
        )
        for shard in range(shards)
    ]
    assert len({len(host) for host in hosts}) == 1
    seen = sorted(n for host in hosts for n in numbers(host))
    assert seen == sorted(list(range(size)) * epochs)
    for host in hosts:
        for one in host:
            assert one["number"].shape == (batch,)
            assert one["mask"].dtype == np.float32
            assert np.all(one["label"][one["mask"] == 0] == -1)


def test_the_order_is_the_same_for_every_number_of_hosts():
    data = numbered(37)
    alone = data.open(read(batch=12, epochs=None, seed=4))
    pair = [data.open(read(batch=6, epochs=None, seed=4, shards=2, shard=s)) for s in (0, 1)]
    for _ in range(10):
        parts = [next(host)["number"] for host in pair]
        assert np.array_equal(next(alone)["number"], np.concatenate(parts))
    for opened in (alone, *pair):
        opened.close()


@settings(max_examples=15, deadline=None)
@given(before=st.integers(0, 30), size=st.integers(1, 30), batch=st.integers(1, 9))
def test_resume_is_exact(before, size, batch):
    data = numbered(size)
    first = data.open(read(batch=batch, epochs=None, seed=5))
    for _ in range(before):
        next(first)
    state = first.get_state()
    second = data.open(read(batch=batch, epochs=None, seed=5))
    second.set_state(state)
    assert second.get_state() == state
    for _ in range(5):
        assert np.array_equal(next(first)["number"], next(second)["number"])
    assert first.get_state() == second.get_state()
    first.close()
    second.close()


def test_a_position_goes_back_and_outlives_another_batch_size():
    data = numbered(50)
    batches = data.open(read(epochs=None, seed=1))
    start = batches.get_state()
    first = next(batches)["number"]
    state = batches.get_state()
    following = np.concatenate([next(batches)["number"] for _ in range(2)])
    batches.set_state(start)
    assert np.array_equal(next(batches)["number"], first)
    wider = data.open(read(epochs=None, seed=1, batch=8))
    wider.set_state(state)
    assert np.array_equal(next(wider)["number"], following)
    batches.close()
    wider.close()


def test_a_position_of_other_data_is_refused():
    state = numbered(10).open(read()).get_state()
    with pytest.raises(DataError, match="saved with 10 examples, the data now has 11 examples"):
        numbered(11).open(read()).set_state(state)
    with pytest.raises(DataError, match="seed"):
        numbered(10).open(read(seed=3)).set_state(state)


@pytest.mark.slow
def test_worker_processes_give_the_same_batches_and_resume():
    data = numbered(30)
    threads = data.open(read(epochs=None))
    workers = data.open(read(epochs=None, workers=2))
    for _ in range(5):
        assert np.array_equal(next(threads)["number"], next(workers)["number"])
    state = workers.get_state()
    assert state == threads.get_state()
    expected = [next(workers)["number"] for _ in range(4)]
    workers.close()
    resumed = data.open(read(epochs=None, workers=2))
    resumed.set_state(state)
    for want in expected:
        assert np.array_equal(next(resumed)["number"], want)
    resumed.close()
    threads.close()


def test_bad_data_is_said_in_one_line():
    with pytest.raises(DataError, match="differ in length"):
        Arrays.of(train={"a": np.zeros(3), "b": np.zeros(4)})
    with pytest.raises(DataError, match="validation split has no examples"):
        numbered(3).open(read(split=Split.validation))
    with pytest.raises(DataError, match="has no examples"):
        Arrays.of(train={"a": np.zeros((0, 2))}).open(read())
    with pytest.raises(DataError, match="did you mean train"):
        Arrays.call(lambda: {"trian": {"a": np.zeros(1)}}).fields()
    with pytest.raises(DataError, match="must hold numbers"):
        Arrays.of(train={"a": np.array(["x"])})
    with pytest.raises(DataError, match="more than int32"):
        Arrays.of(train={"a": np.array([2**40])})
    with pytest.raises(OptionError, match="shard is 2 of 2"):
        numbered(3).open(read(shard=2, shards=2))
    declared = Arrays.call(lambda: {"train": {"a": np.zeros((2, 3))}}, fields=numbered(1).fields())
    with pytest.raises(DataError, match="make them agree"):
        declared.open(read())


def test_fields_are_declared_or_read_and_64_bits_become_32():
    made = []

    def load():
        made.append(1)
        return {"train": {"x": np.zeros((2, 3)), "label": np.zeros(2, np.int64)}}

    data = Arrays.call(load, names=("a", "b"))
    assert not made
    assert data.fields()["x"].shape == (3,)
    assert data.fields()["x"].dtype == "float32"
    assert data.size(Split.train) == 2
    assert data.size(Split.test) == 0
    assert data.labels() == ("a", "b")
    assert next(data.open(read(batch=2)))["label"].dtype == np.int32
    assert made == [1]
